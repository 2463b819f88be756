"""Counts of how propagations were answered and what redistributions moved, and the logger that
explains each one.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import NamedTuple, Protocol

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
    def stock_received_elements(self) -> int | None:
        """What torch would receive each time; None where it cannot do it. May take a while."""


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


def _compared(kind: Kind) -> Moved:
    received = kind.stock_received_elements
    return (
        kind.moved
        if received is None
        else kind.moved._replace(compared=1, stock_received_elements=received)
    )


def stats(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """For each op, how many of its propagations had each outcome since the last reset; and under
    "redistribute" what redistributions moved, where these run by plan.

    What a view redistributes without that is an outcome of the view.

    DTensor caches propagations, so an op that runs again on the same shapes and placements is not
    counted again. Redistributions are counted each time that they run, and in a compiled program
    once, when it is compiled.

    Outcomes of a view: ``algebra`` (free, all blocks of one size), ``tracing`` (free, sizes do not
    divide), ``redistribution`` (the input is redistributed first), ``refused`` (an error was
    raised) and ``stock`` (left to torch's own rule: meshes of one device in all, which torch also
    uses as a stand-in to derive the rules of other ops; sizes that differ from rank to rank). Of
    other ops: ``signature`` (answered by the op's signature) and ``gate`` (given what torch would
    have had).

    Of a movement op on a sharded dim (with ``movement``): ``free``, ``exchanged`` (one exchange of
    what is missing) and ``stock`` (left to what answers without ``movement``).

    Of redistributions, beside the outcomes: ``plan`` and ``stock``, how many ran by plan and how
    many were left to torch; of those by plan the ``collectives``, the ``received_elements`` of the
    device that receives the most; and ``stock_received_elements``, what it would have received by
    torch's own steps, as rank 0 counts them, in the place of those ``compared`` (not: what torch
    cannot do, and the oldest of more than a thousand kinds of redistribution).

    Args:
        reset: set every count to 0 afterwards.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> from cute_sharding.dtensor import propagate_shape_and_sharding
    >>> reset_stats()
    >>> _ = propagate_shape_and_sharding([Shard(0)], (4, 6), view_groups((4, 6), (24,)), (2,))
    >>> stats()["view"]["algebra"]
    1
    """
    global _moved
    with _lock:
        _add_up()
        result = {
            op: {outcome: _counts[op, outcome] for outcome in OUTCOMES}
            for op in sorted({op for op, _ in _counts})
        }
        total, moves = _moved, dict(_moves)
        if reset:
            _counts.clear()
            _moves.clear()
            _moved = Moved()
    for kind, times in moves.items():  # outside of the lock: it may take a while
        total = total.plus(_compared(kind), times)
    if any(total):
        result[REDISTRIBUTE] = (
            dict.fromkeys(OUTCOMES, 0) | total._asdict()
        )  # the outcomes as well, so that all entries can be added up
    return result


def reset_stats() -> None:
    """Set every count of :func:`stats` to 0.

    >>> reset_stats()
    >>> stats()
    {}
    """
    stats(reset=True)
