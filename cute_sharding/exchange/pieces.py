"""Tensors that are made of pieces of others, one behind the other: what is sent, and what results.

Copies say where elements go by rows of dims, whatever memory they lie in. By the strides of that
each is a layout. Where they follow one another in what they fill, that is a concatenation along a
dim, if each composes with so many rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.copies import Copy, flat, run_of
from cute_sharding.layout import Layout, LayoutError, coalesce, composition
from cute_sharding.layout.layout import row_major

# A concatenation of more pieces is not looked for: to find out takes longer than it saves.
MOST = 64
# Copies in order, each with the operand that it is from; None: the receive buffer.
InOrder: TypeAlias = "tuple[tuple[int | None, Copy], ...]"


class Piece(NamedTuple):
    """Elements of a tensor by the strides of its memory, in the order in which they are wanted.

    Attributes:
        of: the number of the operand; None: the receive buffer.
        sizes, strides: loops, in elements.
        first: where they begin, counted from the first element of the tensor.
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
        shape: in which it is to be seen then; None: it is of its shape.
    """

    pieces: tuple[Piece, ...]
    dim: int
    shape: tuple[int, ...] | None


def in_order(copies: Sequence[tuple[int | None, Copy]], shape: tuple[int, ...]) -> InOrder | None:
    """The copies one behind the other, as they fill a tensor y of that shape from its first element
    to its last; None: they do not, or are more than :data:`MOST`.

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


def joined(
    some: InOrder, strides: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> Joined | None:
    """Copies that are in order in a tensor of that shape, by the strides of the operands. None:
    they cannot be concatenated, as one goes backward, or their inner loops differ.

    >>> rows = Copy((2, 4), (1, 0), ((1, 0), (0, 1)), (0, 0), ((1, 0), (0, 1)))
    >>> joined(((0, rows),), [(6, 1)], (2, 4)).pieces
    (Piece(of=0, sizes=(2, 4), strides=(6, 1), first=6),)
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
) -> Piece | None:
    """A layout as so many times what has the sizes ``inner``; None: it is not."""
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
        )  # of one row any is right: what a torch tensor has
        below = strides[-1] * n
    return Piece(of, sizes, tuple(reversed(strides)), first)
