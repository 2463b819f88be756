"""Relations of ops, read off the table: of views from DimMaps, of movements from maps of rows."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TypeAlias

from cute_sharding.layout.layout import row_major
from cute_sharding.relations.forms import pieces_of
from cute_sharding.relations.moves import Link, Move, Shape
from cute_sharding.relations.piece import Mode, Piece, join_pieces, piece
from cute_sharding.relations.relation import Relation, filled
from cute_sharding.relations.rows import Rows
from cute_sharding.relations.view import View
from cute_sharding.sharding.meeting import Run, Runs, meet_on_x

# Some rows of one dim of an exchange: the first element of the source and of the target; modes.
Some: TypeAlias = "tuple[int, int, list[Mode]]"


class NotOnlyMoved(ValueError):
    """An op's results are not all copies of its operands' elements.

    >>> from cute_sharding.relations.table import relation_of
    >>> try:
    ...     relation_of("unfold's gradient", (3, 2), (4,), 0, 2, 1)  # of windows that overlap
    ... except NotOnlyMoved as error:
    ...     print(error)
    the op adds up rows of the input instead of only moving them
    """


def relation_of_view(view: View) -> Relation:
    """A view as a relation: its source dims, read in order, are the elements of the result.

    Raises:
        NotOnlyMoved: the elements of the result are pairs of the operand's.

    >>> from cute_sharding.relations.table import BY_OP
    >>> print(relation_of_view(BY_OP["torch.permute"].view((2, 3), (1, 0))))
    (2, 3) -> (3, 2)
      operand 0 (3,2):(1,3) -> result 0 (3,2):(2,1)
    """
    if view.rank < len(view.target):
        raise NotOnlyMoved(
            f"each element of the result of shape {view.output_shape} is made from several input "
            "elements"
        )
    below = row_major(tuple(view.input_shape))
    sizes = tuple(view.sizes)
    modes = [
        (n, 0 if dim is None else below[dim], step)
        for dim, n, step in zip(view.source, sizes, row_major(sizes))
    ]
    pieces = (piece(0, 0, 0, 0, modes),) if prod(sizes) else ()
    return Relation((tuple(view.input_shape),), (view.output_shape,), pieces)


def relation_of_move(move: Move) -> Relation:
    """A map of rows as a relation between elements, with the fill value where no row is read.

    Raises:
        NotOnlyMoved: rows of a result are sums.

    >>> from cute_sharding.relations.table import BY_OP
    >>> print(relation_of_move(BY_OP["Tensor.__getitem__"].move((4, 3), 0, 1, 3)))
    (4, 3) -> (2, 3)
      operand 0 3 + 6:1 -> result 0 6:1
    """
    if move.adds:
        raise NotOnlyMoved("the op adds up rows of the input instead of only moving them")
    pieces = [each for link in move.links for each in _of_link(move, link)]
    if move.triangle is not None:
        pieces = _in_triangle(pieces[0], move.outputs[0], *move.triangle) if pieces else []
    return filled(Relation(move.inputs, move.outputs, join_pieces(pieces)), move.fill)


def _of_link(move: Move, link: Link) -> list[Piece]:
    shapes = move.inputs[link.source], move.outputs[link.target]
    parts = []
    for one, other in link.pairs:
        if one.form is not None or other.form is not None:
            parts.append(_formed(shapes, one, other))
        else:
            parts.append([_of_run(shapes, one, other, run) for run in _rows(shapes, one, other)])
    return [
        piece(
            link.source,
            link.target,
            sum(x for x, _, _ in some),
            sum(y for _, y, _ in some),
            [mode for _, _, modes in some for mode in modes],
        )
        for some in product(*parts)
        if all(n for _, _, modes in some for n, _, _ in modes)
    ]


def _rows(shapes: tuple[Shape, Shape], one: Rows, other: Rows) -> list[Run]:
    """The rows of one dim of an exchange: x in the source, y in the target."""
    ones, others = (_runs(shape, rows) for shape, rows in zip(shapes, (one, other)))
    return meet_on_x(ones, others)


def _runs(shape: Shape, rows: Rows) -> Runs:
    if rows.dim is None:
        return (Run(0, 0, (), 1),)
    every = (Run(0, 0, (), shape[rows.dim]),) if shape[rows.dim] else ()
    return every if rows.runs is None else rows.runs


def _of_run(shapes: tuple[Shape, Shape], one: Rows, other: Rows, run: Run) -> Some:
    """The run in elements; backward rows are numbered from the last."""
    (x, step), (y, stride) = (
        (0, 0) if rows.dim is None else _numbered(shape, rows, first)
        for shape, rows, first in ((shapes[0], one, run.x), (shapes[1], other, run.y))
    )
    loops = (*run.loops, (run.length, 1, 1))
    return x, y, [(n, dx * step, dy * stride) for n, dx, dy in loops]


def _numbered(shape: Shape, rows: Rows, first: int) -> tuple[int, int]:
    """The element of a row, and the distance between rows."""
    assert rows.dim is not None, "else there is one row"
    step = _step(shape, rows.dim)
    return ((shape[rows.dim] - 1 - first) * step, -step) if rows.backward else (first * step, step)


def _step(shape: Shape, dim: int) -> int:
    step: int = row_major(shape)[dim]
    return step


# -- rows that do not map one for one --------------------------------------------------------------


def _formed(shapes: tuple[Shape, Shape], one: Rows, other: Rows) -> list[Some]:
    """Elements of windows, folds and diagonals; the other side has the exchange's rows in order."""
    rows, plain = (one, other) if one.form is not None else (other, one)
    formed = rows is one
    shape, beside = shapes if formed else shapes[::-1]
    assert rows.form is not None and plain.is_plain and plain.dim is not None
    strides = [_step(shape, d) for d in rows.dims]
    parts = pieces_of(rows.form, shape[rows.dims[0]], strides, _step(beside, plain.dim))
    if not formed:
        return [(each.x, each.y, [*each.modes]) for each in parts]
    return [(each.y, each.x, [(n, dy, dx) for n, dx, dy in each.modes]) for each in parts]


def _in_triangle(one: Piece, shape: Shape, is_lower: bool, diagonal: int) -> list[Piece]:
    """The elements up to a diagonal of the last two dims, or from it on: one piece for each row."""
    *_, rows, columns = shape
    matrices = prod(shape[:-2])
    found = []
    for i in range(rows):
        edge = min(max(i + diagonal + is_lower, 0), columns)
        first, stop = (0, edge) if is_lower else (edge, columns)
        if first < stop:
            at = i * columns + first
            modes = [(matrices, rows * columns, rows * columns), (stop - first, 1, 1)]
            found.append(piece(one.source, one.target, at, at, modes))
    return found
