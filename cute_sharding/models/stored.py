"""Tensors as a checkpoint has them: in boxes, each of which can be read by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from cute_sharding._words import counted
from cute_sharding.layout.layout import row_major
from cute_sharding.relations.relation import Piece, piece

Shape = tuple[int, ...]


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
        dtype, itemsize: of its elements, the dtype as torch prints it without ``torch.``.
        chunks: the boxes that it is stored in; those without elements are left out.
        reader: the one rank that can read it; None: any.

    Raises:
        ValueError: the chunks have fewer elements than the tensor, or more.

    >>> halves = Chunk((0, 0), (2, 6)), Chunk((2, 0), (2, 6))
    >>> stored = Stored("w", (4, 6), "float32", 4, halves)
    >>> print(*stored.pieces((1, 0)), sep="; ")  # both, of one flat tensor that has them so
    operand 0 12:1 -> result 0 12 + 12:1; operand 0 12 + 12:1 -> result 0 12:1
    """

    name: str
    shape: Shape
    dtype: str
    itemsize: int
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
        return self.chunks[chunk].elements * self.itemsize

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
