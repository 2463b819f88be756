"""A profile as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) reads: an event a
collective.

The format: "Trace Event Format" of the Chromium project; times are in microseconds.
"""

from __future__ import annotations

from typing import Any

from cute_sharding.tools.profile.report import Event, Line, Report


def trace(report: Report) -> dict[str, Any]:
    """The trace, as plain data for JSON. Collectives that run at one time are on rows of their
    own.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", report.rank, 0, f"rank {report.rank} of {report.world}")
    ]
    ends: list[float] = []
    every = [(event, line) for line in report.lines for event in line.events]
    for event, line in sorted(every, key=lambda item: item[0].start):
        row = next((k for k, end in enumerate(ends) if end <= event.start), len(ends))
        if row == len(ends):
            ends.append(0.0)
            events.append(_named("thread_name", report.rank, row, "collectives"))
        ends[row] = event.start + event.measured
        events.append(_of(event, line, report.rank, row))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}


def _of(event: Event, line: Line, rank: int, row: int) -> dict[str, Any]:
    cause, collective = line.cause, event.collective
    return {
        "ph": "X",
        "name": f"{collective.op} ({cause.op})",
        "cat": collective.op,
        "pid": rank,
        "tid": row,
        "ts": event.start * 1e6,
        "dur": event.measured * 1e6,
        "args": {
            "line": None if cause.place is None else f"{cause.place.file}:{cause.place.line}",
            "function": None if cause.place is None else cause.place.function,
            "gradient": cause.backward,
            "op": cause.op,
            "placements": [moved.change for moved in cause.moved],
            "ranks": list(collective.ranks),
            "dtype": collective.dtype,
            "received_bytes": collective.received_bytes,
            "sent_bytes": collective.sent_bytes,
            "busiest_rank_received_bytes": collective.busiest_bytes,
            "model_us": event.model * 1e6,
            "rule": cause.rule,
            "text": cause.text,
        },
    }
