"""What flows from one operand of an exchange: which rank sends what to whom.

Ranks that differ on mesh dims which cut the operand hold different elements of it; those that
differ on others alone are a *class*, that holds the same. What the ranks outside a class need of it
is one row of elements, receiver by receiver, of which each rank of the class sends its share. Both
sides work it out from the shardings alone, and come to the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from cute_sharding.exchange.copies import Copy
from cute_sharding.exchange.placed import Placed
from cute_sharding.sharding.chains import Device

# The share of every message that goes: its number, and how many there are.
Turn: TypeAlias = "tuple[int, int]"
ALL: Turn = (0, 1)
# What a rank keeps: an operand, a result, and the copies from the one to the other.
Own: TypeAlias = "tuple[int, int, tuple[Copy, ...]]"


class Message(Protocol):
    """What one rank sends another."""

    @property
    def peer(self) -> int:
        """The other rank."""

    @property
    def size(self) -> int:
        """In elements."""

    def to(self: M, peer: int) -> M:
        """The same, to or from another rank."""

    def share(self: M, first: int, stop: int, parts: int) -> M | None:
        """Of its elements those from ``first`` on and before ``stop``, or about those: each is in
        one of shares that follow one another. None: there are none.

        Args:
            parts: how many ranks share the sending.
        """

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Operand by operand, the copies into a buffer, from there on."""

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Result by result, those out of a buffer in which it lies from there on."""


M = TypeVar("M", bound=Message)


def in_turn(messages: Iterable[M], turn: Turn) -> Iterator[M]:
    """What of messages goes in that turn: of each a share, as large as those of other turns."""
    k, rounds = turn
    if rounds == 1:
        yield from messages
        return
    for message in messages:
        some = message.share(*_share(message.size, k, rounds), rounds)
        if some is not None:
            yield some


class Flow(ABC, Generic[M]):
    """From one operand, that lies as ``source`` says, to results.

    Attributes:
        source: the operand on its mesh.
    """

    source: Placed

    @abstractmethod
    def between(self, holder: Device, rank: int) -> M | None:
        """All that a rank needs of what a device holds; None: nothing."""

    @abstractmethod
    def _takers(self, holder: Device) -> Iterable[tuple[Sequence[int], M]]:
        """The ranks that need something of it, those that need the same together, and what; all in
        one order.
        """

    @abstractmethod
    def _givers(self, rank: int) -> Iterable[tuple[Device, M]]:
        """The classes that hold something of what a rank needs, by one device each, and what."""

    @abstractmethod
    def own(self, rank: int) -> Iterator[Own]:
        """What a rank has itself of what it needs."""

    def _owners(self, holder: Device) -> list[int]:
        """The ranks that hold the same and share the sending."""
        return self.source.mesh.slice_of(holder, self.source.replicated)

    # -- who sends what ----------------------------------------------------------------------------

    def kept_by(self, rank: int) -> M | None:
        """What a rank has itself of what it needs; None: nothing."""
        device = self.source.mesh.coordinates(rank)
        return None if device is None else self.between(device, rank)

    def sent_by(self, rank: int) -> Iterator[M]:
        """What a rank sends, receiver by receiver."""
        device = self.source.mesh.coordinates(rank)
        if device is None:
            return
        owners, asked = self._owners(device), self._asked(device)
        if len(owners) == 1:
            for peers, message in asked:
                yield from [message.to(peer) for peer in peers]
            return
        sizes = [message.size for _, message in asked]
        total, at = sum([len(peers) * size for (peers, _), size in zip(asked, sizes)]), 0
        first, stop = _share(total, owners.index(rank), len(owners))
        for (peers, message), size in zip(asked, sizes):
            for i in range(max((first - at) // size, 0), min(-((at - stop) // size), len(peers))):
                begin = at + i * size
                some = message.share(first - begin, stop - begin, len(owners))
                if some is not None:
                    yield some.to(peers[i])
            at += len(peers) * size

    def sent_to(self, rank: int) -> Iterator[M]:
        """What a rank receives, sender by sender."""
        for holder, message in self._givers(rank):
            if self._holds_it(rank, holder):
                continue
            owners = self._owners(holder)
            if len(owners) == 1:
                yield message.to(owners[0])
            else:
                yield from self._shares(rank, holder, message, owners)

    def amount(self, sender: int, receiver: int) -> int:
        """How many elements a rank sends another, found out for these two alone; of one rank, how
        many it keeps.
        """
        device = self.source.mesh.coordinates(sender)
        if device is None or (sender != receiver and self._holds_it(receiver, device)):
            return 0
        message = self.between(device, receiver)
        if message is None:
            return 0
        owners = self._owners(device)
        if sender == receiver or len(owners) == 1:
            return message.size
        shares = self._shares(receiver, device, message, owners)
        return sum([some.size for some in shares if some.peer == sender])

    def missed_by(self, rank: int) -> int:
        """How many elements a rank is to have and has not, each counted once."""
        return sum([m.size for holder, m in self._givers(rank) if not self._holds_it(rank, holder)])

    def _holds_it(self, rank: int, holder: Device) -> bool:
        """Whether a rank holds the same as ``holder``."""
        device = self.source.mesh.coordinates(rank)
        return device is not None and all(device[m] == holder[m] for m in self.source.cut)

    def _asked(self, holder: Device) -> list[tuple[list[int], M]]:
        """What ranks outside a class need of it, in the order in which its ranks share the sending:
        those that need the same, and what.
        """
        return [
            (others, message)
            for peers, message in self._takers(holder)
            if (others := [peer for peer in peers if not self._holds_it(peer, holder)])
        ]

    def _shares(self, rank: int, holder: Device, message: M, owners: Sequence[int]) -> Iterator[M]:
        """What of a message to a rank each of those sends that hold it."""
        size, many, total, before = message.size, len(owners), 0, 0
        for peers, each in self._asked(holder):
            if rank in peers:
                before = total + peers.index(rank) * size
            total += len(peers) * each.size
        for k in range(before * many // total, -(-(before + size) * many // total)):
            first, stop = _share(total, k, many)
            some = message.share(first - before, stop - before, many)
            if some is not None:
                yield some.to(owners[k])


def _share(total: int, k: int, parts: int) -> tuple[int, int]:
    """The k-th of so many parts of a row: where it begins, and ends."""
    return k * total // parts, (k + 1) * total // parts
