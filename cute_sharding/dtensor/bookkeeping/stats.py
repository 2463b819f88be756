"""Counts of how propagations were answered and what redistributions moved, and the logger that
explains each one. (:func:`cute_sharding.stats` shows them: :mod:`..reports.stats`.)
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

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


class Moved(NamedTuple):
    """What redistributions have moved, each counted for the device that receives the most.

    Attributes:
        plan: redistributions that ran by plan.
        stock: those that were left to torch.
        collectives: of those by plan.
        received_elements: by those by plan.
        compared: of those by plan, how many of which it is known what torch would have received.
        stock_received_elements: what it would have received in the place of those.
    """

    plan: int = 0
    stock: int = 0
    collectives: int = 0
    received_elements: int = 0
    compared: int = 0
    stock_received_elements: int = 0

    def plus(self, other: Moved, times: int = 1) -> Moved:
        return Moved(*(a + times * b for a, b in zip(self, other)))


class Kind(Hashable, Protocol):
    """A redistribution that may run many times."""

    @property
    def moved(self) -> Moved:
        """What it moves each time, compared with nothing."""

    @property
    def question(self) -> tuple[Any, ...]:
        """The shape, the sizes of the mesh, and the placements before and after."""


_notes: list[tuple[str, str]] = []  # (op, outcome) of what is not yet added up
_counts: defaultdict[tuple[str, str], int] = defaultdict(int)  # of (op, outcome)
_moves: Counter[Kind] = (
    Counter()
)  # how often each kind has run: what it has moved is asked when somebody wants to know
_moved = Moved()
_lock = fork_safe_lock()


def count(op: str, outcome: str) -> None:
    _notes.append((op, outcome))  # no other thread comes between: a lock would take longer
    if len(_notes) > MOST_NOTES:
        _add_up()


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


def read(*, reset: bool) -> tuple[dict[tuple[str, str], int], Moved, dict[Kind, int]]:
    """The counts of (op, outcome); and of redistributions what those moved whose kinds are no
    longer known, and how often each of the others has run.

    Args:
        reset: set every count to 0 afterwards.
    """
    global _moved
    with _lock:
        _add_up()
        result = dict(_counts), _moved, dict(_moves)
        if reset:
            _counts.clear()
            _moves.clear()
            _moved = Moved()
    return result
