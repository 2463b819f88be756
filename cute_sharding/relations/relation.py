"""Relations: which operand element each result element is; and their algebra, on pieces that are
two layouts of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.layout.layout import row_major
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.rows import (
    Chain,
    Run,
    chains_of,
    chains_on,
    count_rows,
    join,
    meet_on_x,
    rows_held,
    turns_of_loops,
)

# -- piece -----------------------------------------------------------------------------------------
# One piece of a relation: two layouts of one shape, into the elements of a source and of a target.
#
# Elements are numbered row-major, so that a view is one piece whatever its shapes are. A piece is
# given by its modes ``(size, step in the source, step in the target)``. The composition of two
# pieces is a meeting of strided runs (sharding/rows.py), at a cost that grows with the number of
# modes and not of elements.

# (size, step in the source, step in the target)
Mode: TypeAlias = "tuple[int, int, int]"
Modes: TypeAlias = "tuple[Mode, ...]"


class Piece(NamedTuple):
    """Element ``y + i·dy + ...`` of a target is element ``x + i·dx + ...`` of a source, for each
    mode ``(size, dx, dy)``, i < size.

    In normal form sizes are at least 2, steps in the target are positive, largest first, and modes
    that can be joined are. A step of 0 in the source reads an element again and again; a negative
    step is a flip.

    Attributes:
        source, target: their numbers. Sources below 0 are constants: -1 is the first.
        x, y: the first element.
        modes: none for a piece of one element.

    >>> transposed = piece(0, 0, 0, 0, [(2, 3, 1), (3, 1, 2)])  # of a (2, 3)
    >>> transposed == Piece(0, 0, 0, 0, ((3, 1, 2), (2, 3, 1))), transposed.size
    (True, 6)
    """

    source: int
    target: int
    x: int
    y: int
    modes: Modes

    @property
    def size(self) -> int:
        """The number of elements of the target."""
        return prod(n for n, _, _ in self.modes)

    @property
    def turned(self) -> Piece:
        """The piece from the target to the source; it must read each source element once."""
        modes = [(n, dy, dx) for n, dx, dy in self.modes]
        return piece(self.target, self.source, self.y, self.x, modes)

    def __str__(self) -> str:
        sides = [
            _side(self.x, [(n, dx) for n, dx, _ in self.modes]),
            _side(self.y, [(n, dy) for n, _, dy in self.modes]),
        ]
        name = f"operand {self.source}" if self.source >= 0 else f"constant {-1 - self.source}"
        return f"{name} {sides[0]} -> result {self.target} {sides[1]}"


def _side(first: int, modes: Sequence[tuple[int, int]]) -> str:
    """A layout with its first element, as CuTe writes it."""
    sizes, steps = (",".join(map(str, column)) for column in zip(*modes)) if modes else ("1", "0")
    layout = f"({sizes}):({steps})" if len(modes) > 1 else f"{sizes}:{steps}"
    return f"{first} + {layout}" if first else layout


def piece(source: int, target: int, x: int, y: int, modes: Iterable[Mode]) -> Piece:
    """A piece in normal form, from modes in any order and of any size but 0.

    >>> print(piece(0, 0, 0, 5, [(3, 1, -2), (2, 9, 1), (1, 7, 7)]))
    operand 0 2 + (3,2):(-1,9) -> result 0 1 + (3,2):(2,1)
    """
    upward = []
    for n, dx, dy in modes:
        if n == 1:
            continue
        if dy < 0:
            x, y, dx, dy = x + (n - 1) * dx, y + (n - 1) * dy, -dx, -dy
        upward.append((n, dx, dy))
    upward.sort(key=lambda mode: mode[2], reverse=True)
    result: list[Mode] = []
    for n, dx, dy in upward:
        if result and result[-1][1] == n * dx and result[-1][2] == n * dy:
            n *= result.pop()[0]
        result.append((n, dx, dy))
    return Piece(source, target, x, y, tuple(result))


def identity_pieces(source: int, target: int, size: int) -> tuple[Piece, ...]:
    """All elements, each at its own number; no piece if there are none."""
    return (piece(source, target, 0, 0, [(size, 1, 1)]),) if size else ()


# -- composition -----------------------------------------------------------------------------------


class Ladder(NamedTuple):
    """Elements in ascending order, in modes whose turns do not overlap.

    Attributes:
        run: x is the element, y its position in the order.
        other: the first element on the other side.
        modes: (size, step, step on the other side), the largest step first.
    """

    run: Run
    other: int
    modes: tuple[Mode, ...]

    def at(self, number: int) -> int:
        """The distance, on the other side, from the first element to the one at position
        ``number``; also the distance of two elements ``number`` positions apart within one mode.
        """
        total = 0
        for n, _, beside in reversed(self.modes):
            number, digit = divmod(number, n)
            total += digit * beside
        return total


@remembered
def ladders(first: int, other: int, modes: tuple[Mode, ...]) -> tuple[Ladder, ...]:
    """The elements of a layout as ladders, as few as overlapping turns allow. ``modes``: (size,
    step, step on the other side), no step 0.
    """
    upward = []
    for n, step, beside in modes:
        if step < 0:
            first, other = first + (n - 1) * step, other + (n - 1) * beside
            step, beside = -step, -beside
        upward.append((n, step, beside))
    upward.sort(key=lambda mode: mode[1], reverse=True)
    return tuple([_ladder(*parts) for parts in _apart(first, other, upward)])


def _ladder(first: int, other: int, modes: Sequence[Mode]) -> Ladder:
    loops, below = [], 1
    for n, step, _ in reversed(modes):
        loops.append((n, step, below))
        below *= n
    length = loops.pop(0)[0] if loops and loops[0][1] == 1 else 1
    return Ladder(Run(first, 0, tuple(reversed(loops)), length), other, tuple(modes))


def _apart(first: int, other: int, modes: list[Mode]) -> Iterator[tuple[int, int, list[Mode]]]:
    """Layouts without overlapping turns. Overlapping windows are divided into parts of as many rows
    as the windows are apart; other overlaps turn by turn of the mode with the fewest turns.
    """
    k = reaching(modes)
    if k is None:
        yield first, other, modes
        return
    (_, step, _), inner = modes[k], modes[k + 1]
    turns, j = min((modes[j][0], j) for j in range(k, len(modes)))
    each = step // inner[1] if step % inner[1] == 0 else 0
    if each and -(-inner[0] // each) < turns:
        turns, j = -(-inner[0] // each), k + 1
    else:
        each = 1
    n, step, beside = modes[j]
    for i in range(turns):
        left = min(each, n - i * each)
        rest = [*modes[:j], *([(left, step, beside)] if left > 1 else []), *modes[j + 1 :]]
        yield from _apart(first + i * each * step, other + i * each * beside, rest)


def reaching(modes: Sequence[Mode]) -> int | None:
    """The innermost mode whose turns overlap; None: there is none."""
    reach = 1
    for k in reversed(range(len(modes))):
        n, step, _ = modes[k]
        if step < reach:
            return k
        reach += (n - 1) * step
    return None


def bounds(first: int, modes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The least and the greatest element of a layout, given by its modes (size, step)."""
    low = high = first
    for n, step in modes:
        if step < 0:
            low += (n - 1) * step
        else:
            high += (n - 1) * step
    return low, high


@remembered
def source_bounds(one: Piece) -> tuple[int, int]:
    """The least and the greatest element of the source."""
    return bounds(one.x, [(n, dx) for n, dx, _ in one.modes])


@remembered
def target_bounds(one: Piece) -> tuple[int, int]:
    """The least and the greatest element of the target."""
    return bounds(one.y, [(n, dy) for n, _, dy in one.modes])


def meet(one: Piece, other: Piece) -> list[Piece]:
    """The pieces from ``one``'s source to ``other``'s target, through the elements that are in
    ``one``'s target and in ``other``'s source.
    """
    (low, high), (first, last) = target_bounds(one), source_bounds(other)
    if high < first or last < low:
        return []
    again = [(n, 0, dy) for n, dx, dy in other.modes if not dx]
    ones = ladders(one.y, one.x, tuple([(n, dy, dx) for n, dx, dy in one.modes]))
    others = ladders(other.x, other.y, tuple([mode for mode in other.modes if mode[1]]))
    result = []
    for a in ones:
        for b in others:
            for run in meet_on_x([a.run], [b.run]):
                loops = [(n, a.at(dx), b.at(dy)) for n, dx, dy in run.loops]
                if run.length > 1:
                    loops.append((run.length, a.at(1), b.at(1)))
                x, y = a.other + a.at(run.x), b.other + b.at(run.y)
                result.append(piece(one.source, other.target, x, y, [*again, *loops]))
    return result


def through(ones: Iterable[Piece], others: Iterable[Piece]) -> tuple[Piece, ...]:
    """All compositions of a piece of ``ones`` with one of ``others``, in normal form."""
    by_number: dict[int, list[Piece]] = {}
    for one in ones:
        by_number.setdefault(one.target, []).append(one)
    return join_pieces(
        found
        for other in others
        for one in by_number.get(other.source, ())
        for found in meet(one, other)
    )


# -- fewer pieces ----------------------------------------------------------------------------------


def join_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same relation in fewer pieces, ordered by target. Pieces of one form at equal distances
    become turns of a mode; two pieces that differ in the size of one mode only, and continue each
    other there, become one.
    """
    found = sorted(pieces, key=_order)
    while len(found) > 1:
        fewer = sorted(_beside(_in_turns(found)), key=_order)
        if len(fewer) == len(found):
            break
        found = fewer
    return tuple(found)


# By target, and by the first element in it.
_order = itemgetter(1, 3)


def _in_turns(found: Sequence[Piece]) -> list[Piece]:
    forms: dict[tuple[int, int, Modes], list[Piece]] = {}
    for one in found:
        forms.setdefault((one.source, one.target, one.modes), []).append(one)
    return [
        first
        if step is None
        else piece(first.source, first.target, first.x, first.y, [(count, *step), *first.modes])
        for alike in forms.values()
        for first, count, step in turns_of_loops(alike, _step_between)
    ]


def _step_between(last: Piece, following: Piece) -> tuple[int, int]:
    return following.x - last.x, following.y - last.y


def _beside(found: Sequence[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for one in sorted(found, key=_order):
        both = _one_of(result[-1], one) if result else None
        if both is None:
            result.append(one)
        else:
            result[-1] = both
    return result


def _one_of(one: Piece, other: Piece) -> Piece | None:
    """Two pieces as one, if they have the same modes but for the size of one, along which ``other``
    continues ``one``; else None.
    """
    if (one.source, one.target) != (other.source, other.target):
        return None
    sizes, others = ({(dx, dy): n for n, dx, dy in each.modes} for each in (one, other))
    differ = [step for step in {**sizes, **others} if sizes.get(step, 1) != others.get(step, 1)]
    if len(differ) != 1:
        return None
    (dx, dy), n = differ[0], sizes.get(differ[0], 1)
    if (other.x, other.y) != (one.x + n * dx, one.y + n * dy):
        return None
    more = {**sizes, differ[0]: n + others.get(differ[0], 1)}
    modes = [(count, *step) for step, count in more.items()]
    return piece(one.source, one.target, one.x, one.y, modes)


# -- elements --------------------------------------------------------------------------------------
# Sets of elements: each element of several layouts once, and differences of such sets.


def read_once(pieces: Iterable[Piece]) -> list[Run]:
    """The elements of the source that the pieces read, each once, ascending in each run; x and y
    are both the element's number.

    >>> from cute_sharding.relations.relation import piece
    >>> twice = [piece(0, 0, 2, 0, [(4, 1, 1)]), piece(0, 0, 4, 4, [(4, 1, 1)])]  # 2 to 5, 4 to 7
    >>> read_once(twice)
    [Run(x=2, y=2, loops=(), length=6)]
    """
    result: list[Run] = []
    for one in pieces:
        modes = tuple([mode for mode in one.modes if mode[1]])
        for ladder in ladders(one.x, 0, modes):
            result += subtract([on_both_sides(ladder.run)], result)
    return join(result)


def on_both_sides(run: Run) -> Run:
    """The elements x of a run, as x and as y."""
    return Run(run.x, run.x, tuple([(n, dx, dx) for n, dx, _ in run.loops]), run.length)


def subtract(some: Sequence[Run], others: Iterable[Run]) -> list[Run]:
    """The elements that are in ``some`` runs and in none of the ``others``. In all runs x and y
    must be equal.
    """
    left = list(some)
    for other in others:
        if not left:
            break
        if meet_on_x(left, [other]):
            first, stop = min(run.x for run in left), max(run.reach for run in left)
            left = meet_on_x(left, gaps(other, first, stop))
    return left


def gaps(run: Run, first: int, stop: int) -> list[Run]:
    """The elements from ``first`` to ``stop``, exclusive, that are not in the run.

    >>> gaps(Run(2, 2, ((3, 4, 4),), 2), 0, 13)  # 2 3, 6 7, 10 11
    [Run(x=0, y=0, loops=(), length=2), Run(x=4, y=4, loops=((2, 4, 4),), length=2), \
Run(x=12, y=12, loops=(), length=1)]
    """
    if not run.loops:
        return [*_range(first, min(run.x, stop)), *_range(max(run.reach, first), stop)]
    (count, step, _), turn = run.loops[0], run.turn(0)
    result = _range(first, min(run.x, stop))
    for gap in gaps(turn, turn.x, turn.x + step):
        loops = ((count - 1, step, step),) if count > 2 else ()
        result.append(Run(gap.x, gap.x, (*loops, *gap.loops), gap.length))
    last = run.turn(count - 1)
    result += gaps(last, last.x, max(stop, last.reach))
    return meet_on_x(result, _range(first, stop))


def _range(first: int, stop: int) -> list[Run]:
    return [Run(first, first, (), stop - first)] if stop > first else []


# -- relation --------------------------------------------------------------------------------------
# Relations: which operand element each result element is; and their algebra.

Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class Relation:
    """For each element of some results, the element of some operands that it is.

    Attributes:
        inputs, outputs: the shapes of the operands and of the results.
        pieces: the parts of the results. An element of a result is in at most one piece; it is in
            none if it is unknown, as in a device's part (:func:`held`) or in an inverse.
        constants: the values of elements in pieces whose source is below 0.

    >>> pieces = (piece(0, 0, 0, 0, [(24, 1, 1)]),)
    >>> print(Relation.same((4, 6)).then(Relation(((4, 6),), ((24,),), pieces)))
    (4, 6) -> (24,)
      operand 0 24:1 -> result 0 24:1
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    pieces: tuple[Piece, ...]
    constants: tuple[Any, ...] = ()

    @classmethod
    def same(cls, *shapes: Shape) -> Relation:
        """The identity on tensors of these shapes."""
        pieces = [
            each for k, shape in enumerate(shapes) for each in identity_pieces(k, k, prod(shape))
        ]
        return cls(shapes, shapes, tuple(pieces))

    def then(self, other: Relation) -> Relation:
        """This relation followed by ``other``: see :func:`compose`."""
        return compose(self, other)

    def of(self, *outputs: int) -> Relation:
        """The relation to some of the results only, in the given order."""
        numbers = {k: i for i, k in enumerate(outputs)}
        pieces = [
            each._replace(target=numbers[each.target])
            for each in self.pieces
            if each.target in numbers
        ]
        shapes = tuple([self.outputs[k] for k in outputs])
        return replace(self, outputs=shapes, pieces=join_pieces(pieces))

    @cached_property
    def by_source(self) -> dict[int, tuple[Piece, ...]]:
        """The pieces by the operand that they read; numbers below 0 are constants."""
        return _grouped(self.pieces, attrgetter("source"))

    @cached_property
    def by_target(self) -> dict[int, tuple[Piece, ...]]:
        """The pieces by result."""
        return _grouped(self.pieces, attrgetter("target"))

    def said(self, output: int) -> int:
        """How many elements of a result are in pieces."""
        return sum(each.size for each in self.by_target.get(output, ()))

    @property
    def is_total(self) -> bool:
        """Whether all elements of all results are in pieces."""
        return all(self.said(k) == prod(shape) for k, shape in enumerate(self.outputs))

    @property
    def sources(self) -> tuple[int, ...]:
        """The operands that are read."""
        return tuple(sorted(k for k in self.by_source if k >= 0))

    def __str__(self) -> str:
        before, after = (", ".join(map(str, each)) for each in (self.inputs, self.outputs))
        lines = [f"{before} -> {after}", *(f"  {each}" for each in self.pieces)]
        values = [f"  constant {k} is {value!r}" for k, value in enumerate(self.constants)]
        return "\n".join([*lines, *values])


def _grouped(pieces: Iterable[Piece], key: Callable[[Piece], int]) -> dict[int, tuple[Piece, ...]]:
    found: dict[int, list[Piece]] = {}
    for each in pieces:
        found.setdefault(key(each), []).append(each)
    return {k: tuple(some) for k, some in found.items()}


def compose(first: Relation, second: Relation) -> Relation:
    """``second`` applied to the results of ``first``, as one relation.

    The layouts of ``first`` into its results meet those of ``second`` into its operands, as strided
    runs: the cost grows with the number of pieces and modes, not of elements.

    Raises:
        ValueError: the shapes of ``second``'s operands are not those of ``first``'s results.

    >>> view = Relation(((3, 5),), ((15,),), (piece(0, 0, 0, 0, [(15, 1, 1)]),))
    >>> some = Relation(((15,),), ((9,),), (piece(0, 0, 2, 0, [(9, 1, 1)]),))  # [2:11]
    >>> print(compose(view, some))
    (3, 5) -> (9,)
      operand 0 2 + 9:1 -> result 0 9:1
    """
    if first.outputs != second.inputs:
        raise ValueError(
            "cannot compose the relations: the results of the first relation have shapes "
            f"{first.outputs}, but the operands of the second relation have shapes {second.inputs}"
        )
    constants, others = with_constants(first.constants, second)
    kept = [each for each in others if each.source < 0]
    found = with_results(first, second.outputs, [each for each in others if each.source >= 0])
    return replace(found, pieces=join_pieces([*found.pieces, *kept]), constants=constants)


def with_results(relation: Relation, outputs: tuple[Shape, ...], pieces: list[Piece]) -> Relation:
    """The relation with other results, whose pieces read its own results."""
    return replace(relation, outputs=outputs, pieces=through(relation.pieces, pieces))


def with_constants(
    constants: tuple[Any, ...], relation: Relation
) -> tuple[tuple[Any, ...], tuple[Piece, ...]]:
    """The constants of both, each once, and the relation's pieces renumbered to match."""
    if not relation.constants:
        return constants, relation.pieces
    known = [*constants]
    numbers = []
    for value in relation.constants:
        said = [(type(other), repr(other)) for other in known]
        if (type(value), repr(value)) not in said:
            known.append(value)
            said.append((type(value), repr(value)))
        numbers.append(-1 - said.index((type(value), repr(value))))
    pieces = [
        each if each.source >= 0 else each._replace(source=numbers[-1 - each.source])
        for each in relation.pieces
    ]
    return tuple(known), tuple(pieces)


def beside(relations: Sequence[Relation]) -> Relation:
    """Several relations of the same operands as one, with the results of all in order.

    >>> both = beside([Relation.same((2,)), Relation.same((2,))])
    >>> both.outputs, len(both.pieces)
    (((2,), (2,)), 2)
    """
    constants: tuple[Any, ...] = ()
    outputs: list[Shape] = []
    pieces: list[Piece] = []
    for relation in relations:
        constants, others = with_constants(constants, relation)
        pieces += [each._replace(target=each.target + len(outputs)) for each in others]
        outputs += relation.outputs
    return Relation(relations[0].inputs, tuple(outputs), tuple(pieces), constants)


def filled(relation: Relation, value: Any) -> Relation:
    """The relation with a constant for every result element that is in no piece.

    >>> padded = Relation(((3,),), ((5,),), (piece(0, 0, 0, 1, [(3, 1, 1)]),))
    >>> print(filled(padded, 0))
    (3,) -> (5,)
      constant 0 2:0 -> result 0 2:4
      operand 0 3:1 -> result 0 1 + 3:1
      constant 0 is 0
    """
    if relation.is_total:
        return relation
    constants, (some,) = with_constants(
        relation.constants, Relation((), ((),), (Piece(-1, 0, 0, 0, ()),), (value,))
    )
    pieces = list(relation.pieces)
    for k, shape in enumerate(relation.outputs):
        if relation.said(k) < prod(shape):
            written = [each.turned for each in relation.pieces if each.target == k]
            left = subtract([Run(0, 0, (), prod(shape))], read_once(written))
            for run in left:
                modes = [(n, 0, dx) for n, dx, _ in run.loops]
                pieces.append(piece(some.source, k, 0, run.x, [*modes, (run.length, 0, 1)]))
    return replace(relation, pieces=join_pieces(pieces), constants=constants)


# -- inverse ---------------------------------------------------------------------------------------


class ReadTwice(ValueError):
    """A relation has no inverse: an element of an operand is read more than once.

    >>> from cute_sharding.relations.table import relation_of
    >>> try:
    ...     inverse(relation_of("Tensor.expand", (2, 1), (2, 3)))
    ... except ReadTwice as error:
    ...     print(error)
    the relation has no inverse, because an element of operand 0 of shape (2, 1) is in \
several places of the results. The part of the relation that repeats the element: operand 0 \
(2,3):(1,0) -> result 0 (2,3):(3,1). If all copies are equal, pass any_copy=True
    """


def inverse(relation: Relation, *, any_copy: bool = False) -> Relation:
    """The relation from the results back to the operands.

    It exists if each operand element is read at most once, and it gives for each element that is
    read the place where it went. For a movement op that is the gradient, once unread elements are
    filled with 0 (:func:`filled`). Constants are left out. With ``any_copy`` an element that is
    read more than once is taken from its first copy: this undoes a relation on tensors whose copies
    stay equal, such as repeated heads.

    Raises:
        ReadTwice: an element is read more than once, and ``any_copy`` is not set.

    >>> some = Relation(((6,),), ((2,),), (piece(0, 0, 1, 0, [(2, 3, 1)]),))  # elements 1 and 4
    >>> print(inverse(some))
    (2,) -> (6,)
      operand 0 2:1 -> result 0 1 + 2:3
    >>> inverse(inverse(some)) == some
    True
    """
    found: list[Piece] = []
    for k in range(len(relation.inputs)):
        read: list[Run] = []
        for each in [each for each in relation.pieces if each.source == k]:
            new = _unread(each, read)
            if not any_copy and sum(some.size for some in new) < each.size:
                raise ReadTwice(
                    f"the relation has no inverse, because an element of operand {k} of shape "
                    f"{relation.inputs[k]} is in several places of the results. The part of the "
                    f"relation that repeats the element: {each}. If all copies are equal, pass "
                    "any_copy=True"
                )
            found += new
    return Relation(relation.outputs, relation.inputs, join_pieces(found))


def _unread(each: Piece, read: list[Run]) -> list[Piece]:
    """Pieces from a piece's target back to those source elements that are not in ``read``, each
    from one place; adds them to ``read``.
    """
    found: list[Piece] = []
    modes = tuple([mode for mode in each.modes if mode[1]])
    for ladder in ladders(each.x, each.y, modes):
        back = [(n, beside, step) for n, step, beside in ladder.modes]
        turned = piece(each.target, each.source, ladder.other, ladder.run.x, back)
        new = subtract([on_both_sides(ladder.run)], read)
        read += new
        found += [turned] if count_rows(new) == turned.size else only(turned, new)
    return found


def only(one: Piece, elements: Iterable[Run]) -> list[Piece]:
    """The piece restricted to some elements of its target."""
    return [found for run in elements for found in meet(one, of_run(one.target, one.target, run))]


def of_run(source: int, target: int, run: Run) -> Piece:
    """The piece from a run's x to its y."""
    return piece(source, target, run.x, run.y, [*run.loops, (run.length, 1, 1)])


# -- devices ---------------------------------------------------------------------------------------
# The part of a relation's results that a device holds, and the operands that it needs for them.


@remembered
def local(shape: tuple[int, ...], chains: tuple[Chain, ...]) -> tuple[Piece, ...]:
    """The part of a tensor that a device holds: pieces from its local tensor (0) to the tensor (0).

    Args:
        shape: the tensor's global shape.
        chains: for each dim, (split factor, devices, the device's coordinate) of each mesh dim that
            cuts it, in order.

    >>> [str(each) for each in local((4, 6), ((), ((1, 2, 1),)))]  # the last three columns
    ['operand 0 (4,3):(3,1) -> result 0 3 + (4,3):(6,1)']
    """
    held = [rows_held(n, chain) for n, chain in zip(shape, chains, strict=True)]
    below = row_major(shape)
    beside = row_major(tuple([sum(run.size for run in runs) for runs in held]))
    found = []
    for box in product(*held):
        modes = [
            (n, dy * step, dx * stride)
            for run, stride, step in zip(box, below, beside)
            for n, dx, dy in (*run.loops, (run.length, 1, 1))
        ]
        x = sum(run.y * step for run, step in zip(box, beside))
        y = sum(run.x * stride for run, stride in zip(box, below))
        found.append(piece(0, 0, x, y, modes))
    return join_pieces(found)


def held(
    relation: Relation, sharding: Sharding, device: Sequence[int], operand: int = 0
) -> Relation:
    """The relation from a device's local tensor of one operand, which lies as ``sharding`` says, to
    the results. Only the result elements that the device has are in it.

    Raises:
        ValueError: the sharding is of another shape, or has something pending.

    >>> from cute_sharding.relations.table import relation_of
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> flat = relation_of("Tensor.view", (4, 6), (24,))
    >>> print(held(flat, Sharding((4, 6), (2,), (Shard(1),)), (1,)))
    (4, 3) -> (24,)
      operand 0 (4,3):(3,1) -> result 0 3 + (4,3):(6,1)
    """
    shape = relation.inputs[operand]
    mine = _of_device(sharding, device, shape, f"operand {operand}")
    pieces = [each._replace(source=0) for each in relation.pieces if each.source == operand]
    return Relation((sharding.local_shape(device),), relation.outputs, through(mine, pieces))


def needed(
    relation: Relation, sharding: Sharding, device: Sequence[int], result: int = 0
) -> Relation:
    """The relation from the operands to a device's local tensor of one result, which is to lie as
    ``sharding`` says.

    Raises:
        ValueError: the sharding is of another shape, or has something pending.

    >>> from cute_sharding.relations.table import relation_of
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> turned = relation_of("torch.transpose", (4, 6), 0, 1)
    >>> print(needed(turned, Sharding((6, 4), (2,), (Shard(0),)), (1,)))
    (4, 6) -> (3, 4)
      operand 0 3 + (3,4):(1,6) -> result 0 (3,4):(4,1)
    """
    shape = relation.outputs[result]
    mine = _of_device(sharding, device, shape, f"result {result}")
    wanted = [each.turned for each in mine]
    return with_results(relation.of(result), (sharding.local_shape(device),), wanted)


def _of_device(
    sharding: Sharding, device: Sequence[int], shape: tuple[int, ...], name: str
) -> tuple[Piece, ...]:
    if sharding.shape != shape:
        raise ValueError(
            f"{name} has shape {shape}, but the sharding is for shape {sharding.shape}"
        )
    if any(isinstance(p, Partial) for p in sharding.placements):
        raise ValueError(f"{sharding} has a Partial: reduce the Partial first")
    chains = chains_of(sharding.cuts, len(shape), sharding.mesh)
    return local(shape, chains_on(chains, sharding.mesh, tuple(device)))
