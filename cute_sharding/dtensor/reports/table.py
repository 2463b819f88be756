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
        """As text: a line for each op, with what it received beside what it would have by torch's
        own rules.

        >>> print(Stats({"view.default": Counts(algebra=2, compared=2, stock_received_by_all=64)}))
        {'view.default': {'algebra': 2, 'compared': 2, 'stock_received_by_all': 64}}
        >>> table = Stats({"view.default": Counts(algebra=2, compared=2, stock_received_by_all=64)})
        >>> print(table.table().partition("elements")[0].rstrip())
        op            answered   received  by torch  ratio
        view.default  2 algebra         0        64   0.00
        """
        if not self:
            return "nothing was counted: no view, op or redistribution was answered here"
        ops = [op for op in self if op != REDISTRIBUTE]
        rows = [_row(op, self[op]) for op in (*ops, *[op for op in self if op == REDISTRIBUTE])]
        lines = _aligned([("op", "answered", "received", "by torch", "ratio"), *rows])
        notes = [
            "elements, by all devices together, of what is compared; torch's padding counts",
            "each op once for its shapes and placements; redistribute each time that it ran",
        ]
        raised = sum(counts["stock_raises"] for counts in self.values())
        if raised:
            others = sum(of["received_by_all"] - of["compared_by_all"] for of in self.values())
            notes.append(
                f"{raised} not compared, as torch's own rule raises there; what is not compared "
                f"received {others:,}"
            )
        return "\n".join([*lines, *notes])


def _row(op: str, counts: Counts) -> tuple[str, ...]:
    named = (*OUTCOMES, "plan", "collectives")
    answered = ", ".join(f"{counts[name]:,} {name}" for name in named if counts[name])
    if not counts["compared"]:
        received = f"{counts['received_by_all']:,}" if counts["received_by_all"] else "-"
        return op, answered, received, "-", "-"
    ours, theirs = counts["compared_by_all"], counts["stock_received_by_all"]
    ratio = f"{ours / theirs:.2f}" if theirs else "-" if ours else "1.00"
    return op, answered, f"{ours:,}", f"{theirs:,}", ratio


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
