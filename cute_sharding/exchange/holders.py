"""Which ranks hold the same of a tensor, and what they hold, by the places of its elements.

The *place* of an element is its number in the local tensor, row-major. So a run of rows that begins
amid one is one run of places, and one copy of a tensor that is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.copies import Copy, Vector
from cute_sharding.exchange.placed import Placed
from cute_sharding.relations.devices import local
from cute_sharding.relations.piece import Piece, piece
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Run

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
        return local(shape, tuple([self.placed.chain(d, device) for d in range(len(shape))]))


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


class Line(NamedTuple):
    """In which dim of a contiguous tensor, of so many, elements that follow one another are one
    apart: the last of more than one row. (torch minds no strides of the others.)

    >>> line_of((4, 3, 1)), line_of(())
    (Line(dims=3, at=1), Line(dims=0, at=0))
    """

    dims: int
    at: int


BUFFER = Line(1, 0)


@lru_cache(maxsize=1 << 12)
def line_of(shape: tuple[int, ...]) -> Line:
    """That of a local tensor of that shape."""
    return Line(len(shape), max([d for d, n in enumerate(shape) if n > 1], default=0))


def copy_between(one: Piece, source: Line, target: Line) -> Copy:
    """A piece from places to places as a copy between contiguous tensors, or buffers: all of it is
    said of one dim, whose rows go on in those of the dims before.

    >>> copy_between(piece(0, 0, 4, 0, [(5, 1, 1)]), line_of((4, 3)), BUFFER)  # elements 4 to 8
    Copy(sizes=(5,), x=(0, 4), dx=((0, 1),), y=(0,), dy=((1,),))
    """
    return Copy(
        tuple([n for n, _, _ in one.modes]),
        _on(source, one.x),
        tuple([_on(source, dx) for _, dx, _ in one.modes]),
        _on(target, one.y),
        tuple([_on(target, dy) for _, _, dy in one.modes]),
    )


def _on(line: Line, place: int) -> Vector:
    return tuple([place if d == line.at else 0 for d in range(line.dims)])


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
