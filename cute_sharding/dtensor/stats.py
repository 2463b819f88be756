"""Counts of how propagations were answered, and the logger that explains each one."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

from cute_sharding.dtensor.locks import fork_safe_lock

logger = logging.getLogger("cute_sharding")

# algebra: free, every block of one size. tracing: free, found and proved by tracing the rule on each kind of device (sizes do not divide).
# redistribution: the input is redistributed first. refused: an error was raised. stock: left to torch's own rule (a mesh of one
# device, sizes that differ from rank to rank). Symbolic sizes count as tracing unless they are known to divide.
OUTCOMES = ("algebra", "tracing", "redistribution", "refused", "stock")

_counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
_lock = fork_safe_lock()


def count(op: str, outcome: str) -> None:
    with _lock:
        _counts[op][outcome] += 1


def stats(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """For each op, how many of its propagations had each outcome since the last reset.

    DTensor caches propagations, so an op that runs again on the same shapes and placements is not counted again.

    Outcomes: ``algebra`` (free, all blocks of one size), ``tracing`` (free, sizes do not divide), ``redistribution`` (the input is
    redistributed first), ``refused`` (an error was raised) and ``stock`` (left to torch's own rule:
    meshes of one device in all, which torch also uses as a stand-in to derive the rules of other ops).
    """
    with _lock:
        result = {op: {outcome: counts[outcome] for outcome in OUTCOMES} for op, counts in sorted(_counts.items())}
        if reset:
            _counts.clear()
    return result


def reset_stats() -> None:
    """Set every count of :func:`stats` to 0."""
    stats(reset=True)
