"""What flows from one operand to one result of an exchange: which rank sends what to whom.

Both sides work it out from the shardings alone, and come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

from cute_sharding.exchange.copies import Copy, copy_of, folded, packed
from cute_sharding.exchange.meetings import Met, met, of_every, side_of, sizes_of
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.takers import Takers, count_on, device_at, number_on, overlap
from cute_sharding.relations.moves import Link
from cute_sharding.relations.rows import between, needed_rows
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Runs, count_rows

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

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Operand by operand, the copies into a buffer, from there on."""

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Result by result, those out of a buffer in which it lies from there on."""


class LinkMessage(NamedTuple):
    """What one rank sends another through one link: for each dim of the link, rows x of the sender
    and y of the receiver.
    """

    peer: int
    link: Link
    runs: tuple[Runs, ...]

    @property
    def size(self) -> int:
        """In elements."""
        return prod(map(count_rows, self.runs))

    @property
    def copies(self) -> list[Copy]:
        """One for each choice of one run of each dim."""
        return [copy_of(self.link, runs) for runs in product(*self.runs)]

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """As of any message."""
        return [(self.link.source, _packed(self.copies, at))]

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """As of any message."""
        copies = _packed([copy.flipped for copy in self.copies], at)
        return [(self.link.target, [copy.flipped for copy in copies])]


def _packed(copies: Sequence[Copy], at: int) -> list[Copy]:
    """The elements of copies, one behind the other in a buffer."""
    found = []
    for copy in copies:
        found.append(packed(copy, at))
        at += prod(copy.sizes)
    return found


class Flow(NamedTuple):
    """From an operand that lies as ``source`` says to a result that is to lie as ``target`` says.

    Attributes:
        link: which rows of the result are which of the operand.
        aligned: mesh dims, of the one mesh that both are on, that replicate the operand, and on
            which a rank takes from those with its own coordinates.
        is_even: those that hold the same send each receiver an even share; else they share the
            receivers.
    """

    link: Link
    source: Placed
    target: Placed
    aligned: tuple[int, ...]
    is_even: bool

    def missed_by(self, rank: int) -> int:
        """How many elements a rank is to have and has not."""
        wanted = self.target.mesh.coordinates(rank)
        if wanted is None:
            return 0
        source, target = self.source, self.target
        had = wanted if source.mesh is target.mesh else source.mesh.coordinates(rank)
        need, has = 1, int(had is not None)
        for one, other in self.link.pairs:
            mine = side_of(target, other, wanted)
            if had is None:
                need *= count_rows(needed_rows(one, sizes_of(source, one), other, *mine))
                continue
            own = side_of(source, one, had)
            need *= count_rows(needed_rows(one, own.sizes, other, *mine))
            has *= count_rows(between(one, *own, other, *mine))
        return need - has

    def kept_by(self, rank: int) -> LinkMessage | None:
        """What a rank has itself of what it needs; None: nothing."""
        had = self.source.mesh.coordinates(rank)
        wanted = self.target.mesh.coordinates(rank)
        if had is None or wanted is None:
            return None
        kept = self.between(had, wanted)
        return kept if kept.size else None

    def between(self, had: Device, wanted: Device) -> LinkMessage:
        """What one device holds and another needs."""
        peer = self.target.mesh.rank(wanted)
        return LinkMessage(peer, self.link, self._box(had, wanted))

    def own(self, rank: int) -> Iterator[Own]:
        """The same, as copies."""
        own = self.kept_by(rank)
        if own is not None:
            yield own.link.source, own.link.target, tuple(folded(own.copies))

    def sent_by(self, rank: int) -> Iterator[LinkMessage]:
        """What a rank sends, receiver by receiver."""
        device = self.source.mesh.coordinates(rank)
        takers = None if device is None else self._takers(device)
        if device is None or takers is None:
            return
        k, owners = number_on(self.source, self._sharing, device), self._owners
        for i in self._of_those(takers.many, k, owners):
            receiver, runs = takers.at(i)
            peer = self.target.mesh.rank(receiver)
            if not self._holds_it(peer, device):
                some = self._share(runs, i, takers.many, k, owners)
                if some is not None:
                    yield LinkMessage(peer, self.link, some)

    def sent_to(self, rank: int) -> Iterator[LinkMessage]:
        """What a rank receives, sender by sender."""
        device = self.target.mesh.coordinates(rank)
        if device is None:
            return
        every = [zip(found.places, found.runs) for found in self._givers(device)]
        fixed = self._fixed(device)
        for some in product(*every):
            runs = tuple([found for _, found in some])
            places = [*fixed, *(at for place, _ in some for at in place)]
            holder = device_at(self.source, places, self._sharing, 0)
            if self._holds_it(rank, holder):
                continue
            if self._owners == 1:
                yield LinkMessage(self.source.mesh.rank(holder), self.link, runs)
            else:
                yield from self._shares(holder, device, runs)

    def _shares(
        self, holder: Device, receiver: Device, runs: tuple[Runs, ...]
    ) -> Iterator[LinkMessage]:
        """What each of those that hold the same sends of a box."""
        takers, sharing, owners = self._takers(holder), self._sharing, self._owners
        assert takers is not None, "the receiver is one"
        i = takers.number(receiver)
        places = [(m, k) for m, k in enumerate(holder) if m not in sharing]
        for k in self._of_those(owners, i, takers.many):
            some = self._share(runs, i, takers.many, k, owners)
            if some is not None:
                sender = device_at(self.source, places, sharing, k)
                yield LinkMessage(self.source.mesh.rank(sender), self.link, some)

    def amount(self, sender: int, receiver: int) -> int:
        """How many elements a rank sends another, found out for these two alone; of one rank, how
        many it keeps.
        """
        had = self.source.mesh.coordinates(sender)
        wanted = self.target.mesh.coordinates(receiver)
        if had is None or wanted is None:
            return 0
        is_sent = sender != receiver
        if is_sent and (self._holds_it(receiver, had) or self._fixed(had) != self._fixed(wanted)):
            return 0
        runs: tuple[Runs, ...] | None = self._box(had, wanted)
        if runs and not all(runs):
            return 0
        if is_sent and runs is not None and self._owners > 1:
            takers = self._takers(had)
            assert takers is not None, "the receiver is one"
            i, k = takers.number(wanted), number_on(self.source, self._sharing, had)
            runs = self._share(runs, i, takers.many, k, self._owners)
        return 0 if runs is None else prod(map(count_rows, runs))

    # -- those that hold the same ------------------------------------------------------------------

    @property
    def _sharing(self) -> tuple[int, ...]:
        """The mesh dims on which those that hold the same share the sending."""
        return tuple([m for m in self.source.replicated if m not in self.aligned])

    @property
    def _owners(self) -> int:
        return count_on(self.source, self._sharing)

    def _of_those(self, many: int, k: int, parts: int) -> range:
        """Those of ``many`` with which the k-th of so many on the other side has to do."""
        if self.is_even:
            return range(many)
        return range(k * many // parts, -(-(k + 1) * many // parts))

    def _share(
        self, runs: tuple[Runs, ...], i: int, takers: int, k: int, owners: int
    ) -> tuple[Runs, ...] | None:
        """Of the box of the i-th receiver what the k-th of those that hold it sends."""
        return overlap(runs, *((0, 1) if self.is_even else (i, takers)), k, owners)

    def _fixed(self, device: Device) -> tuple[tuple[int, int], ...]:
        """The coordinates that senders and receivers have alike."""
        return tuple([(m, device[m]) for m in self.aligned])

    def _holds_it(self, rank: int, holder: Device) -> bool:
        """Whether a rank holds the same as ``holder``."""
        device = self.source.mesh.coordinates(rank)
        return device is not None and all(device[m] == holder[m] for m in self.source.cut)

    # -- where rows meet ---------------------------------------------------------------------------

    def _takers(self, holder: Device) -> Takers | None:
        """Those that need something of what a device holds; None: nobody."""
        fixed = self._fixed(holder)
        mets = [
            met(
                one,
                *side_of(self.source, one, holder),
                other,
                *of_every(self.target, other, fixed),
                False,
            )
            for one, other in self.link.pairs
        ]
        if not all(found.places for found in mets):
            return None
        return Takers(self.target, fixed, tuple(mets))

    def _givers(self, wanted: Device) -> list[Met]:
        """Dim by dim, who has something of what a device needs."""
        return [
            met(
                other,
                *side_of(self.target, other, wanted),
                one,
                *of_every(self.source, one),
                True,
            )
            for one, other in self.link.pairs
        ]

    def _box(self, had: Device, wanted: Device) -> tuple[Runs, ...]:
        """What one device holds and another needs."""
        return tuple(
            [
                between(
                    one,
                    *side_of(self.source, one, had),
                    other,
                    *side_of(self.target, other, wanted),
                )
                for one, other in self.link.pairs
            ]
        )
