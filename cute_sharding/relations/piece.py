"""One piece of a relation: two layouts of one shape, into the elements of a source and of a target.

Elements are numbered row-major, so that a view is one piece whatever its shapes are. A piece is
given by its modes ``(size, step in the source, step in the target)``. The composition of two pieces
is a meeting of strided runs (sharding/meeting.py), at a cost that grows with the number of modes
and not of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.sharding.meeting import Run, meet_on_x, turns_of_loops

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
    k = _reaching(modes)
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


def _reaching(modes: Sequence[Mode]) -> int | None:
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
