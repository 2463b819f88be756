"""``stats``: how ops were decided and the elements that ranks receive, as a dict and as a table."""

from __future__ import annotations

from cute_sharding._words import columns
from cute_sharding.dtensor.bookkeeping.stats import (
    OUTCOMES,
    REDISTRIBUTE,
    Counted,
    Received,
    read_counts,
)


def stats(*, reset: bool = False) -> Stats:
    """Counts since the last reset: for each op, how its placements were decided, and the elements
    that ranks receive. Under "redistribute" are the planned redistributions. docs/flags.md says
    what each count means.

    The result is a dict of dicts without zeros; an inner dict gives 0 for other keys.
    ``stats().table()`` returns the counts as text. ``python -m cute_sharding stats PROGRAM`` runs a
    program and prints the table.

    DTensor caches the placements of ops. So an op counts once for the same shapes and placements,
    with the elements of one run. A redistribution counts each time it runs; in a compiled program,
    it counts once, during compilation. A redistribution of a view counts under "redistribute", and
    as ``redistribution`` of the view. Sizes that are symbols are not counted, nor are more than 256
    ops.

    Args:
        reset: set every count to 0 afterwards.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> from cute_sharding.dtensor import propagate_shape_and_sharding
    >>> _ = stats(reset=True)
    >>> _ = propagate_shape_and_sharding([Shard(0)], (4, 6), view_groups((4, 6), (24,)), (2,))
    >>> stats()
    {'view': {'algebra': 1}}
    """
    return Stats(_found(read_counts(reset=reset)))


def _found(counted: Counted) -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for outcome in OUTCOMES:
        for op in sorted({op for op, _ in counted.outcomes}):
            found.setdefault(op, Counts()).add(outcome, counted.outcomes.get((op, outcome), 0))
    for op, received in counted.received:
        try:
            _add(found.setdefault(op, Counts()), received())
        except Exception:  # it was decided, and then refused where it was redistributed
            continue
    moved = counted.moved
    for kind, times in counted.kinds.items():
        moved = moved.plus(kind.moved, times)
    if any(moved[:2]):
        counts = found[REDISTRIBUTE] = Counts()
        for name in ("plan", "stock", "collectives"):
            counts.add(name, getattr(moved, name))
        _add(counts, moved.received)
    return found


def _add(counts: Counts, received: Received) -> None:
    counts.add("received_elements", received.busiest)
    counts.add("received_by_all", received.by_all)


class Counts(dict[str, int]):
    """Counts by name: 0 where there is none.

    >>> counts = Counts(algebra=1)
    >>> counts, counts["tracing"]
    ({'algebra': 1}, 0)
    """

    def __missing__(self, name: str) -> int:
        return 0

    def add(self, name: str, count: int) -> None:
        if count:
            self[name] = self[name] + count


class Stats(dict[str, Counts]):
    """What :func:`.stats` gives: counts by op."""

    def table(self) -> str:
        """As text: a line for each op.

        >>> print(Stats({"view.default": Counts(algebra=2)}).table().partition("received: ")[0])
        op            decided    received
        view.default  2 algebra         0
        <BLANKLINE>
        """
        if not self:
            return "nothing was counted: no view, op or redistribution was answered here"
        ops = [op for op in self if op != REDISTRIBUTE]
        rows = [_row(op, self[op]) for op in (*ops, *[op for op in self if op == REDISTRIBUTE])]
        return "\n".join(
            [
                *columns([("op", "decided", "received"), *rows], left=2, right=1),
                "received: elements, by all devices together, with padding",
                "each op counts once for its shapes and placements, redistribute each time",
            ]
        )


def _row(op: str, counts: Counts) -> tuple[str, ...]:
    named = (*OUTCOMES, "plan", "collectives")
    decided = ", ".join(f"{counts[name]:,} {name}" for name in named if counts[name])
    is_known = not (counts["signature"] or counts["gate"])  # of these no elements are counted
    return op, decided, f"{counts['received_by_all']:,}" if is_known else "-"
