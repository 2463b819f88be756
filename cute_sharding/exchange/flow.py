"""What flows from one operand to one result of an exchange: which rank sends what to whom.

Both sides work it out from the shardings alone, and come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

from cute_sharding.exchange.copies import Copy, copy_of, folded, packed
from cute_sharding.exchange.meetings import Met, met, of_every, side_of, sizes_of
from cute_sharding.exchange.placed import Placed
from cute_sharding.relations.moves import Link
from cute_sharding.relations.rows import between, needed_rows
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Runs, count_rows, span

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
        takers = [] if device is None else self._takers(device)
        if device is None or not takers:
            return
        owners = self._owners(device)
        k = owners.index(rank)
        for i in self._of_those(len(takers), k, len(owners)):
            peer, runs = takers[i]
            if not self._holds_it(peer, device):
                some = self._share(runs, i, len(takers), k, len(owners))
                if some is not None:
                    yield LinkMessage(peer, self.link, some)

    def sent_to(self, rank: int) -> Iterator[LinkMessage]:
        """What a rank receives, sender by sender."""
        device = self.target.mesh.coordinates(rank)
        if device is None:
            return
        for holder, runs in self._met(self.source, self._fixed(device), self._givers(device)):
            if self._holds_it(rank, holder):
                continue
            owners = self._owners(holder)
            if len(owners) == 1:
                yield LinkMessage(owners[0], self.link, runs)
                continue
            many, i = self._number(holder, rank)
            for k in self._of_those(len(owners), i, many):
                some = self._share(runs, i, many, k, len(owners))
                if some is not None:
                    yield LinkMessage(owners[k], self.link, some)

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
        owners = self._owners(had)
        if is_sent and runs is not None and len(owners) > 1:
            many, i = self._number(had, receiver)
            runs = self._share(runs, i, many, owners.index(sender), len(owners))
        return 0 if runs is None else prod(map(count_rows, runs))

    # -- those that hold the same ------------------------------------------------------------------

    def _owners(self, holder: Device) -> list[int]:
        """The ranks that hold the same and share the sending."""
        sharing = [m for m in self.source.replicated if m not in self.aligned]
        return self.source.mesh.slice_of(holder, sharing)

    def _number(self, holder: Device, receiver: int) -> tuple[int, int]:
        """How many need something of a device, and which one of them a rank is."""
        takers = [rank for rank, _ in self._takers(holder)]
        return len(takers), takers.index(receiver)

    def _of_those(self, many: int, k: int, parts: int) -> range:
        """Those of ``many`` with which the k-th of so many on the other side has to do."""
        if self.is_even:
            return range(many)
        return range(k * many // parts, -(-(k + 1) * many // parts))

    def _share(
        self, runs: tuple[Runs, ...], i: int, takers: int, k: int, owners: int
    ) -> tuple[Runs, ...] | None:
        """Of the box of the i-th receiver what the k-th of those that hold it sends."""
        return _overlap(runs, *((0, 1) if self.is_even else (i, takers)), k, owners)

    def _fixed(self, device: Device) -> tuple[tuple[int, int], ...]:
        """The coordinates that senders and receivers have alike."""
        return tuple([(m, device[m]) for m in self.aligned])

    def _holds_it(self, rank: int, holder: Device) -> bool:
        """Whether a rank holds the same as ``holder``."""
        device = self.source.mesh.coordinates(rank)
        return device is not None and all(device[m] == holder[m] for m in self.source.cut)

    # -- where rows meet ---------------------------------------------------------------------------

    def _takers(self, holder: Device) -> list[tuple[int, tuple[Runs, ...]]]:
        """The ranks that need something of what a device holds, and what, in the order of their
        coordinates, those that need the same one after the other.
        """
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
        alike = [m for m in self.target.replicated if m not in self.aligned]
        return [
            (rank, runs)
            for device, runs in self._met(self.target, fixed, mets)
            for rank in self.target.mesh.slice_of(device, alike)
        ]

    def _met(
        self, placed: Placed, fixed: Iterable[tuple[int, int]], mets: Sequence[Met]
    ) -> Iterator[tuple[Device, tuple[Runs, ...]]]:
        """The devices where something of every dim is met, and the rows; one of those that hold the
        same.
        """
        for some in product(*[zip(found.places, found.runs) for found in mets]):
            at = {**dict(fixed), **dict(chain.from_iterable(place for place, _ in some))}
            device = tuple([at.get(m, 0) for m in range(len(placed.mesh.sizes))])
            yield device, tuple([runs for _, runs in some])

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


def _overlap(
    runs: tuple[Runs, ...], i: int, takers: int, k: int, owners: int
) -> tuple[Runs, ...] | None:
    """Of the box of the i-th of ``takers`` what the k-th of ``owners`` sends: the share by which
    [i / takers, (i + 1) / takers) and [k / owners, (k + 1) / owners) overlap; None: nothing.
    """
    low, high = max(k * takers - i * owners, 0), min((k + 1) * takers - i * owners, owners)
    if (low, high) == (0, owners):
        return runs
    counts = [count_rows(found) for found in runs]
    if low >= high or not counts:
        return runs if low == 0 and high > 0 and not counts else None
    d = max(range(len(runs)), key=lambda d: (counts[d] % owners == 0, counts[d]))
    some = span(runs[d], counts[d] * low // owners, counts[d] * high // owners)
    return (*runs[:d], some, *runs[d + 1 :]) if some else None
