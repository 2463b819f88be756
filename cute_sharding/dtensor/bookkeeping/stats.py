"""Counts of how propagations were answered and what redistributions moved, and the logger that
explains each one. (:func:`cute_sharding.stats` shows them: :mod:`..reports.stats`.)
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock

logger = logging.getLogger("cute_sharding")

# algebra: free, every block of one size. tracing: free, and proved for each kind of device, as
# blocks are not known to be of one size (no graph is traced; the name is older than the method).
# redistribution: the input is redistributed first. refused: an error was raised. stock: left to
# torch's own rule (a mesh of one device, sizes that differ from rank to rank). signature: of other
# ops, answered by their signature. gate: of other ops, given what torch would have had. free,
# exchanged: of movement ops, without communication; with one exchange.
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
MOST_KINDS = 1 << 10
MOST_NOTES = 1 << 8
MOST_PLACES = 1 << 10


class Received(NamedTuple):
    """Elements received: by the device that receives the most, and by all devices together."""

    busiest: int = 0
    by_all: int = 0

    def plus(self, other: Received, times: int = 1) -> Received:
        return Received(*(a + times * b for a, b in zip(self, other)))


class Moved(NamedTuple):
    """What redistributions have moved.

    Attributes:
        plan: redistributions that ran by plan.
        stock: those that were left to torch.
        collectives: of those by plan.
        received: by those by plan.
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


# A redistribution: the shape, the sizes of the mesh, and the placements before and after.
Redistribution: TypeAlias = tuple[Any, ...]


class Kind:
    """A redistribution that may run many times.

    Args:
        redistribution: what it does; None: something that torch has no way to do.
        moves: what it moves each time. Asked when somebody wants to know.
    """

    def __init__(self, redistribution: Redistribution | None, moves: Callable[[], Moved]) -> None:
        self.redistribution, self._moves = redistribution, moves

    @cached_property
    def moved(self) -> Moved:
        """What it moves each time."""
        return self._moves()


class Place(Protocol):
    """An op that was answered, on operands that lie in one way."""

    @property
    def received(self) -> Received:
        """What it receives each time."""

    @property
    def redistributions(self) -> list[Redistribution]:
        """How torch's own rule would have redistributed its operands. Raises what that raises."""


_notes: list[tuple[str, str]] = []  # (op, outcome) of what is not yet added up
_counts: defaultdict[tuple[str, str], int] = defaultdict(int)  # of (op, outcome)
_places: list[tuple[str, Place]] = []  # (op, place), the first that there were
_moves: Counter[Kind] = (
    Counter()
)  # how often each kind has run: what it has moved is asked when somebody wants to know
_moved = Moved()
_lock = fork_safe_lock()


def count(op: str, outcome: str) -> None:
    _notes.append((op, outcome))  # no other thread comes between: a lock would take longer
    if len(_notes) > MOST_NOTES:
        _add_up()


def count_place(op: str, place: Place) -> None:
    """What an op receives there, each time that it runs."""
    if len(_places) < MOST_PLACES:
        _places.append((op, place))


def _add_up() -> None:
    with _lock:
        while _notes:
            _counts[_notes.pop()] += 1


def count_moves(kind: Kind) -> None:
    """A redistribution of that kind runs by plan."""
    global _moved
    with _lock:
        _moves[kind] += 1
        if len(_moves) > MOST_KINDS:  # sizes of all kinds: too many to ask torch about
            for known, times in _moves.items():
                _moved = _moved.plus(known.moved, times)
            _moves.clear()


def count_left_to_torch() -> None:
    global _moved
    with _lock:
        _moved = _moved._replace(stock=_moved.stock + 1)


class Counted(NamedTuple):
    """All that was counted.

    Attributes:
        outcomes: the counts of (op, outcome).
        places: what is known of (op, place).
        moved: what redistributions moved whose kinds are no longer known.
        kinds: how often each of the other redistributions has run.
    """

    outcomes: dict[tuple[str, str], int]
    places: list[tuple[str, Place]]
    moved: Moved
    kinds: dict[Kind, int]


@contextmanager
def aside() -> Iterator[Counted]:
    """What is counted inside is found in the value that is given, and nowhere else: for who asks
    what would be answered, and runs nothing. Counts of other threads meanwhile are left out.
    """
    global _moved
    found = Counted({}, [], Moved(), {})
    with _lock:
        _add_up()
        kept = dict(_counts), list(_places), _moved, Counter(_moves)
        was, logger.disabled = logger.disabled, True  # the log tells of what runs
        _places.clear()
        try:
            yield found
            _add_up()
            before = kept[0]
            now = {key: n - before.get(key, 0) for key, n in _counts.items()}
            found.outcomes.update({key: n for key, n in now.items() if n})
            found.places.extend(_places)
        finally:
            _counts.clear()
            _counts.update(kept[0])
            _moves.clear()
            _moves.update(kept[3])
            _places[:], _moved = kept[1], kept[2]
            logger.disabled = was


def read(*, reset: bool) -> Counted:
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
