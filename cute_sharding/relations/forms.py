"""Rows of an exchange that are not those of one dim of a tensor, one for one.

- windows (unfold): row i of window w is row ``w·step + i``. Windows may overlap.
- folds (padding by reflection, by the last row, around the end): row j is row ``a·j + b``, by
  pieces, with a of 1, -1 or 0: several rows may stand for one.
- diagonals: row j is an element of which both dims' rows are known; one mode, whose stride is the
  sum of two.

What a device needs, or has, is the union of the rows that its own stand for, in which each is once,
in an order that y tells. So each crosses once, and the rest is done on the device, before or after.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from cute_sharding.relations.elements import alone, without
from cute_sharding.relations.piece import joined, ladders, piece
from cute_sharding.sharding.meeting import Run, Runs, join, meet_on_x


class Window(NamedTuple):
    """Row i of ``across``, in row w of the dim, is row ``w·step + i`` of the exchange.

    >>> from cute_sharding.sharding.meeting import Run
    >>> three = (Run(0, 0, (), 3),)
    >>> Window(across=1, size=4, step=2).rows(three, (Run(0, 0, (), 4),))  # rows 0 to 7
    (Run(x=0, y=0, loops=(), length=8),)
    """

    across: int
    size: int
    step: int

    def rows(self, windows: Runs, within: Runs) -> Runs:
        """Those that the rows ``within`` of some windows are."""
        return _in_windows(windows, within, self.step)

    def evenly(self, windows: Runs, within: Runs) -> int | None:
        """How far apart the windows begin among :meth:`rows`, the first at row 0, where the rows of
        each lie together; None where that differs.
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

    def is_view(self, windows: Runs, within: Runs) -> bool:
        """Whether a device's windows are a view of their rows."""
        return self.evenly(windows, within) is not None


class Fold(NamedTuple):
    """Row j of the dim is row ``a·j + b`` of the exchange, for start <= j < stop.

    Attributes:
        pieces: (start, stop, a, b), one after the other.

    >>> from cute_sharding.sharding.meeting import Run
    >>> reflected = Fold(((0, 2, -1, 2), (2, 6, 1, -2)))  # two rows before the first of four
    >>> reflected.rows((Run(0, 0, (), 1), Run(2, 1, (), 2)))  # rows 2; 0 and 1
    (Run(x=0, y=0, loops=(), length=3),)
    """

    pieces: tuple[tuple[int, int, int, int], ...]

    def rows(self, found: Runs) -> Runs:
        """Those that a device's rows are."""
        images: list[Run] = []
        for start, stop, a, b in self.pieces:
            piece = [Run(start, start, (), stop - start)] if stop > start else []
            for run in meet_on_x(list(map(alone, found)), piece):
                first = b if a == 0 else run.x + b if a > 0 else b + 1 - run.reach
                images.append(Run(first, 0, (), 1) if a == 0 else run._replace(x=first))
        return _each_once(images)

    def is_view(self, found: Runs) -> bool:
        """A copy, always."""
        return False


class Diagonal(NamedTuple):
    """Row j of the exchange is row ``j + down`` of the dim and row ``j + right`` of ``across``.

    >>> from cute_sharding.sharding.meeting import Run
    >>> rows = (Run(2, 0, (), 2),)
    >>> Diagonal(across=1, down=0, right=1, length=5).rows(rows, (Run(0, 0, (), 4),))  # (2, 3)
    (Run(x=2, y=0, loops=(), length=1),)
    """

    across: int
    down: int
    right: int
    length: int

    def rows(self, rows: Runs, columns: Runs) -> Runs:
        """The elements of which a device has both the row and the column."""
        one, other = (
            [run._replace(x=run.x - first, y=run.x - first) for run in map(alone, some)]
            for some, first in ((rows, self.down), (columns, self.right))
        )
        both = meet_on_x(meet_on_x(one, other), [Run(0, 0, (), self.length)])
        return _each_once(map(alone, both))

    def is_view(self, rows: Runs, columns: Runs) -> bool:
        """Whether what a device has is a diagonal of its own."""
        return all(len(some) <= 1 and not any(r.loops for r in some) for some in (rows, columns))


Form: TypeAlias = "Window | Fold | Diagonal"


@lru_cache(maxsize=1 << 12)
def _in_windows(windows: Runs, within: Runs, step: int) -> Runs:
    """The rows ``w·step + i``, each once; of windows that do not overlap one window after the
    other.
    """
    count, overlap = sum(part.size for part in within), any(part.reach > step for part in within)
    found = []
    for some, part in product(windows, within):
        loops = [(n, dx * step, dy * count) for n, dx, dy in (*some.loops, (some.length, 1, 1))]
        first, at = some.x * step + part.x, some.y * count + part.y
        if not overlap:
            around = [loop for loop in loops if loop[0] > 1]
            found.append(Run(first, at, (*around, *part.loops), part.length))
            continue
        length, apart = 1, []  # of rows one after the other, and how these lie
        for n, dx, _ in sorted([*loops, *part.loops, (part.length, 1, 1)], key=itemgetter(1)):
            if dx <= length:
                length += (n - 1) * dx
            elif n > 1:
                apart.append((n, dx, 0))
        found += [ladder.run for ladder in ladders(first, 0, (*apart, (length, 1, 0)))]
    return _each_once(found) if overlap else tuple(join(found))


def _each_once(found: Iterable[Run]) -> Runs:
    """The rows x of runs, also of runs that have some in common, one after the other on y."""
    union: list[Run] = []
    for run in found:
        union += without([alone(run)], union)
    pieces = [piece(0, 0, run.x, run.x, [*run.loops, (run.length, 1, 1)]) for run in union]
    result, at = [], 0
    for run in sorted(some.run for one in joined(pieces) for some in ladders(one.x, 0, one.modes)):
        result.append(run._replace(y=at))
        at += run.size
    return tuple(join(result))
