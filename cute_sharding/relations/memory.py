"""WrittenMemory that is written to: of each element what it is, as pieces from operands.

A write covers elements with pieces; what earlier ones say of these elements is gone. Reading is
composition: what a view has of the memory is met with the pieces that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cute_sharding.relations.relation import (
    Piece,
    meet,
    only,
    piece,
    reaching,
    read_once,
    subtract,
    through,
)
from cute_sharding.sharding.rows import Run, count_rows

# The operand of elements that have no value: what torch.empty gives, and copies of it.
NOTHING = -1


class WrittenMemory:
    """Elements, of each of which it is known what was written there last.

    Args:
        size: how many there are.
        pieces: what they are before anything is written, from operands to elements; none for
            memory without values.

    >>> from cute_sharding.relations.relation import join_pieces
    >>> memory = WrittenMemory(8)
    >>> memory.write(view_of(0, (8,), (1,)), [piece(5, 0, 0, 0, [(8, 0, 1)])])
    >>> memory.write(view_of(2, (3,), (2,)), [piece(1, 0, 0, 0, [(3, 1, 1)])])  # [2:8:2]
    >>> for each in join_pieces(memory.read(view_of(0, (4, 2), (2, 1)))):
    ...     print(each)
    operand 5 2:0 -> result 0 2:1
    operand 1 3:1 -> result 0 2 + 3:2
    operand 5 3:0 -> result 0 3 + 3:2
    """

    def __init__(self, size: int, pieces: Sequence[Piece] = ()) -> None:
        self.size = size
        self._pieces = list(pieces)
        self._is_settled = len(self._pieces) < 2

    @property
    def pieces(self) -> Sequence[Piece]:
        """What the elements are, each in one piece; those without a value in none."""
        if not self._is_settled:
            self._pieces, self._is_settled = list(latest(self._pieces)), True
        return self._pieces

    def write(self, onto: Piece, pieces: Sequence[Piece]) -> None:
        """Write ``pieces``, from operands to the positions of a view, to the elements that are
        ``onto``, from elements to these positions.
        """
        size = onto.size
        if sum(each.size for each in pieces) < size:
            modes = [(n, 0, step) for n, step, _ in onto.modes]
            self._log(piece(NOTHING, 0, 0, onto.x, modes), size)
        if onto.modes == ((size, 1, 1),) or size == 1:
            first = onto.x - onto.y
            for each in pieces:
                self._log(each._replace(y=each.y + first), size)
            return
        back = onto.turned._replace(source=0, target=0)
        for each in pieces:
            for found in meet(each, back):
                self._log(found, size)

    def write_piece(self, one: Piece) -> None:
        """Write a piece from an operand to elements."""
        self._log(one, one.size)

    def _log(self, one: Piece, size: int) -> None:
        if size == self.size and one.size == size:
            self._pieces = []
        if one.source == NOTHING and not self._pieces:
            return
        self._pieces.append(one)
        self._is_settled = len(self._pieces) < 2 and one.source != NOTHING

    def read(self, view: Piece) -> Sequence[Piece]:
        """What the positions of a view are, from operands; ``view``: from elements to positions."""
        pieces = self.pieces
        if len(view.modes) == 1 and view.modes[0][1:] == (1, 1):
            stop = view.x + view.modes[0][0]
            every = [(each, *_bounds(each)) for each in pieces]
            some = [(each, low, high) for each, low, high in every if low < stop and view.x <= high]
            if all(view.x <= low and high < stop for _, low, high in some):
                first = view.y - view.x
                return (
                    [each._replace(y=each.y + first) for each, _, _ in some]
                    if first
                    else [each for each, _, _ in some]
                )
        return through(pieces, [view])

    def refine(self, factor: int, operands: dict[int, int]) -> None:
        """Count each element as so many; ``operands``: the number of each operand so counted."""
        self._pieces = [in_parts(each, factor, operands) for each in self.pieces]
        self.size *= factor

    def lacks(self, view: Piece) -> int:
        """How many positions of a view have no value."""
        return view.size - sum(each.size for each in self.read(view))


def view_of(first: int, shape: Sequence[int], strides: Sequence[int]) -> Piece:
    """From the elements of a memory to the row-major positions of a tensor that lies in it."""
    modes, below = [], 1
    for n, step in zip(reversed(shape), reversed(strides)):
        modes.append((n, step, below))
        below *= n
    return piece(0, 0, first, 0, modes)


def overlaps(view: Piece) -> bool:
    """Whether positions of a tensor lie at one place of its memory, as those of windows do; not
    whether it is expanded.

    >>> overlaps(view_of(0, (3, 2), (1, 1))), overlaps(view_of(0, (3, 2), (0, 1)))
    (True, False)
    """
    steps = sorted(((n, abs(x), y) for n, x, y in view.modes if x), key=lambda mode: -mode[1])
    return reaching(steps) is not None


def latest(written: Sequence[Piece]) -> Iterator[Piece]:
    """Of pieces in the order in which they are written, the parts that none writes over later;
    without those of :data:`NOTHING`.
    """
    for group in _meeting(written):
        base, *others = group
        # Nearly always the others are apart from one another, and cover what was there before.
        above = [part for some in _meeting(others) for part in _on_top(some)]
        bounds = [_bounds(each) for each in group]
        extent = max(high for _, high in bounds) - min(low for low, _ in bounds) + 1
        if sum(part.size for part in above) < extent:
            above += _not_in(base, above)
        yield from (part for part in above if part.source != NOTHING)


def _meeting(written: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces in groups, as they are ordered: those of two groups lie apart."""
    group: list[int] = []
    reach = -1
    for low, high, k in sorted((*_bounds(each), k) for k, each in enumerate(written)):
        if low > reach and group:
            yield [written[i] for i in sorted(group)]
            group = []
        group.append(k)
        reach = max(reach, high)
    if group:
        yield [written[i] for i in sorted(group)]


def _on_top(written: Sequence[Piece]) -> list[Piece]:
    """The parts of pieces that no later one writes over."""
    found: list[Piece] = []
    for each in reversed(written):
        found += _not_in(each, found)
    return found


def _not_in(one: Piece, others: Sequence[Piece]) -> list[Piece]:
    """The parts of a piece whose elements are in none of the others."""
    low, high = _bounds(one)
    bounds = [(each, *_bounds(each)) for each in others]
    over = [run for each, a, b in bounds if a <= high and low <= b for run in elements_of(each)]
    if not over:
        return [one]
    runs = subtract(elements_of(one), over)
    return [one] if count_rows(runs) == one.size else only(one, runs)


def _bounds(one: Piece) -> tuple[int, int]:
    """The least and the greatest element of a piece's target, in which it only ascends."""
    return one.y, one.y + sum([(n - 1) * dy for n, _, dy in one.modes])


def elements_of(one: Piece) -> list[Run]:
    """The elements of a piece's target."""
    return read_once([piece(0, 0, one.y, 0, [(n, dy, dx) for n, dx, dy in one.modes])])


# -- elements as parts, and parts as elements ------------------------------------------------------


def in_parts(one: Piece, factor: int, operands: dict[int, int]) -> Piece:
    """The piece between parts, of which each element has so many on both sides. A constant is one
    on both.

    >>> print(in_parts(piece(0, 0, 3, 0, [(2, 4, 1)]), 2, {0: 1}))
    operand 1 6 + (2,2):(8,1) -> result 0 (2,2):(2,1)
    """
    modes = [(n, dx * factor, dy * factor) for n, dx, dy in one.modes]
    modes.append((factor, 1, 1))
    return piece(operands[one.source], one.target, one.x * factor, one.y * factor, modes)


def of_parts(one: Piece, factor: int, operands: dict[int, int]) -> Piece | None:
    """The inverse of :func:`in_parts`; None: the piece takes elements apart."""
    *outer, (n, dx, dy) = one.modes or ((1, 1, 1),)
    if (dx, dy) != (1, 1) or n % factor:
        return None
    numbers = [one.x, one.y, *(step for mode in outer for step in mode[1:])]
    if any(number % factor for number in numbers):
        return None
    modes = [(m, a // factor, b // factor) for m, a, b in outer] + [(n // factor, 1, 1)]
    return piece(operands[one.source], one.target, one.x // factor, one.y // factor, modes)
