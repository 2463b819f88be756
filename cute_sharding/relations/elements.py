"""Sets of elements: each element of several layouts once, and differences of such sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cute_sharding.relations.piece import Piece, ladders
from cute_sharding.sharding.meeting import Run, join, meet_on_x


def read_once(pieces: Iterable[Piece]) -> list[Run]:
    """The elements of the source that the pieces read, each once, ascending in each run; x and y
    are both the element's number.

    >>> from cute_sharding.relations.piece import piece
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
