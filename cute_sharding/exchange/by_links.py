"""The flow from an operand to one result, dim by dim: boxes of rows, the intersections of the rows
that a class of ranks holds, mapped through a link, with those that a rank needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.copies import Copy, copy_of, fold, pack_copy
from cute_sharding.exchange.flow import Flow, Own
from cute_sharding.exchange.meetings import Met, meet_devices, of_every, side_of
from cute_sharding.exchange.placed import Placed
from cute_sharding.relations.moves import Link
from cute_sharding.relations.rows import common_rows, needed_rows
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Chain, Runs, count_rows, span


class LinkMessage(NamedTuple):
    """The elements that one rank sends another through one link: for each dim of the link, rows x
    of the sender and y of the receiver.
    """

    peer: int
    link: Link
    runs: tuple[Runs, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(map(count_rows, self.runs))

    @property
    def copies(self) -> list[Copy]:
        """One copy for each choice of one run of each dim."""
        return [copy_of(self.link, runs) for runs in product(*self.runs)]

    def to(self, peer: int) -> LinkMessage:
        """See :meth:`.flow.Message.to`."""
        return LinkMessage(peer, self.link, self.runs)

    def share(self, first: int, stop: int, parts: int) -> LinkMessage | None:
        """See :meth:`.flow.Message.share`. Shares are rows of the dim that divides best."""
        size = self.size
        if first <= 0 and stop >= size:
            return self
        if not self.runs:
            return None
        counts = [count_rows(found) for found in self.runs]
        d = max(range(len(counts)), key=lambda d: (counts[d] % parts == 0, counts[d]))
        low, high = (min(max(at, 0), size) * counts[d] // size for at in (first, stop))
        runs = (*self.runs[:d], span(self.runs[d], low, high), *self.runs[d + 1 :])
        return self._replace(runs=runs) if low < high else None

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """See :meth:`.flow.Message.into`."""
        return [(self.link.source, _pack(self.copies, at))]

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """See :meth:`.flow.Message.out_of`."""
        copies = _pack([copy.flipped for copy in self.copies], at)
        return [(self.link.target, [copy.flipped for copy in copies])]


def _pack(copies: Sequence[Copy], at: int) -> list[Copy]:
    """The copies, with their elements one behind the other in a buffer."""
    found = []
    for copy in copies:
        found.append(pack_copy(copy, at))
        at += prod(copy.sizes)
    return found


def missed(
    link: Link,
    shape: tuple[int, ...],
    had: Sequence[Chain] | None,
    onto: tuple[int, ...],
    wanted: Sequence[Chain],
) -> int:
    """The number of elements of the link's result that a rank needs and does not hold.

    Args:
        shape, onto: of the operand, and of the result.
        had, wanted: the cuts of each of their dims, with the rank's coordinates. None: it is not on
            the operand's mesh.
    """
    need, has = 1, int(had is not None)
    for one, other in link.pairs:
        of, n = tuple([shape[d] for d in one.dims]), tuple([onto[d] for d in other.dims])
        want = tuple([wanted[d] for d in other.dims])
        need *= count_rows(needed_rows(one, of, other, n, want))
        if had is not None and need:
            have = tuple([had[d] for d in one.dims])
            has *= count_rows(common_rows(one, of, have, other, n, want))
    return need - has if need else 0


@dataclass(frozen=True, eq=False)
class LinkFlow(Flow[LinkMessage]):
    """The flow from an operand placed as ``source`` to a result placed as ``target``.

    Attributes:
        link: maps rows of the operand to rows of the result.
        aligned: mesh dims that replicate the operand, if both are on one mesh, and on which a rank
            receives only from ranks with its own coordinates.
    """

    link: Link
    source: Placed
    target: Placed
    aligned: tuple[int, ...]

    def missed_by(self, rank: int) -> int:
        """See :meth:`.flow.Flow.missed_by`; computed without a search for the holders."""
        source, target = self.source, self.target
        wanted = target.mesh.coordinates(rank)
        if wanted is None:
            return 0
        had = wanted if source.mesh is target.mesh else source.mesh.coordinates(rank)
        of = None if had is None else source.held_on(had)
        return missed(self.link, source.shape, of, target.shape, target.held_on(wanted))

    def between(self, holder: Device, rank: int) -> LinkMessage | None:
        wanted = self.target.mesh.coordinates(rank)
        if wanted is None or any(holder[m] != wanted[m] for m in self.aligned):
            return None
        found = self.of_devices(holder, wanted)
        return found if found.size else None

    def of_devices(self, had: Device, wanted: Device) -> LinkMessage:
        """The elements that the first device holds and the second needs."""
        runs = [
            common_rows(
                one, *side_of(self.source, one, had), other, *side_of(self.target, other, wanted)
            )
            for one, other in self.link.pairs
        ]
        return LinkMessage(self.target.mesh.rank(wanted), self.link, tuple(runs))

    def own(self, rank: int) -> Iterator[Own]:
        kept = self.kept_by(rank)
        if kept is not None:
            yield kept.link.source, kept.link.target, tuple(fold(kept.copies))

    def _owners(self, holder: Device) -> list[int]:
        sharing = [m for m in self.source.replicated if m not in self.aligned]
        return self.source.mesh.slice_of(holder, sharing)

    def _takers(self, holder: Device) -> Iterator[tuple[list[int], LinkMessage]]:
        """In the order of their coordinates."""
        fixed = self._fixed(holder)
        mets = [
            meet_devices(
                one,
                *side_of(self.source, one, holder),
                other,
                *of_every(self.target, other, fixed),
                False,
            )
            for one, other in self.link.pairs
        ]
        alike = [m for m in self.target.replicated if m not in self.aligned]
        for device, runs in _meet(self.target, fixed, mets):
            ranks = self.target.mesh.slice_of(device, alike)
            yield ranks, LinkMessage(ranks[0], self.link, runs)

    def _givers(self, rank: int) -> Iterator[tuple[Device, LinkMessage]]:
        wanted = self.target.mesh.coordinates(rank)
        if wanted is None:
            return
        mets = [
            meet_devices(
                other,
                *side_of(self.target, other, wanted),
                one,
                *of_every(self.source, one),
                True,
            )
            for one, other in self.link.pairs
        ]
        for device, runs in _meet(self.source, self._fixed(wanted), mets):
            yield device, LinkMessage(rank, self.link, runs)

    def _fixed(self, device: Device) -> tuple[tuple[int, int], ...]:
        """The coordinates that are equal on senders and receivers."""
        return tuple([(m, device[m]) for m in self.aligned])


def _meet(
    placed: Placed, fixed: Iterable[tuple[int, int]], mets: Sequence[Met]
) -> Iterator[tuple[Device, tuple[Runs, ...]]]:
    """Devices on which every dim has rows in common, and these rows; one device for those that hold
    the same.
    """
    for some in product(*[zip(found.places, found.runs) for found in mets]):
        at = {**dict(fixed), **dict(chain.from_iterable(place for place, _ in some))}
        device = tuple([at.get(m, 0) for m in range(len(placed.mesh.sizes))])
        yield device, tuple([runs for _, runs in some])
