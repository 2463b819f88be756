"""The rows of one tensor dim as an exchange numbers them, and those of them that a device holds.

A movement op maps the rows of a dim by pieces: output row j is input row a·j + b on an interval.
Such a map is a *relation*, a list of :class:`Run`, as are the rows that a device holds
(redistribution/meeting.py): so what a device has of the mapped rows is their meeting, in strided
runs again, whatever the number of rows. A map that runs downward (flip) is one that runs upward on
rows that are numbered from the end. Windows that overlap (unfold) need rows that several outputs
have in common: what a device needs is their union, in which each row stands once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from cute_sharding.redistribution.meeting import (
    Chain,
    Run,
    Runs,
    join,
    meet_on_x,
    rows_held,
)

ALONE: Runs = (Run(0, 0, (), 1),)


class Window(NamedTuple):
    """Row w of the dim stands for the rows ``[w·step, w·step + size)`` of the exchange.

    >>> spans((Run(0, 0, (), 3),), Window(size=4, step=2))  # three windows of rows 0 to 7
    (Run(x=0, y=0, loops=(), length=8),)
    """

    size: int
    step: int


class Rows(NamedTuple):
    """How the rows of an exchange are those of a tensor's dim.

    Attributes:
        dim: the tensor's dim; None: it has none, and the exchange one row, which all devices have.
        runs: x in the exchange, y in the tensor; None: the same.
        backward: the tensor's rows are numbered from the last (in ``runs`` too), and lie so on a
            device.
        window: each row of the tensor stands for several of the exchange; they lie on a device as
            :func:`spans` has them.

    >>> shifted = Rows(0, (Run(0, 1, (), 7),))  # row j of the exchange is row j + 1 of eight
    >>> held(shifted, 8, ((1, 2, 1),))  # on the second of two devices
    (Run(x=3, y=0, loops=(), length=4),)
    """

    dim: int | None
    runs: Runs | None = None
    backward: bool = False
    window: Window | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the exchange's rows are those of the dim, one for one and in order."""
        return self.dim is not None and self[1:] == (None, False, None)


@lru_cache(maxsize=1 << 14)
def held(rows: Rows, n: int, chain: Chain) -> Runs:
    """What a device holds of the exchange's rows: x in the exchange, y on the device.

    Args:
        n: the rows of the tensor's dim.
        chain: how these are cut, with the device's coordinates.
    """
    if rows.dim is None:
        return ALONE
    found = rows_held(n, chain)
    if rows.window is not None:
        return spans(found, rows.window)
    if rows.backward:
        found = tuple(join([_turned(run, n, _count(found)) for run in found]))
    if rows.runs is None:
        return found
    return tuple(join(meet_on_x([run.flipped() for run in rows.runs], found)))


@lru_cache(maxsize=1 << 14)
def needed(source: Rows, of: int, target: Rows, n: int, chain: Chain) -> Runs:
    """:func:`held` of the target, but for rows that are no row of the source, a dim of ``of`` rows:
    what comes from nowhere is filled in.
    """
    whole = held(source, of, ())
    return tuple(
        join(meet_on_x([Run(r.x, r.x, _same(r), r.length) for r in whole], held(target, n, chain)))
    )


@lru_cache(maxsize=1 << 14)
def between(source: Rows, of: int, had: Chain, target: Rows, n: int, wanted: Chain) -> Runs:
    """The rows that one device holds and another needs: x on the one, y on the other."""
    return tuple(join(meet_on_x(held(source, of, had), held(target, n, wanted))))


def _same(run: Run) -> tuple[tuple[int, int, int], ...]:
    return tuple([(count, dx, dx) for count, dx, _ in run.loops])


def _count(found: Iterable[Run]) -> int:
    return sum(run.size for run in found)


def _turned(run: Run, n: int, count: int) -> Run:
    """The same rows, numbered from the last of ``n``; on the device, from the last of ``count``."""
    last = run.y + run.length + sum((c - 1) * dy for c, _, dy in run.loops)
    return Run(n - run.reach, count - last, run.loops, run.length)


# -- windows ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def spans(windows: Runs, window: Window) -> Runs:
    """The rows that some windows are made of, each once: x the row, y how many of them come
    before it.

    Args:
        windows: x the number of a window.
    """
    if window.size == 0:
        return ()
    blocks = sorted([block for run in windows for block in _spanned(run, window)])
    if any(following.x < run.reach for run, following in pairwise(blocks)):
        blocks = [Run(a, 0, (), b - a) for a, b in _merged(_intervals(blocks))]
    found, at = [], 0
    for run in blocks:
        found.append(_packed(run, at))
        at += run.size
    return tuple(join(found))


def _spanned(run: Run, window: Window) -> list[Run]:
    """The rows of the windows of one run, each once; y means nothing yet."""
    start, length, reach = run.x * window.step, window.size, window.size
    loops: list[tuple[int, int, int]] = []
    outer = [*((count, dx * window.step) for count, dx, _ in run.loops), (run.length, window.step)]
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


@lru_cache(maxsize=1 << 12)
def beginnings(windows: Runs, window: Window) -> Runs:
    """Where windows begin among the rows of :func:`spans`: x the position of the window (y of
    ``windows``), y that of its first row.
    """
    first = [
        Run(
            run.x * window.step,
            run.y,
            (*((c, dx * window.step, dy) for c, dx, dy in run.loops), (run.length, window.step, 1)),
            1,
        )
        for run in windows
    ]
    return tuple(join(meet_on_x(list(map(_without_turns_of_one, first)), spans(windows, window))))


def _without_turns_of_one(run: Run) -> Run:
    return run._replace(loops=tuple([loop for loop in run.loops if loop[0] != 1]))
