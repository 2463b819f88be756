"""The flow from one operand of an exchange: which rank sends what to whom.

Ranks that differ on mesh dims which cut the operand hold different elements of it; ranks that
differ only on other mesh dims are a *class*, and hold the same. The elements that ranks outside a
class need of it form one sequence, receiver by receiver, and each rank of the class sends an equal
share of it. Sender and receiver compute this from the shardings alone, with the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from cute_sharding.exchange.copies import Copy
from cute_sharding.exchange.placed import Placed
from cute_sharding.sharding.chains import Device

# The share of every message that is sent: (its number, the number of shares).
Turn: TypeAlias = "tuple[int, int]"
ALL: Turn = (0, 1)
# What a rank keeps: (operand, result, copies from the one to the other).
Own: TypeAlias = "tuple[int, int, tuple[Copy, ...]]"


class Message(Protocol):
    """The elements that one rank sends another."""

    @property
    def peer(self) -> int:
        """The other rank."""

    @property
    def size(self) -> int:
        """The number of elements."""

    def to(self: M, peer: int) -> M:
        """The same message, to or from another rank."""

    def share(self: M, first: int, stop: int, parts: int) -> M | None:
        """The part of the message from element ``first`` up to ``stop``, or about these:
        consecutive shares have each element once. None: it is empty.

        Args:
            parts: the number of ranks that share the sending.
        """

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Operand by operand, the copies into a buffer in which the message starts at ``at``."""

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Result by result, the copies out of a buffer in which the message starts at ``at``."""


M = TypeVar("M", bound=Message)


def in_turn(messages: Iterable[M], turn: Turn) -> Iterator[M]:
    """The part of each message that is sent in that turn: a share, as large as in other turns."""
    k, rounds = turn
    if rounds == 1:
        yield from messages
        return
    for message in messages:
        some = message.share(*_share(message.size, k, rounds), rounds)
        if some is not None:
            yield some


class Flow(ABC, Generic[M]):
    """The flow from one operand, placed as ``source``, to results.

    Attributes:
        source: the operand on its mesh.
    """

    source: Placed

    @abstractmethod
    def between(self, holder: Device, rank: int) -> M | None:
        """All that a rank needs of the elements on a device; None: nothing."""

    @abstractmethod
    def _takers(self, holder: Device) -> Iterable[tuple[Sequence[int], M]]:
        """The ranks that need elements of this device, with these elements; ranks with equal needs
        together. Always in the same order.
        """

    @abstractmethod
    def _givers(self, rank: int) -> Iterable[tuple[Device, M]]:
        """One device of each class that holds elements which a rank needs, with these elements."""

    @abstractmethod
    def own(self, rank: int) -> Iterator[Own]:
        """The copies of what a rank needs and holds itself."""

    def _owners(self, holder: Device) -> list[int]:
        """The ranks of the device's class, which share the sending."""
        return self.source.mesh.slice_of(holder, self.source.replicated)

    # -- who sends what ----------------------------------------------------------------------------

    def kept_by(self, rank: int) -> M | None:
        """The elements that a rank needs and holds itself; None: there are none."""
        device = self.source.mesh.coordinates(rank)
        return None if device is None else self.between(device, rank)

    def sent_by(self, rank: int) -> Iterator[M]:
        """The messages that a rank sends, receiver by receiver."""
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
        """The messages that a rank receives, sender by sender."""
        for holder, message in self._givers(rank):
            if self._holds_it(rank, holder):
                continue
            owners = self._owners(holder)
            if len(owners) == 1:
                yield message.to(owners[0])
            else:
                yield from self._shares(rank, holder, message, owners)

    def amount(self, sender: int, receiver: int) -> int:
        """The elements that a rank sends another, computed for these two alone; for one rank, the
        elements that it keeps.
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
        """The number of different elements that a rank needs and does not hold."""
        return sum([m.size for holder, m in self._givers(rank) if not self._holds_it(rank, holder)])

    def _holds_it(self, rank: int, holder: Device) -> bool:
        """Whether a rank is in the class of ``holder``."""
        device = self.source.mesh.coordinates(rank)
        return device is not None and all(device[m] == holder[m] for m in self.source.cut)

    def _asked(self, holder: Device) -> list[tuple[list[int], M]]:
        """The needs of ranks outside a class, in the order in which its ranks share the sending:
        (ranks with equal needs, these elements).
        """
        return [
            (others, message)
            for peers, message in self._takers(holder)
            if (others := [peer for peer in peers if not self._holds_it(peer, holder)])
        ]

    def _shares(self, rank: int, holder: Device, message: M, owners: Sequence[int]) -> Iterator[M]:
        """The share of a message to a rank that each of the owners sends."""
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
    """The start and the end of the k-th of ``parts`` shares of ``total`` elements."""
    return k * total // parts, (k + 1) * total // parts
