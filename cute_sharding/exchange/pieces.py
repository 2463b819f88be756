"""Tensors that are concatenations of pieces of other tensors: send buffers and results.

Copies are given by rows of dims, whatever the memory layout. By the strides of a memory each is a
layout. If copies fill a tensor one after the other, they are a concatenation along a dim, provided
that each composes with a whole number of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.copies import Copy, flat, run_of
from cute_sharding.layout import Layout, LayoutError, coalesce, composition
from cute_sharding.layout.layout import row_major

# The most pieces of a concatenation: to find one of more takes longer than it saves.
MOST = 64
# Copies in order, each with its operand; None: from the receive buffer.
InOrder: TypeAlias = "tuple[tuple[int | None, Copy], ...]"


class StridedPiece(NamedTuple):
    """Elements of a tensor in their wanted order, by the strides of its memory.

    Attributes:
        of: the number of the operand; None: the receive buffer.
        sizes, strides: loops, in elements.
        first: the first element, counted from the tensor's first one.
    """

    of: int | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


class Joined(NamedTuple):
    """A tensor that is pieces one behind the other.

    Attributes:
        pieces: what is concatenated.
        dim: along which dim.
        shape: the shape to view the concatenation in; None: it has its shape.
    """

    pieces: tuple[StridedPiece, ...]
    dim: int
    shape: tuple[int, ...] | None


def in_order(copies: Sequence[tuple[int | None, Copy]], shape: tuple[int, ...]) -> InOrder | None:
    """The copies in the order in which they fill a tensor y of that shape from its first element to
    its last; None: they do not, or are more than :data:`MOST`.

    >>> rows = [(0, Copy((3,), (), (), (3,), ((1,),))), (1, Copy((3,), (), (), (0,), ((1,),)))]
    >>> [of for of, _ in in_order(rows, (6,)) or ()], in_order(rows, (7,))
    ([1, 0], None)
    """
    if len(copies) > MOST:
        return None
    strides, begun = row_major(shape), []
    for of, copy in copies:
        start = run_of([copy.flipped], strides)
        if start is None:
            return None
        begun.append((start, of, copy))
    at, found = 0, []
    for start, of, copy in sorted(begun, key=lambda each: each[0]):
        if start != at:
            return None
        found.append((of, copy))
        at += prod(copy.sizes)
    return tuple(found) if at == prod(shape) > 0 else None


def join_copies(
    some: InOrder, strides: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> Joined | None:
    """The concatenation of copies that are in order in a tensor of that shape, by the strides of
    the operands. None: it is none, as a copy goes backward, or their inner loops differ.

    >>> rows = Copy((2, 4), (1, 0), ((1, 0), (0, 1)), (0, 0), ((1, 0), (0, 1)))
    >>> join_copies(((0, rows),), [(6, 1)], (2, 4)).pieces
    (StridedPiece(of=0, sizes=(2, 4), strides=(6, 1), first=6),)
    """
    found = []
    for of, copy in some:
        by = (1,) if of is None else strides[of]
        if len(by) != len(copy.x) or any(rows < 0 for step in copy.dx for rows in step):
            return None
        layout = coalesce(Layout(copy.sizes, tuple([flat(step, by) for step in copy.dx])))
        found.append((of, layout, flat(copy.x, by)))
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    inner = max([tuple([n for n, _ in layout.leaves[1:]]) for _, layout, _ in found], key=len)
    for ones, rest, seen in (((1,) * dim, shape[dim + 1 :], None), ((), inner, shape)):
        every = [_piece(of, layout, first, ones, rest) for of, layout, first in found]
        pieces = tuple([piece for piece in every if piece is not None])
        if len(pieces) == len(every):
            return Joined(pieces, len(ones), seen if shape else shape)
    return None


def _piece(
    of: int | None, layout: Layout, first: int, ones: tuple[int, ...], inner: tuple[int, ...]
) -> StridedPiece | None:
    """A layout as a piece with the sizes (``ones``, count, ``inner``); None: it is not one."""
    count, rest = divmod(layout.size, prod(inner))
    sizes = (*ones, count, *inner)
    try:
        found = None if rest else composition(layout, Layout(sizes))
    except LayoutError:
        return None
    if found is None or found.shape != sizes:
        return None
    strides, below = [], 1
    for n, step in zip(reversed(sizes), reversed(found.stride)):
        strides.append(
            below if n == 1 else step
        )  # any stride is right for one row: this is that of a contiguous torch tensor
        below = strides[-1] * n
    return StridedPiece(of, sizes, tuple(reversed(strides)), first)
