"""What a device sends to all its peers, or gets from them, as a few strided copies, whatever the
number of peers is.

The blocks that a cut makes of the rows of a dim follow one another: but for the last ones, which
are shorter, block q + 1 lies where block q lies, a step further. So where a device has all rows of
a dim, what it has of the blocks of all peers is a layout with one more mode, the peer; and so is
where it lies in the buffer, since blocks before it are as large as each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.copies import Copy, Vector
from cute_sharding.sharding.chains import Chains
from cute_sharding.sharding.meeting import Run, Runs, count_rows, rows_held


class Segment(NamedTuple):
    """``devices`` that follow one another from ``first`` on, whose rows are alike: ``runs`` are
    those of the first (x in the tensor), and those of the next lie ``step`` rows later.
    """

    first: int
    devices: int
    runs: Runs
    step: int

    @property
    def rows(self) -> int:
        """Of each of the devices."""
        return count_rows(self.runs)


@lru_cache(maxsize=1 << 10)
def segments(n: int, split_factor: int, parts: int) -> tuple[Segment, ...] | None:
    """The rows that each of ``parts`` devices holds of ``n``: at most five segments. None where
    blocks of whole pieces and of the last one are of other sizes, so that they drift apart.

    >>> [(s.first, s.devices, s.rows) for s in segments(10, 1, 4)]  # 3, 3, 3 and 1
    [(0, 3, 3), (3, 1, 1)]
    """
    if n == 0:
        return (Segment(0, parts, (), 0),)
    piece = -(-n // split_factor)
    lengths = [length for length in (piece, n % piece) if length]
    blocks = [-(-length // parts) for length in lengths]
    edges = {0, parts}
    for length, block in zip(lengths, blocks):
        short = length // block  # the first device without a whole block
        edges |= {edge for edge in (short, short + 1) if edge < parts}
    found = []
    for first, stop in pairwise(sorted(edges)):
        steps = {block for length, block in zip(lengths, blocks) if first * block < length}
        if len(steps) > 1 and stop - first > 1:
            return None
        runs = rows_held(n, ((split_factor, parts, first),))
        found.append(Segment(first, stop - first, runs, max(steps, default=0)))
    return tuple(found)


class Cut(NamedTuple):
    """A tensor dim of which the device has all rows, and each coordinate of a mesh dim is to get,
    or gives, its own.
    """

    mesh_dim: int
    segments: tuple[Segment, ...]


def dims_among(
    shape: Sequence[int],
    mesh: Sequence[int],
    mine: Chains,
    theirs: Chains,
    moving: Sequence[int],
    alike: Callable[[int], Runs],
) -> list[Runs | Cut] | None:
    """What each tensor dim is to peers that differ from a device on the mesh dims ``moving``; None
    where no layout says it: a dim that is cut among them is cut by several mesh dims or into blocks
    that drift apart, or the device has not all of its rows. ``alike``: the rows of a dim that is
    not cut among them.
    """
    dims: list[Runs | Cut] = []
    for d, n in enumerate(shape):
        if not any(m in moving for m, _ in theirs[d]):
            dims.append(alike(d))
            continue
        if mine[d] or len(theirs[d]) > 1:
            return None
        ((m, factor),) = theirs[d]
        found = segments(n, factor, mesh[m])
        if found is None:
            return None
        dims.append(Cut(m, found))
    return dims


def buffer_of(
    dims: Sequence[Runs | Cut], peers: Sequence[tuple[int, int]], without: int | None = None
) -> tuple[tuple[int, ...], list[Copy]]:
    """The messages between a tensor of one device and all peers: their sizes, and the copies from
    the tensor to a buffer in which they lie one after the other.

    Args:
        dims: of each tensor dim, rows of the device (x) that are of the message to each peer, or
            how it is cut among them.
        peers: (mesh dim, number of devices) of the mesh dims on which peers differ, which number
            them row-major.
        without: one to leave out, of peers on one mesh dim.
    """
    of = {dim.mesh_dim: (d, dim.segments) for d, dim in enumerate(dims) if isinstance(dim, Cut)}
    lines = [_Line.of(of.get(m), parts, without) for m, parts in peers]
    alike = {d: dim for d, dim in enumerate(dims) if not isinstance(dim, Cut)}
    size = prod(map(count_rows, alike.values()))
    copies: list[Copy] = []
    if size:
        for places in product(*(line.parts for line in lines)):
            copies += _copies_to(places, lines, alike, size)
    sizes = [size]
    for line in lines:
        sizes = [n * rows for n in sizes for rows in line.rows]
    return tuple(sizes), copies


class _Line(NamedTuple):
    """The peers of one mesh dim.

    Attributes:
        dim: the tensor dim of which each gets its own rows; None: all get the same.
        parts: segments of them, each with the rows of all before it.
        rows: how many each of them gets.
    """

    dim: int | None
    parts: tuple[tuple[Segment, int], ...]
    rows: tuple[int, ...]

    @classmethod
    def of(
        cls, cut: tuple[int, tuple[Segment, ...]] | None, parts: int, without: int | None
    ) -> _Line:
        dim, found = cut if cut is not None else (None, (Segment(0, parts, _ALL, 0),))
        before, kept, rows = 0, [], []
        for segment in _split(found, without):
            is_out = segment.first == without
            if segment.runs and not is_out:
                kept.append((segment, before))
            each = 0 if is_out else segment.rows
            rows += [each] * segment.devices
            before += each * segment.devices
        return cls(dim, tuple(kept), tuple(rows))


_ALL = (Run(0, 0, (), 1),)


def _split(found: Sequence[Segment], at: int | None) -> list[Segment]:
    """The segments, ``at`` alone in one."""
    result = []
    for segment in found:
        first, stop = segment.first, segment.first + segment.devices
        edges = [first, stop]
        if at is not None and first <= at < stop:
            edges = sorted({first, at, at + 1, stop})
        for low, high in pairwise(edges):
            moved = (low - first) * segment.step
            runs = tuple([run._replace(x=run.x + moved) for run in segment.runs])
            result.append(Segment(low, high - low, runs, segment.step))
    return result


def _copies_to(
    places: Sequence[tuple[Segment, int]],
    lines: Sequence[_Line],
    alike: Mapping[int, Runs],
    size: int,
) -> list[Copy]:
    """The copies to the peers of one segment of each mesh dim, one for each choice of one run of
    each tensor dim. Peers before the first of them get ``start`` elements.
    """
    ndim = len(alike) + sum(line.dim is not None for line in lines)
    start, steps, before = 0, [], size
    for i, (segment, rows) in enumerate(places):
        after = prod(sum(other.rows) for other in lines[i + 1 :])
        start += before * rows * after
        before *= segment.rows
        steps.append(before * after)
    some = dict(alike)
    moves = [[0] * ndim for _ in lines]
    for (segment, _), line, move in zip(places, lines, moves):
        if line.dim is not None:
            some[line.dim], move[line.dim] = segment.runs, segment.step
    copies = []
    for chosen in product(*(some[d] for d in range(ndim))):
        below = 1
        inner: list[tuple[int, Vector, Vector]] = []
        for n, dx in reversed(_loops(chosen)):
            inner.append((n, dx, (below,)))
            below *= n
        outer = [
            (segment.devices, tuple(move), (step,))
            for (segment, _), move, step in zip(places, moves, steps)
            if segment.devices != 1
        ]
        loops = [*outer, *reversed(inner)]
        copies.append(
            Copy(
                tuple([n for n, _, _ in loops]),
                tuple([run.x for run in chosen]),
                tuple([dx for _, dx, _ in loops]),
                (start,),
                tuple([dy for _, _, dy in loops]),
            )
        )
        start += below
    return copies


def _loops(chosen: Sequence[Run]) -> list[tuple[int, Vector]]:
    """The loops of a box, outermost first, with the steps as vectors."""
    return [
        (n, tuple([step if e == d else 0 for e in range(len(chosen))]))
        for d, run in enumerate(chosen)
        for n, step in (*((count, dx) for count, dx, _ in run.loops), (run.length, 1))
        if n != 1
    ]
