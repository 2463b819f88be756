"""Counts of how propagations were answered and of what redistributions moved, and the logger that
explains each one. (:func:`cute_sharding.stats` shows them: :mod:`..reports.stats`.)
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock

logger = logging.getLogger("cute_sharding")

# algebra: free, with blocks of one size. tracing: free, proved for each kind of device, since
# blocks are not known to have one size (no graph is traced; the name is older than the method).
# redistribution: the input is redistributed first. refused: an error was raised. stock: left to
# torch's own rule (a mesh of one device, sizes that differ from rank to rank). signature: another
# op, answered by its signature. gate: another op, answered by the gate. free, exchanged: a movement
# op, without communication; with one exchange.
OUTCOMES = (
    "algebra",
    "tracing",
    "redistribution",
    "refused",
    "stock",
    "signature",
    "gate",
    "free",
    "exchanged",
)

REDISTRIBUTE = "redistribute"
MOST_KINDS = 1 << 7
MOST_NOTES = 1 << 8
MOST_PLACES = 1 << 8


class Received(NamedTuple):
    """Elements received: by the device that receives the most, and by all devices together."""

    busiest: int = 0
    by_all: int = 0

    def plus(self, other: Received, times: int = 1) -> Received:
        return Received(*(a + times * b for a, b in zip(self, other)))


class Moved(NamedTuple):
    """What redistributions have moved.

    Attributes:
        plan: the number of redistributions that ran by plan.
        stock: the number of those left to torch.
        collectives: the number of collectives of those by plan.
        received: the elements received by those by plan.
    """

    plan: int = 0
    stock: int = 0
    collectives: int = 0
    received: Received = Received()

    def plus(self, other: Moved, times: int = 1) -> Moved:
        return Moved(
            self.plan + times * other.plan,
            self.stock + times * other.stock,
            self.collectives + times * other.collectives,
            self.received.plus(other.received, times),
        )


# A redistribution: (shape, sizes of the mesh, placements before, placements after).
Redistribution: TypeAlias = tuple[Any, ...]


class Kind:
    """A redistribution that may run many times.

    Args:
        redistribution: what it does; None: torch has no such redistribution.
        moves: computes what it moves each time; called on request.
    """

    def __init__(self, redistribution: Redistribution | None, moves: Callable[[], Moved]) -> None:
        self.redistribution, self._moves = redistribution, moves

    @cached_property
    def moved(self) -> Moved:
        """What it moves each time."""
        return self._moves()


class Place(NamedTuple):
    """An op that was answered, on operands with certain placements; what is computed on request.

    Attributes:
        received: computes the elements that it receives each time.
        theirs: lists the redistributions of its operands by torch's own rule. Raises what that
            raises.
    """

    received: Callable[[], Received]
    theirs: Callable[[], list[Redistribution]]


# Not yet added up: (op, outcome), and kinds of redistributions that ran by plan. To append is
# atomic, so no lock is needed, which would take longer.
_notes: list[tuple[str, str] | Kind] = []
_counts: defaultdict[tuple[str, str], int] = defaultdict(int)  # (op, outcome) -> count
_places: list[tuple[str, Place]] = []  # (op, place), only the first MOST_PLACES
_moves: Counter[Kind] = (
    Counter()
)  # kind -> how often it has run; what it has moved is computed on request
_moved = Moved()
_lock = fork_safe_lock()


def count(op: str, outcome: str) -> None:
    _notes.append((op, outcome))
    if len(_notes) > MOST_NOTES:
        _add_up()


def count_place(op: str, place: Place) -> None:
    """Note what an op receives there each time that it runs."""
    if len(_places) < MOST_PLACES:
        _places.append((op, place))


def count_moves(kind: Kind) -> None:
    """Count a redistribution of that kind that runs by plan."""
    _notes.append(kind)
    if len(_notes) > MOST_NOTES:
        _add_up()


def _add_up() -> None:
    global _moved
    with _lock:
        while _notes:
            note = _notes.pop()
            if isinstance(note, Kind):
                _moves[note] += 1
            else:
                _counts[note] += 1
            if len(_moves) > MOST_KINDS:  # too many kinds of sizes to compare with torch
                for known, times in _moves.items():
                    _moved = _moved.plus(known.moved, times)
                _moves.clear()


def count_left_to_torch() -> None:
    global _moved
    with _lock:
        _moved = _moved._replace(stock=_moved.stock + 1)


class Counted(NamedTuple):
    """All counts.

    Attributes:
        outcomes: (op, outcome) -> count.
        places: (op, place).
        moved: what redistributions moved whose kinds are no longer kept.
        kinds: how often each of the other redistributions has run.
    """

    outcomes: dict[tuple[str, str], int]
    places: list[tuple[str, Place]]
    moved: Moved
    kinds: dict[Kind, int]


@contextmanager
def count_apart() -> Iterator[Counted]:
    """Collect the counts inside the ``with`` block in the given value only: for callers that ask
    what would be answered, and run nothing. Meanwhile, counts of other threads are lost.
    """
    global _moved
    found = Counted({}, [], Moved(), {})
    with _lock:
        _add_up()
        kept = dict(_counts), list(_places), _moved, Counter(_moves)
        was, logger.disabled = logger.disabled, True  # the log is about what runs
        _places.clear()
        try:
            yield found
            _add_up()
            before = kept[0]
            now = {key: n - before.get(key, 0) for key, n in _counts.items()}
            found.outcomes.update({key: n for key, n in now.items() if n})
            found.places.extend(_places)
        finally:
            _notes.clear()
            _counts.clear()
            _counts.update(kept[0])
            _moves.clear()
            _moves.update(kept[3])
            _places[:], _moved = kept[1], kept[2]
            logger.disabled = was


def read_counts(*, reset: bool) -> Counted:
    """Args:
    reset: set every count to 0 afterwards.
    """
    global _moved
    with _lock:
        _add_up()
        result = Counted(dict(_counts), list(_places), _moved, dict(_moves))
        if reset:
            _counts.clear()
            _places.clear()
            _moves.clear()
            _moved = Moved()
    return result
