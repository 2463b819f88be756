"""Which ranks hold the same of a tensor, and what they hold, by the places of its elements.

An element of a local tensor is its *place*: one number of which each dim has a digit, with room for
steps backward. So layouts of places are strided copies as they stand, by dims of any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.placed import Placed
from cute_sharding.layout.layout import row_major
from cute_sharding.redistribution.chains import Device
from cute_sharding.redistribution.copies import Copy, Vector
from cute_sharding.relations.piece import Piece, joined, piece
from cute_sharding.sharding.meeting import Chain, Run, rows_held

# The coordinates on the mesh dims that cut the tensor.
Holder: TypeAlias = "tuple[int, ...]"


class Holders(NamedTuple):
    """The ranks of a tensor's mesh, by what they hold.

    Attributes:
        placed: the tensor.
        ranks: of those that hold the same, in the order of their other coordinates.
        of_rank: what each rank holds.

    >>> from cute_sharding.sharding import Replicate, Shard, Sharding
    >>> rows = Placed.of(Sharding((4, 2), (2, 2), (Replicate(), Shard(0))), (4, 5, 6, 7))
    >>> holders(rows).ranks
    {(0,): (4, 6), (1,): (5, 7)}
    """

    placed: Placed
    ranks: dict[Holder, tuple[int, ...]]
    of_rank: dict[int, Holder]

    def pieces(self, holder: Holder) -> tuple[Piece, ...]:
        """What a holder has: from places of its local tensor to elements of the whole."""
        at: dict[int, int] = dict(zip(self.placed.cut, holder))
        device: Device = tuple([at.get(m, 0) for m in range(len(self.placed.mesh.sizes))])
        shape = self.placed.shape
        return _pieces(shape, tuple([self.placed.chain(d, device) for d in range(len(shape))]))


@lru_cache(maxsize=1 << 12)
def holders(placed: Placed) -> Holders:
    """Those of a tensor."""
    ranks: dict[Holder, list[int]] = {}
    of_rank: dict[int, Holder] = {}
    for rank, device in zip(placed.mesh.ranks, product(*map(range, placed.mesh.sizes))):
        holder = tuple([device[m] for m in placed.cut])
        ranks.setdefault(holder, []).append(rank)
        of_rank[rank] = holder
    return Holders(placed, {key: tuple(some) for key, some in ranks.items()}, of_rank)


@lru_cache(maxsize=1 << 14)
def _pieces(shape: tuple[int, ...], chains: tuple[Chain, ...]) -> tuple[Piece, ...]:
    held = [rows_held(n, chain) for n, chain in zip(shape, chains)]
    below, digits = row_major(shape), digits_of(shape)
    found = []
    for box in product(*held):
        modes = [
            (n, dy * digit, dx * stride)
            for run, stride, digit in zip(box, below, digits)
            for n, dx, dy in (*run.loops, (run.length, 1, 1))
        ]
        x = sum(run.y * digit for run, digit in zip(box, digits))
        y = sum(run.x * stride for run, stride in zip(box, below))
        found.append(piece(0, 0, x, y, modes))
    return joined(found)


@lru_cache(maxsize=1 << 12)
def digits_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a row of each dim counts in a place.

    >>> digits_of((4, 3))
    (16, 1)
    """
    radix = _radix(shape)
    return tuple([radix ** (len(shape) - 1 - d) for d in range(len(shape))])


def _radix(shape: tuple[int, ...]) -> int:
    return int(2 << max(shape, default=1).bit_length())


def rows_at(place: int, shape: tuple[int, ...]) -> Vector:
    """The rows of each dim that a place, or a step between places, stands for.

    >>> rows_at(2 * 16 - 1, (4, 3))  # two rows down and one back
    (2, -1)
    """
    radix = _radix(shape)
    rows = []
    for _ in shape:
        row = (place + radix // 2) % radix - radix // 2
        place = (place - row) // radix
        rows.append(row)
    return tuple(reversed(rows))


def copy_between(one: Piece, source: tuple[int, ...], target: tuple[int, ...]) -> Copy:
    """A piece from places to places, of tensors whose wholes have those shapes, as a copy. A buffer
    is of the shape of no limit: one dim, ``BUFFER``.
    """
    return Copy(
        tuple([n for n, _, _ in one.modes]),
        _rows(one.x, source),
        tuple([_rows(dx, source) for _, dx, _ in one.modes]),
        _rows(one.y, target),
        tuple([_rows(dy, target) for _, _, dy in one.modes]),
    )


# The shape of a buffer: places in it are its elements.
BUFFER = (-1,)


def _rows(place: int, shape: tuple[int, ...]) -> Vector:
    return (place,) if shape == BUFFER else rows_at(place, shape)


def numbered(runs: Sequence[Run], first: int) -> list[Piece]:
    """The elements of runs, one after the other, from ``first`` on: from them to these numbers."""
    found = []
    for run in runs:
        below = run.length
        modes = [(run.length, 1, 1)]
        for n, dx, _ in reversed(run.loops):
            modes.append((n, dx, below))
            below *= n
        found.append(piece(0, 0, run.x, first, modes))
        first += run.size
    return found
