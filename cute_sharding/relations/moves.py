"""A movement op as a map of rows: the operands' rows that its results are made of, dim by dim."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

from cute_sharding._memory import remembered
from cute_sharding.layout.layout import row_major
from cute_sharding.relations.relation import (
    Mode,
    Piece,
    Relation,
    filled,
    join_pieces,
    ladders,
    local,
    meet,
    piece,
    read_once,
)
from cute_sharding.relations.view import View
from cute_sharding.sharding.rows import (
    Chain,
    Run,
    Runs,
    count_rows,
    each_turn,
    join,
    meet_on_x,
    rows_held,
)

# -- forms -----------------------------------------------------------------------------------------
# Maps between a tensor's rows and an exchange's that are not one for one in one dim.
#
# - windows (unfold): row i of window w is row ``w·step + i``. Windows may overlap. Or a row of the
#   dim stands for a window, as a result row of a pool does for the rows that it is made of.
# - folds (padding by reflection, by the last row, around the end): row j is row ``a·j + b``, by
#   pieces, with a of 1, -1 or 0: several rows may stand for one.
# - diagonals: row j is one element, given by its rows in both dims: one mode, whose stride is the
#   sum of two.
#
# Each form is written once, as parts: rows of the exchange, and the elements of the tensor's dims
# that they are. A device needs or has the union of the exchange rows that its own rows stand for:
# each row once, in the order of y. So each row is sent once, and the device repeats or selects rows
# before or after the exchange.

# The first row of the exchange, and its element as rows of the tensor's dims; then the modes:
# (size, step in the exchange, steps in these dims).
Part: TypeAlias = "tuple[int, tuple[int, ...], list[tuple[int, int, tuple[int, ...]]]]"


class Window(NamedTuple):
    """Row i of ``across``, in row w of the dim, is row ``w·step + i`` of the exchange. If
    ``across`` is None, row w of the dim stands for all ``size`` rows of the window, and a device's
    tensor has the exchange's rows in place of the dim's. Then ``step`` may be a fraction, as for an
    interpolation: window w starts at row ``w·step + shift``, rounded down.

    >>> Window(across=1, size=4, step=2).held((5, 4), (((1, 2, 0),), ()))  # of windows 0 to 2
    (Run(x=0, y=0, loops=(), length=8),)
    >>> Window(across=None, size=3, step=1).held((8,), (((1, 2, 1),),))  # of windows 4 to 7
    (Run(x=4, y=0, loops=(), length=6),)
    """

    across: int | None
    size: int
    step: Any
    shift: Any = 0

    def parts(self, windows: int) -> list[Part]:
        """The parts of ``windows`` windows."""
        return [(0, (0, 0), [(windows, self.step, (1, 0)), (self.size, 1, (0, 1))])]

    @property
    def is_fractional(self) -> bool:
        """Whether windows are not the same number of rows apart."""
        return type(self.step) is not int

    @property
    def every(self) -> Runs:
        """All rows of a window."""
        return (Run(0, 0, (), self.size),)

    def held(self, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
        """The rows that a device has, ascending; without overlap it stores window after window."""
        windows, *others = map(rows_held, n, chains)
        within = others[0] if others else self.every
        if self.is_fractional or any(part.reach > self.step for part in within):
            return _each_once(self, n, chains) if others else self._together(windows)
        count, found = sum(part.size for part in within), []
        for some in windows:
            loops = [
                (k, dx * self.step, dy * count) for k, dx, dy in (*some.loops, (some.length, 1, 1))
            ]
            around = tuple([loop for loop in loops if loop[0] > 1])
            for part in within:
                first, at = some.x * self.step + part.x, some.y * count + part.y
                found.append(Run(first, at, (*around, *part.loops), part.length))
        return tuple(join(found))

    def _together(self, windows: Runs) -> Runs:
        """The rows of all these windows, which overlap if one follows on the other."""
        found: list[Run] = []
        for run in sorted(turn for each in windows for turn in each_turn(each)):
            first, last = (math.floor(n * self.step + self.shift) for n in (run.x, run.reach - 1))
            stop = last + self.size
            if found and first <= found[-1].reach:
                last = found.pop()
                first, at = last.x, last.y
            else:
                at = found[-1].y + found[-1].length if found else 0
            found.append(Run(first, at, (), stop - first))
        return tuple(found)

    def evenly(self, windows: Runs, within: Runs) -> int | None:
        """The distance between the starts of a device's windows if it stores their rows once each,
        from row 0 on, and the rows of each window together; None if the distances differ.
        """
        if not within or max(run.reach for run in within) <= self.step:
            return sum(run.size for run in within)
        if len(within) > 1 or within[0].loops or len(windows) != 1:
            return None
        (some,), (part,) = windows, within
        if not some.loops:
            return min(self.step, part.length)
        if len(some.loops) == 1 and some.length == 1:
            return min(some.loops[0][1] * self.step, part.length)
        return None

    def is_view(self, windows: Runs, *within: Runs) -> bool:
        """Whether a device's windows are a view of its rows."""
        return self.evenly(windows, *within or (self.every,)) is not None


class Fold(NamedTuple):
    """Row j of the dim is row ``a·j + b`` of the exchange, for start <= j < stop.

    Attributes:
        pieces: (start, stop, a, b), one after the other.

    >>> reflected = Fold(((0, 2, -1, 2), (2, 6, 1, -2)))  # two rows before the first of four
    >>> reflected.held((6,), (((1, 2, 0),),))  # rows 2 and 1, and row 0
    (Run(x=0, y=0, loops=(), length=3),)
    """

    pieces: tuple[tuple[int, int, int, int], ...]

    def parts(self, _: int) -> list[Part]:
        """The pieces as parts."""
        return [
            (a * start + b, (start,), [(stop - start, a, (1,))])
            for start, stop, a, b in self.pieces
        ]

    def held(self, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
        """The exchange rows that a device's rows stand for."""
        return _each_once(self, n, chains)

    def is_view(self, found: Runs) -> bool:
        """False: a fold is always a copy."""
        return False


class Diagonal(NamedTuple):
    """Row j of the exchange is row ``j + down`` of the dim and row ``j + right`` of ``across``.

    >>> Diagonal(across=1, down=0, right=1, length=4).held((5, 5), (((1, 2, 1),), ()))  # (3, 4)
    (Run(x=3, y=0, loops=(), length=1),)
    """

    across: int
    down: int
    right: int
    length: int

    def parts(self, _: int) -> list[Part]:
        """The diagonal as one part."""
        return [(0, (self.down, self.right), [(self.length, 1, (1, 1))])]

    def held(self, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
        """The elements of which a device has both the row and the column."""
        return _each_once(self, n, chains)

    def is_view(self, rows: Runs, columns: Runs) -> bool:
        """Whether the device's elements are a diagonal of its local tensor."""
        return all(len(some) <= 1 and not any(r.loops for r in some) for some in (rows, columns))


Form: TypeAlias = "Window | Fold | Diagonal"


def pieces_of(form: Form, rows: int, strides: Sequence[int], stride: int = 1) -> Iterator[Piece]:
    """Pieces from the rows of an exchange, ``stride`` elements apart, to the elements of a tensor
    whose dims have ``strides``; the form's first dim has ``rows`` rows.
    """

    def at(vector: Sequence[int]) -> int:
        return sum([k * step for k, step in zip(vector, strides)])

    for x, y, modes in form.parts(rows):
        if all(n > 0 for n, _, _ in modes):
            steps = [(n, dx * stride, at(dy)) for n, dx, dy in modes]
            yield piece(0, 0, x * stride, at(y), steps)


def _each_once(form: Form, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
    """The exchange rows that a device has or needs, each once even if several of its own rows stand
    for it; y numbers them one after the other.
    """
    wanted = [each.turned for each in local(n, chains)]
    parts = pieces_of(form, n[0], row_major(n))
    union = read_once(some for one in parts for other in wanted for some in meet(one, other))
    pieces = [piece(0, 0, run.x, run.x, [*run.loops, (run.length, 1, 1)]) for run in union]
    result, at = [], 0
    for run in sorted(
        some.run for one in join_pieces(pieces) for some in ladders(one.x, 0, one.modes)
    ):
        result.append(run._replace(y=at))
        at += run.size
    return tuple(join(result))


# -- rows ------------------------------------------------------------------------------------------
# The rows of one tensor dim as an exchange numbers them, and the rows that a device holds.
#
# A movement op maps the rows of a dim by pieces: output row j is input row a·j + b on an interval.
# Such a map is a *relation*, a list of ``Run``, and so are the rows that a device holds
# (sharding/rows.py). The mapped rows that a device has are the meeting of the two, again strided
# runs, whatever the number of rows. A descending map (flip) is an ascending one on rows that are
# numbered from the end. ``moves`` has the maps in which several rows of a tensor stand for one of
# the exchange, or in which two of its dims share rows.

ALONE: Runs = (Run(0, 0, (), 1),)


T = TypeVar("T")


class Rows(NamedTuple):
    """How the rows of a tensor's dim map to the rows of an exchange.

    Attributes:
        dim: the tensor's dim; None: no dim, and the exchange has one row, which all devices have.
        runs: x in the exchange, y in the tensor; None: the same.
        backward: the tensor's rows are numbered from the last (in ``runs`` too), also on a device.
        form: another map from the tensor's rows to the exchange's. A device then has each row of
            the exchange once, at y.

    >>> from cute_sharding.relations.moves import held_rows
    >>> from cute_sharding.sharding.rows import Run
    >>> shifted = Rows(0, (Run(0, 1, (), 7),))  # row j of the exchange is row j + 1 of eight
    >>> held_rows(shifted, (8,), (((1, 2, 1),),))  # on the second of two devices
    (Run(x=3, y=0, loops=(), length=4),)
    """

    dim: int | None
    runs: Runs | None = None
    backward: bool = False
    form: Form | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's dims that give the exchange's rows."""
        own = () if self.dim is None else (self.dim,)
        across = None if self.form is None else getattr(self.form, "across", None)
        return own if across is None else (*own, across)

    def of(self, values: Sequence[T]) -> tuple[T, ...]:
        """The values for :attr:`dims`, of one for each of the tensor's dims."""
        dim, _, _, form = self
        if form is None:
            return () if dim is None else (values[dim],)
        return tuple([values[d] for d in self.dims])

    @property
    def is_plain(self) -> bool:
        """Whether the exchange's rows are the dim's, one for one and in order."""
        dim, runs, backward, form = self
        return dim is not None and runs is None and form is None and not backward


@remembered
def held_rows(rows: Rows, n: tuple[int, ...], chain: tuple[Any, ...]) -> Runs:
    """The rows of the exchange that a device holds: x in the exchange, y on the device.

    Args:
        n: the number of rows of each of the tensor's dims (``rows.dims``).
        chain: for each of them, how it is cut, with the device's coordinates.
    """
    if rows.dim is None:
        return ALONE
    if rows.form is not None:
        return rows.form.held(n, chain)
    found = rows_held(n[0], chain[0])
    if rows.backward:
        found = tuple(join([_turned(run, n[0], count_rows(found)) for run in found]))
    if rows.runs is None:
        return found
    return tuple(join(meet_on_x([run.flipped() for run in rows.runs], found)))


@remembered
def common_rows(
    source: Rows,
    of: tuple[int, ...],
    had: tuple[Any, ...],
    target: Rows,
    n: tuple[int, ...],
    wanted: tuple[Any, ...],
) -> Runs:
    """The rows that one device holds and another needs: x on the one, y on the other."""
    return tuple(join(meet_on_x(held_rows(source, of, had), held_rows(target, n, wanted))))


@remembered
def count_common(
    source: Rows,
    of: tuple[int, ...],
    had: tuple[Any, ...],
    target: Rows,
    n: tuple[int, ...],
    wanted: tuple[Any, ...],
) -> int:
    """The number of :func:`common_rows`."""
    return count_rows(common_rows(source, of, had, target, n, wanted))


def _turned(run: Run, n: int, count: int) -> Run:
    """The same rows numbered from the last of ``n``; on the device, from the last of ``count``."""
    last = run.y + run.length + sum((c - 1) * dy for c, _, dy in run.loops)
    return Run(n - run.reach, count - last, run.loops, run.length)


# -- moves -----------------------------------------------------------------------------------------
# A movement op as a map of rows: the operands' rows that its results are made of.

Shape: TypeAlias = "tuple[int, ...]"
# For each dim of an exchange: how its rows map to the source's and to the target's.
Pairs: TypeAlias = "tuple[tuple[Rows, Rows], ...]"


class Link(NamedTuple):
    """The part of one result that comes from one operand.

    Attributes:
        source, target: the position of the operand, and of the result.
        pairs: for each dim of the exchange, how its rows map to the source's and to the target's.

    >>> rows = Rows(0)
    >>> Link(0, 0, ((rows, rows),)).pairs[0][0].is_plain
    True
    """

    source: int
    target: int
    pairs: Pairs


class Move(NamedTuple):
    """A movement op on tensors of given shapes.

    Attributes:
        inputs, outputs: the shapes of operands and results.
        links: the operand parts that the results are made of.
        fill: the value of result rows that come from no operand row.
        adds: a result row that comes from several operand rows is their sum.
        is_view: on a plain tensor the results are views of the one operand.
        triangle: for tril and triu: whether it is the lower one, and the number of the diagonal up
            to which, or from which on, the elements of the last two dims are kept.
        named: the operands' dims that the arguments name, even if the op leaves them unchanged.
        unchanged: those of ``named`` that stay unchanged for any number of rows: as in ``x[:]``,
            and not in ``x[:8]`` where there happen to be eight.

    >>> from cute_sharding.relations.table import BY_OP
    >>> roll = BY_OP["torch.roll"].move((8, 4), 2, 0)
    >>> isinstance(roll, Move), roll.outputs, roll.touched(0)
    (True, ((8, 4),), frozenset({0}))
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    links: tuple[Link, ...]
    fill: Any = 0
    adds: bool = False
    is_view: bool = False
    named: frozenset[int] = frozenset()
    unchanged: frozenset[int] = frozenset()
    triangle: tuple[bool, int] | None = None

    def touched(self, source: int) -> frozenset[int]:
        """The dims of an operand that do not go into every result unchanged, and those that the op
        names.
        """
        found, every = {*self.named}, range(len(self.inputs[source]))
        for link in self.links:
            if link.source == source:
                plain = [one.dim for one, other in link.pairs if one.is_plain and other.is_plain]
                found.update([d for d in every if d not in plain])
        return frozenset(found.intersection(every))

    def of_result(self, k: int) -> Move:
        """The move with one of its results only."""
        links = tuple([link._replace(target=0) for link in self.links if link.target == k])
        return self._replace(outputs=(self.outputs[k],), links=links)

    def turned(self) -> Move:
        """The move from the result back to the operand, of a move with one of each. Operand rows
        that were not read come from no row.

        >>> from cute_sharding.relations.table import BY_OP
        >>> BY_OP["Tensor.__getitem__"].move((8,), 0, 2, 5).turned().outputs
        ((8,),)
        """
        links = [
            link._replace(pairs=tuple([(target, source) for source, target in link.pairs]))
            for link in self.links
        ]
        turned = self._replace(inputs=self.outputs, outputs=self.inputs, links=tuple(links))
        return turned._replace(is_view=False)

    def bound(self, source: int) -> frozenset[int]:
        """The dims of an operand of which a result row may need any row, in this call or in another
        call of the program: all dims but those that go into every result unchanged.

        >>> from cute_sharding.relations.table import BY_OP
        >>> some = BY_OP["Tensor.__getitem__"]
        >>> [some.move((8, 4), 0, 0, end).bound(0) for end in (None, 8)]
        [frozenset(), frozenset({0})]
        """
        ndim = len(self.inputs[source])
        corner = () if self.triangle is None else (ndim - 2, ndim - 1)
        return (self.touched(source) - self.unchanged) | {*corner}

    def home(self, link: Link) -> dict[int, int]:
        """For dims of the link's operand, the dim of the result that has their rows."""
        return {
            d: other.dim for one, other in link.pairs for d in one.dims if other.dim is not None
        }


# The classes in the text of a move.
_CLASSES: dict[str, Any] = {
    each.__name__: each for each in (Move, Link, Rows, Run, Window, Fold, Diagonal, Fraction)
}
_FLOATS = {"inf": math.inf, "nan": math.nan}


@remembered
def parse_move(text: str) -> Move:
    """The move of which this is the ``repr``.

    >>> from cute_sharding.relations.table import BY_OP
    >>> roll = BY_OP["torch.roll"].move((8, 4), 2, 0)
    >>> parse_move(repr(roll)) == roll
    True
    """
    found = _value_of(ast.parse(text, mode="eval").body)
    assert isinstance(found, Move)
    return found


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Call(ast.Name(name), args, keywords):
            of: Any = frozenset if name == "frozenset" else _CLASSES[name]
            named = {each.arg: _value_of(each.value) for each in keywords if each.arg}
            return of(*map(_value_of, args), **named)
        case ast.Tuple(elements):
            return tuple(map(_value_of, elements))
        case ast.Set(elements):
            return set(map(_value_of, elements))
        case ast.Name(name):
            return _FLOATS[name]
        case ast.UnaryOp(ast.USub(), ast.Name(name)):
            return -_FLOATS[name]
    return ast.literal_eval(node)


@remembered
def are_apart(one: Move, i: int, other: Move, j: int) -> bool:
    """Whether result ``i`` of the one and ``j`` of the other, of one operand, have no row of it in
    common. False also where that is not known.

    >>> from cute_sharding.relations.table import BY_OP
    >>> parts = [BY_OP["Tensor.__getitem__"].move((8,), 0, *ends) for ends in ((0, 4), (4, 8))]
    >>> are_apart(parts[0], 0, parts[1], 0), are_apart(parts[0], 0, parts[0], 0)
    (True, False)
    """
    ones = [_rows_read(one, link) for link in one.links if link.target == i]
    others = [_rows_read(other, link) for link in other.links if link.target == j]
    return all(
        any(d in second and not meet_on_x(rows, second[d]) for d, rows in first.items())
        for first in ones
        for second in others
    )


def _rows_read(move: Move, link: Link) -> dict[int, Runs]:
    """For dims of the link's operand, the rows that the link reads, as x. A dim of which rows are
    read in another form is left out.
    """
    found: dict[int, Runs] = {}
    for source, target in link.pairs:
        if source.dim is None or source.backward or source.form or target.form:
            continue
        n = source.of(move.inputs[link.source])
        m = target.of(move.outputs[link.target])
        found[source.dim] = common_rows(source, n, ((),), target, m, ((),) * len(m))
    return found


# -- read ------------------------------------------------------------------------------------------
# Relations of ops, read off the table: of views from DimMaps, of movements from maps of rows.

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
