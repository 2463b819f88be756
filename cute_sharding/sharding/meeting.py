"""Which rows two devices have in common, and where each device keeps them: intersections of
layouts, as strided runs.

A device holds rows of a tensor dim as runs that repeat with a period, in periods that repeat, and
so on: one layout if sizes divide, else a few layouts side by side. A :class:`Run` is one of them,
with two numberings ``x`` and ``y`` of its rows: by the tensor and by the device, or by two devices.
:func:`meet` joins two lists of runs on the numbering that they share. It works on whole periods (of
lengths p and q, on windows of lcm(p, q)). So its cost depends on the number of nested cuts and, if
periods do not divide one another, on (p + q) / gcd(p, q): at most about the square root of the
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple, TypeAlias, TypeVar

from cute_sharding._memory import remembered
from cute_sharding.sharding.deal import runs

T = TypeVar("T")
S = TypeVar("S")

Loop: TypeAlias = "tuple[int, int, int]"
# (split factor, devices, the device's coordinate) of each mesh dim that cuts a tensor dim, in the
# order of the cuts.
Chain: TypeAlias = "tuple[tuple[int, int, int], ...]"


class Run(NamedTuple):
    """The pairs ``(x + i·dx + ... + j, y + i·dy + ... + j)`` for each loop ``(count, dx, dy)``,
    i < count, and j < length.

    Loops are outermost first, and turns of a loop do not overlap, so both sides ascend together.
    """

    x: int
    y: int
    loops: tuple[Loop, ...]
    length: int

    @property
    def size(self) -> int:
        """The number of pairs."""
        size = self.length
        for count, _, _ in self.loops:
            size *= count
        return size

    @property
    def reach(self) -> int:
        """The last x, plus 1."""
        return self.x + self.length + sum((count - 1) * dx for count, dx, _ in self.loops)

    def turn(self, i: int) -> Run:
        """Turn ``i`` of the outermost loop."""
        (_, dx, dy), *inner = self.loops
        return Run(self.x + i * dx, self.y + i * dy, tuple(inner), self.length)

    def turns(self, first: int, stop: int) -> list[Run]:
        """The turns ``[first, stop)`` of the outermost loop."""
        if stop - first <= 1:
            return [self.turn(first)] if stop > first else []
        (_, dx, dy), *inner = self.loops
        return [
            Run(
                self.x + first * dx,
                self.y + first * dy,
                ((stop - first, dx, dy), *inner),
                self.length,
            )
        ]

    def flipped(self) -> Run:
        """The pairs as (y, x)."""
        return Run(
            self.y, self.x, tuple([(count, dy, dx) for count, dx, dy in self.loops]), self.length
        )


Runs: TypeAlias = "tuple[Run, ...]"


@remembered
def rows_held(n: int, chain: Chain) -> Runs:
    """The rows of ``n`` that a device holds: x in the tensor, y on the device, which stores them in
    ascending order.
    """
    found = [Run(0, 0, (), n)] if n else []
    for split_factor, parts, device in chain:
        taken, at = [], 0
        for start, length, period, count in runs(n, split_factor, parts, device):
            taken.append(Run(start, at, ((count, period, length),) if count > 1 else (), length))
            at += length * count
        found = meet_on_x([run.flipped() for run in found], taken)
        n = at
    return tuple(join(found))


def rows(n: int, chain: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The rows of ``n`` that a device holds, as maximal intervals ``[start, stop)``, ascending."""
    result: list[tuple[int, int]] = []
    for turn in sorted(turn for run in rows_held(n, tuple(chain)) for turn in each_turn(run)):
        start = result.pop()[0] if result and result[-1][1] == turn.x else turn.x
        result.append((start, turn.reach))
    return result


def each_turn(run: Run) -> Iterator[Run]:
    """Yield all turns of all loops, one after the other."""
    if not run.loops:
        yield run
        return
    for i in range(run.loops[0][0]):
        yield from each_turn(run.turn(i))


def row_at(n: int, chain: Sequence[tuple[int, int, int]], position: int) -> int:
    """The row of ``n`` at a position on the device, at a cost that does not grow with intervals."""
    held = rows_held(n, tuple(chain))
    if not 0 <= position < count_rows(held):
        raise IndexError(
            f"position {position} is out of range for the {count_rows(held)} rows on the device: "
            "count positions from 0"
        )
    found = meet_on_x([run.flipped() for run in held], [Run(position, position, (), 1)])
    return found[0].x


@remembered
def meet(n: int, one: Chain, other: Chain) -> Runs:
    """The rows of ``n`` that two devices both hold: x on the first, y on the second."""
    return tuple(join(meet_on_x(rows_held(n, one), rows_held(n, other))))


def same_rows(ones: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs, one of ``ones`` and one of ``others``, with the same x and the same loops in
    x: the parts whose x are equal.

    The result of :func:`meet_on_x` has no x. Along contiguous rows x - y is constant, so we encode
    both in one number, y + unit * (x - y); its steps are sums of steps in y and in x - y.
    """
    unit = 1 + max([run.flipped().reach for run in ones], default=0)
    both = [
        Run(
            run.x,
            run.y + unit * (run.x - run.y),
            tuple([(count, dx, dy + unit * (dx - dy)) for count, dx, dy in run.loops]),
            run.length,
        )
        for run in ones
    ]

    def sides(run: Run) -> tuple[Run, Run]:
        ahead, y = divmod(run.x, unit)
        steps = [(count, *divmod(step, unit), dz) for count, step, dz in run.loops]
        return (
            Run(y + ahead, y, tuple([(c, dy + da, dy) for c, da, dy, _ in steps]), run.length),
            Run(y + ahead, run.y, tuple([(c, dy + da, dz) for c, da, dy, dz in steps]), run.length),
        )

    return sorted(map(sides, join(meet_on_x(both, others))))


def near(n: int, split_factor: int, parts: int, rows: Runs) -> set[int]:
    """The devices, of the ``parts`` to which a cut of ``n`` rows deals them, that may hold some of
    ``rows`` (x). Every device that does is among them. All devices, if the rows are as long as a
    piece or have as many turns as there are devices.
    """
    every = set(range(parts))
    piece = -(-n // split_factor) if n else 1
    found: set[int] = set()
    for run in rows:
        if run.length >= piece or prod(count for count, _, _ in run.loops) >= parts:
            return every
        for turn in each_turn(run):
            for low, high in _in_pieces(turn.x, turn.reach, piece):
                whole = min(piece, n - low // piece * piece)
                block = -(-whole // parts)
                found |= {*range(low % piece // block, (high - 1) % piece // block + 1)}
    return found


def _in_pieces(start: int, stop: int, piece: int) -> list[tuple[int, int]]:
    """The interval, divided at the end of a piece."""
    edge = -(-stop // piece) * piece - piece
    return [(start, stop)] if start >= edge else [(start, edge), (edge, stop)]


def count_rows(found: Sequence[Run]) -> int:
    """The number of rows in the runs."""
    return sum(run.size for run in found)


def span(found: Runs, first: int, stop: int) -> Runs:
    """The rows at positions ``first`` to ``stop``, exclusive, in the order of the list."""
    result: list[Run] = []
    for run in found:
        if first < run.size and stop > 0:
            result += _share(run, max(first, 0), min(stop, run.size))
        first, stop = first - run.size, stop - run.size
    return tuple(result)


def _share(run: Run, first: int, stop: int) -> list[Run]:
    """The pairs at positions ``first`` to ``stop``, exclusive, of a run."""
    if first >= stop:
        return []
    if not run.loops:
        return [Run(run.x + first, run.y + first, (), stop - first)]
    each = run.size // run.loops[0][0]
    (i, head), (k, tail) = divmod(first, each), divmod(stop, each)
    if i == k:
        return _share(run.turn(i), head, tail)
    front = _share(run.turn(i), head, each) if head else []
    back = _share(run.turn(k), 0, tail) if tail else []
    return front + run.turns(i + bool(head), k) + back


def _cut(run: Run, first: int, stop: int) -> list[Run]:
    """The pairs with x in ``[first, stop)``."""
    if run.x >= first and run.reach <= stop:
        return [run]
    if not run.loops:
        begin, end = max(run.x, first), min(run.x + run.length, stop)
        return [Run(begin, run.y + begin - run.x, (), end - begin)] if begin < end else []
    count, dx, _ = run.loops[0]
    reach = run.turn(0).reach - run.x
    # Turns [some, until) have pairs in the interval; turns [whole, whole_until) lie whole in it.
    some = max(0, (first - run.x - reach) // dx + 1)
    until = min(count, -((run.x - stop) // dx))
    whole = max(some, -((run.x - first) // dx))
    whole_until = max(whole, min(until, (stop - run.x - reach) // dx + 1))
    result: list[Run] = []
    for i in range(some, min(whole, until)):
        result += _cut(run.turn(i), first, stop)
    result += run.turns(whole, whole_until) if whole < until else []
    for i in range(max(whole_until, some), until):
        result += _cut(run.turn(i), first, stop)
    return result


def meet_on_x(ones: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """The pairs (y of ``ones``, y of ``others``) with equal x."""
    result: list[Run] = []
    for one in ones:
        for other in others:
            if one.x < other.reach and other.x < one.reach:
                result += _meet_runs(one, other)
    return result


def _meet_runs(one: Run, other: Run) -> list[Run]:
    if not other.loops:
        shift = other.y - other.x
        return [
            Run(r.y, r.x + shift, tuple([(c, dy, dx) for c, dx, dy in r.loops]), r.length)
            for r in _cut(one, other.x, other.x + other.length)
        ]
    if not one.loops:
        return [r.flipped() for r in _meet_runs(other, one)]
    (_, p, dy), (_, q, dz) = one.loops[0], other.loops[0]
    # Extend to the end of the last period, even if the device does not hold its end.
    first, stop = (
        max(one.x, other.x),
        min(run.x + run.loops[0][0] * run.loops[0][1] for run in (one, other)),
    )
    window = lcm(p, q)
    times = (stop - first) // window
    if times >= 2:
        # Both repeat from window to window as long as both go on.
        loop = (times, window // p * dy, window // q * dz)
        once = meet_on_x(_cut(one, first, first + window), _cut(other, first, first + window))
        rest = first + times * window
        return [Run(r.x, r.y, (loop, *r.loops), r.length) for r in once] + meet_on_x(
            _cut(one, rest, stop), _cut(other, rest, stop)
        )
    if p < q:
        return [r.flipped() for r in _meet_runs(other, one)]
    result: list[Run] = []
    for i in range(max(0, (first - one.x) // p), min(one.loops[0][0], -((one.x - stop) // p))):
        turn = one.turn(i)
        if turn.x < stop and turn.reach > first:
            result += _meet_runs(turn, other)
    return result


def join(found: list[Run]) -> list[Run]:
    """The same pairs in fewer runs: runs that touch become one, neighbours at equal distances
    become turns of a loop, and loops that touch become one.
    """
    result: list[Run] = []
    for run in sorted(map(_coalesced, found)):
        if result and not run.loops and not result[-1].loops:
            last = result[-1]
            if run.x - last.x == run.y - last.y == last.length:
                result[-1] = Run(last.x, last.y, (), last.length + run.length)
                continue
        result.append(run)
    while len(folded := _folded(result)) < len(result):
        result = folded
    return result


def _folded(found: list[Run]) -> list[Run]:
    return [
        first
        if step is None
        else _coalesced(Run(first.x, first.y, ((count, *step), *first.loops), first.length))
        for first, count, step in turns_of_loops(found, _step_between)
    ]


def _step_between(last: Run, following: Run) -> tuple[int, int] | None:
    """The steps (x, y) from a run to one of the same form that begins after it on both sides."""
    if (following.loops, following.length) != (last.loops, last.length):
        return None
    if following.x < last.reach or following.y < last.flipped().reach:
        return None
    return following.x - last.x, following.y - last.y


def turns_of_loops(
    items: Sequence[T], step_between: Callable[[T, T], S | None]
) -> Iterator[tuple[T, int, S | None]]:
    """Neighbours at equal steps, as turns of a loop: the first item, the number of turns, and the
    step (None for a single item).
    """
    i = 0
    while i < len(items):
        count, step = 1, None
        while i + count < len(items):
            found = step_between(items[i + count - 1], items[i + count])
            if found is None or (step is not None and found != step):
                break
            step, count = found, count + 1
        yield items[i], count, step
        i += count


def _coalesced(run: Run) -> Run:
    loops: list[Loop] = []
    length = run.length
    for count, dx, dy in reversed(run.loops):
        if count == 1:
            continue
        if not loops and dx == dy == length:
            length *= count
        elif loops and dx == loops[0][0] * loops[0][1] and dy == loops[0][0] * loops[0][2]:
            loops[0] = (count * loops[0][0], loops[0][1], loops[0][2])
        else:
            loops.insert(0, (count, dx, dy))
    return Run(run.x, run.y, tuple(loops), length)
