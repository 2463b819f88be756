"""``stats``: what was counted, and what of it torch's own redistribution would have received."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import OUTCOMES, REDISTRIBUTE, Kind, Moved, read
from cute_sharding.dtensor.reports.stock import stock_plan


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
    counts, total, moves = read(reset=reset)
    result = {
        op: {outcome: counts.get((op, outcome), 0) for outcome in OUTCOMES}
        for op in sorted({op for op, _ in counts})
    }
    for kind, times in moves.items():
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
    read(reset=True)


def _compared(kind: Kind) -> Moved:
    received = _stock_received(*kind.question)
    if received is None:
        return kind.moved
    return kind.moved._replace(compared=1, stock_received_elements=received)


@lru_cache(maxsize=1 << 10)
def _stock_received(*question: Any) -> int | None:
    """What torch would receive; None where it cannot do it. It may take a while."""
    plan = stock_plan(*question)
    return plan.received_elements if plan.error is None else None
