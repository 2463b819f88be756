"""Counts of how propagations were answered and of what redistributions moved, and the logger that
writes each thing once.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import NamedTuple

from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock

# -- telling ---------------------------------------------------------------------------------------
# What the log has written, each thing once in a process.

MOST_TOLD = 1 << 12
_told: set[Hashable] = set()


def is_new(what: Hashable) -> bool:
    """Whether ``what`` was not logged yet; it counts as logged from now on. After ``MOST_TOLD``
    things the log may repeat one.
    """
    if what in _told:
        return False
    if len(_told) >= MOST_TOLD:
        _told.clear()
    _told.add(what)
    return True


# -- names -----------------------------------------------------------------------------------------
# Names of tensors in errors.

# The most names that an error writes out.
NAMES_SHOWN = 8


def as_text(names: Sequence[str]) -> str:
    """Names as an error writes them; only the first if there are many.

    >>> as_text(["a", "b"]), as_text([])
    ("'a', 'b'", 'none')
    """
    shown = ", ".join(map(repr, names[:NAMES_SHOWN]))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{shown}{more}" or "none"


# -- stats -----------------------------------------------------------------------------------------
# Counts of how propagations were answered and of what redistributions moved, and the logger that
# explains each one. (``cute_sharding.stats`` shows them.)

logger = logging.getLogger("cute_sharding")

# algebra: free, with blocks of one size. tracing: free, proved for each kind of device, since
# blocks are not known to have one size (no graph is traced; the name is older than the method).
# redistribution: the input is redistributed first. stock: left to torch's own rule (a mesh of one
# device, sizes that differ from rank to rank). signature: another op, answered by its signature.
# gate: another op, answered by the gate. free, exchanged: a movement op, without communication;
# with one exchange.
OUTCOMES = (
    "algebra",
    "tracing",
    "redistribution",
    "stock",
    "signature",
    "gate",
    "free",
    "exchanged",
)

REDISTRIBUTE = "redistribute"
MOST_KINDS = 1 << 7
MOST_NOTES = 1 << 8
MOST_OPS = 1 << 8


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


class Kind:
    """A redistribution that may run many times.

    Args:
        moves: computes what it moves each time; called on request.
    """

    def __init__(self, moves: Callable[[], Moved]) -> None:
        self._moves = moves

    @cached_property
    def moved(self) -> Moved:
        """What it moves each time."""
        return self._moves()


# Not yet added up: (op, outcome), and kinds of redistributions that ran by plan. To append is
# atomic, so no lock is needed, which would take longer.
_notes: list[tuple[str, str] | Kind] = []
_counts: defaultdict[tuple[str, str], int] = defaultdict(int)  # (op, outcome) -> count
# (op, what computes the elements that it receives each time), only the first MOST_OPS
_received: list[tuple[str, Callable[[], Received]]] = []
_moves: Counter[Kind] = (
    Counter()
)  # kind -> how often it has run; what it has moved is computed on request
_moved = Moved()
_lock = fork_safe_lock()


def count(op: str, outcome: str) -> None:
    apart = _apart.get()
    if apart is not None:
        apart.append(outcome)
        return
    _notes.append((op, outcome))
    if len(_notes) > MOST_NOTES:
        _add_up()


def count_received(op: str, received: Callable[[], Received]) -> None:
    """Count the elements that an op receives each time that it runs on operands with certain
    placements; ``received`` is called on request.
    """
    if _apart.get() is None and len(_received) < MOST_OPS:
        _received.append((op, received))


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
            if len(_moves) > MOST_KINDS:
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
        received: (op, what computes the elements that it receives each time).
        moved: what redistributions moved whose kinds are no longer kept.
        kinds: how often each of the other redistributions has run.
    """

    outcomes: dict[tuple[str, str], int]
    received: list[tuple[str, Callable[[], Received]]]
    moved: Moved
    kinds: dict[Kind, int]


# The outcomes that a thread collects apart from the counts; None: it counts them.
_apart: ContextVar[list[str] | None] = ContextVar("apart", default=None)


@contextmanager
def count_apart() -> Iterator[list[str]]:
    """Collect the outcomes of this thread inside the ``with`` block in the given list, in order:
    for callers that ask what is decided, and run nothing. They are neither counted nor logged.
    """
    outcomes: list[str] = []
    before = _apart.set(outcomes)
    try:
        yield outcomes
    finally:
        _apart.reset(before)


logger.addFilter(lambda record: _apart.get() is None)


def read_counts(*, reset: bool) -> Counted:
    """Args:
    reset: set every count to 0 afterwards.
    """
    global _moved
    with _lock:
        _add_up()
        result = Counted(dict(_counts), list(_received), _moved, dict(_moves))
        if reset:
            _counts.clear()
            _received.clear()
            _moves.clear()
            _moved = Moved()
    return result
