"""What was counted, as a dict and as a table."""

from __future__ import annotations

from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import OUTCOMES, REDISTRIBUTE


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
                *_aligned([("op", "decided", "received"), *rows]),
                "received: elements, by all devices together, with padding",
                "each op counts once for its shapes and placements, redistribute each time",
            ]
        )


def _row(op: str, counts: Counts) -> tuple[str, ...]:
    named = (*OUTCOMES, "plan", "collectives")
    decided = ", ".join(f"{counts[name]:,} {name}" for name in named if counts[name])
    is_known = not (counts["signature"] or counts["gate"])  # of these no elements are counted
    return op, decided, f"{counts['received_by_all']:,}" if is_known else "-"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells: list[Any] = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
