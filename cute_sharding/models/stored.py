"""Tensors as a checkpoint has them: in boxes, each of which can be read by itself; and how much of
each box each rank needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding._words import counted
from cute_sharding.exchange.by_pieces import Wants
from cute_sharding.exchange.placed import Placed
from cute_sharding.layout.layout import row_major
from cute_sharding.models.tensor import itemsize_of
from cute_sharding.relations.relation import (
    Piece,
    Relation,
    identity_pieces,
    piece,
    read_once,
    through,
)
from cute_sharding.sharding.rows import Run, count_rows, meet_on_x, rows_held

Shape = tuple[int, ...]
# Of the ranks that need something, how many elements.
Needs: TypeAlias = "dict[int, int]"


class Chunk(NamedTuple):
    """A box of a tensor: its first row of each dim, and how many there are."""

    offset: Shape
    size: Shape

    @property
    def elements(self) -> int:
        """How many elements there are."""
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box in the tensor, to index it with."""
        return tuple([slice(at, at + n) for at, n in zip(self.offset, self.size)])


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        name, shape: of the whole tensor.
        dtype: of its elements, as torch prints it without ``torch.``.
        chunks: the boxes that it is stored in; those without elements are left out.
        reader: the one rank that can read it; None: any.

    Raises:
        ValueError: the chunks have fewer elements than the tensor, or more.

    >>> halves = Chunk((0, 0), (2, 6)), Chunk((2, 0), (2, 6))
    >>> stored = Stored("w", (4, 6), "float32", halves)
    >>> print(*stored.pieces((1, 0)), sep="; ")  # both, of one flat tensor that has them so
    operand 0 12:1 -> result 0 12 + 12:1; operand 0 12 + 12:1 -> result 0 12:1
    """

    name: str
    shape: Shape
    dtype: str
    chunks: tuple[Chunk, ...]
    reader: int | None = None

    def __post_init__(self) -> None:
        chunks = tuple([chunk for chunk in self.chunks if chunk.elements])
        object.__setattr__(self, "chunks", chunks)
        have, there = sum(chunk.elements for chunk in chunks), prod(self.shape)
        if have != there:
            raise ValueError(
                f"{self.name!r} of shape {self.shape} has {counted(there, 'element')}, but the "
                f"checkpoint has {counted(have, 'element')} in {counted(len(chunks), 'chunk')}. "
                "The tensor was not saved correctly: save the checkpoint again"
            )

    def bytes_of(self, chunk: int) -> int:
        """Of one of its chunks."""
        return self.chunks[chunk].elements * itemsize_of(self.dtype)

    @cached_property
    def _strides(self) -> Shape:
        return tuple(row_major(self.shape))

    def pieces(self, chunks: Sequence[int], operand: int = 0, target: int = 0) -> Iterator[Piece]:
        """From a flat tensor, of that number, that has some of the chunks one behind the other, to
        the tensor, of that number.
        """
        at = 0
        for chunk in (self.chunks[i] for i in chunks):
            modes = list(zip(chunk.size, row_major(chunk.size), self._strides))
            y = sum(first * step for first, step in zip(chunk.offset, self._strides))
            yield piece(operand, target, at, y, modes)
            at += chunk.elements


class Read(NamedTuple):
    """What one rank reads of one tensor, in one flat tensor: chunks one behind the other.

    Attributes:
        of: the tensor.
        reader: the rank.
        chunks: their numbers.
    """

    of: Stored
    reader: int
    chunks: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """The elements of each."""
        return [self.of.chunks[i].elements for i in self.chunks]


def in_chunks(shape: Shape, most: int) -> tuple[Chunk, ...]:
    """A tensor in boxes of ``most`` elements, or fewer, one behind the other in memory.

    >>> [chunk.offset for chunk in in_chunks((5, 4), 8)]
    [(0, 0), (2, 0), (4, 0)]
    >>> [chunk.size for chunk in in_chunks((2, 3, 4), 9)]
    [(1, 2, 4), (1, 1, 4), (1, 2, 4), (1, 1, 4)]
    """
    rows = list(shape)
    for d in range(len(shape)):
        rows[d] = max(min(rows[d], most // max(prod(shape[d + 1 :]), 1)), 1)
        if prod(shape[d + 1 :]) <= most:
            break
    starts = [range(0, n, step) for n, step in zip(shape, rows)]
    return tuple(
        [
            Chunk(at, tuple([min(step, n - first) for first, step, n in zip(at, rows, shape)]))
            for at in product(*starts)
        ]
    )


def needs_of(
    stored: Stored, pieces: Sequence[Piece], targets: Sequence[Placed]
) -> tuple[Needs, ...]:
    """Of each chunk of a tensor, of which ``pieces`` are results that lie as ``targets`` say.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> stored = Stored("w", (4, 6), "float32", (Chunk((0, 0), (3, 6)), Chunk((3, 0), (1, 6))))
    >>> columns = Placed.of(Sharding((4, 6), (2,), (Shard(1),)))
    >>> needs_of(stored, identity_pieces(0, 0, 24), [columns])
    ({0: 9, 1: 9}, {0: 3, 1: 3})
    """
    ranks = [rank for target in targets for rank in target.mesh.ranks]
    size = prod(stored.shape)
    wholes = [each for t in range(len(targets)) for each in identity_pieces(0, t, size)]
    as_they_are = {*pieces} == {*wholes}
    as_they_are &= all(target.shape == stored.shape for target in targets)  # and are no views
    if as_they_are and len({*ranks}) == len(ranks):
        return _of_boxes(stored.shape, stored.chunks, tuple(targets))
    return _of_pieces(stored.shape, stored.chunks, tuple(pieces), tuple(targets))


@lru_cache(maxsize=1 << 8)
def _of_boxes(
    shape: tuple[int, ...], chunks: tuple[Chunk, ...], targets: tuple[Placed, ...]
) -> tuple[Needs, ...]:
    """Of tensors as they are: in each dim the rows of the chunk that a rank has."""
    counts: dict[tuple[int, tuple[tuple[int, int, int], ...], int, int], int] = {}
    found: list[Needs] = [{} for _ in chunks]
    for target in targets:
        for rank, device in zip(target.mesh.ranks, product(*map(range, target.mesh.sizes))):
            chains = target.held_on(device)
            for needs, chunk in zip(found, chunks):
                needed = 1
                for d, (chain, first, rows) in enumerate(zip(chains, *chunk)):
                    key = d, chain, first, rows
                    if key not in counts:
                        some = [Run(first, first, (), rows)]
                        counts[key] = count_rows(meet_on_x(some, rows_held(shape[d], chain)))
                    needed *= counts[key]
                if needed:
                    needs[rank] = needed
    return tuple(found)


@lru_cache(maxsize=1 << 8)
def _of_pieces(
    shape: tuple[int, ...],
    chunks: tuple[Chunk, ...],
    pieces: tuple[Piece, ...],
    targets: tuple[Placed, ...],
) -> tuple[Needs, ...]:
    """Through any relation."""
    stored = Stored("", shape, "", chunks)
    boxes = [next(stored.pieces((i,))) for i in range(len(chunks))]
    wants = Wants(Relation((shape,), tuple([t.shape for t in targets]), pieces), targets)
    found: list[Needs] = [{} for _ in chunks]
    for wanting, takers in wants.takers.items():
        wanted = wants.of(wanting, 0)
        for needs, box in zip(found, boxes):
            needed = count_rows(read_once(through([box], wanted)))
            if needed:
                needs.update(dict.fromkeys(takers, needed))
    return tuple(found)
