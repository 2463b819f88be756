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

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import NamedTuple, TypeAlias

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
        return _spans(windows, within, self.step)

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
            for run in meet_on_x(list(map(_alone, found)), piece):
                if a == 0:
                    images.append(Run(b, 0, (), 1))
                else:
                    images.append(run._replace(x=run.x + b if a > 0 else b + 1 - run.reach))
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
            [run._replace(x=run.x - first, y=run.x - first) for run in map(_alone, some)]
            for some, first in ((rows, self.down), (columns, self.right))
        )
        both = meet_on_x(meet_on_x(one, other), [Run(0, 0, (), self.length)])
        return _each_once(map(_alone, both))

    def is_view(self, rows: Runs, columns: Runs) -> bool:
        """Whether what a device has is a diagonal of its own."""
        return all(len(some) <= 1 and not any(r.loops for r in some) for some in (rows, columns))


Form: TypeAlias = "Window | Fold | Diagonal"


def _alone(run: Run) -> Run:
    """The rows x of a run, on both sides."""
    return Run(run.x, run.x, tuple([(count, dx, dx) for count, dx, _ in run.loops]), run.length)


@lru_cache(maxsize=1 << 12)
def _spans(windows: Runs, within: Runs, step: int) -> Runs:
    """The rows ``w·step + i``, each once."""
    if within and max(run.reach for run in within) <= step:
        # Windows that do not overlap: a loop over them, around the loops within one.
        n = sum(part.size for part in within)
        return tuple(join([_nested(run, part, step, n) for run in windows for part in within]))
    parts = [Run(a, 0, (), b - a) for a, b in _intervals(within)]
    return _each_once(
        [
            block._replace(x=block.x + part.x)
            for run in windows
            for part in parts
            for block in _spanned(run, part.length, step)
        ]
    )


def _nested(windows: Run, part: Run, step: int, n: int) -> Run:
    loops = [(count, dx * step, dy * n) for count, dx, dy in windows.loops]
    around = [loop for loop in (*loops, (windows.length, step, n)) if loop[0] != 1]
    x, y = windows.x * step + part.x, windows.y * n + part.y
    return Run(x, y, (*around, *part.loops), part.length)


def _spanned(run: Run, size: int, step: int) -> list[Run]:
    """The first ``size`` rows of the windows of one run, each once; y means nothing yet."""
    start, length, reach = run.x * step, size, size
    loops: list[tuple[int, int, int]] = []
    outer = [*((count, dx * step) for count, dx, _ in run.loops), (run.length, step)]
    while outer:
        count, period = outer.pop()
        if count == 1:
            continue
        if not loops and period <= length:
            reach = length = length + (count - 1) * period
        elif period < reach:  # turns that reach into one another, and have gaps
            turn = [Run(0, 0, tuple(loops), length)]
            rows = _merged(_intervals(_repeated(turn, [(count, period)], 0)))
            return _repeated([Run(a, 0, (), b - a) for a, b in rows], outer, start)
        else:
            loops.insert(0, (count, period, 0))
            reach += (count - 1) * period
    return [Run(start, 0, tuple(loops), length)]


def _each_once(found: Iterable[Run]) -> Runs:
    """The rows x of runs, also of runs that have some in common, one after the other on y."""
    blocks = sorted(found)
    if any(meet_on_x([one], [other]) for one, other in combinations(blocks, 2)):
        blocks = [Run(a, 0, (), b - a) for a, b in _merged(_intervals(blocks))]
    result, at = [], 0
    for run in blocks:
        result.append(_packed(run, at))
        at += run.size
    return tuple(join(result))


def _repeated(runs: Sequence[Run], loops: Sequence[tuple[int, int]], start: int) -> list[Run]:
    """The runs at each turn of the loops, outermost first; they may reach into one another."""
    offsets = [start]
    for count, step in loops:
        offsets = [offset + i * step for offset in offsets for i in range(count)]
    return [Run(offset + r.x, 0, r.loops, r.length) for offset in offsets for r in runs]


def _intervals(runs: Iterable[Run]) -> Iterator[tuple[int, int]]:
    """The rows of runs one interval at a time: where turns of one lie among those of another."""
    for run in runs:
        if run.loops:
            yield from _intervals(run.turn(i) for i in range(run.loops[0][0]))
        else:
            yield run.x, run.x + run.length


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def _packed(run: Run, at: int) -> Run:
    """The rows of a run, one after the other from ``at`` on."""
    loops = [
        (count, dx, prod(c for c, _, _ in run.loops[i + 1 :]) * run.length)
        for i, (count, dx, _) in enumerate(run.loops)
    ]
    return Run(run.x, at, tuple(loops), run.length)
