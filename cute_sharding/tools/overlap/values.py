"""A simulated run of a graph as plain values: what computes and what communicates when, for how
long each collective is exposed, and why; as text, as a page of HTML, and as a trace in Chrome's
format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from cute_sharding import _html
from cute_sharding._words import bytes_text, columns, counted, seconds_text
from cute_sharding.tools.drawing.charts import Span, time_chart
from cute_sharding.tools.files import save


class Computation(NamedTuple):
    """A node that computes.

    Attributes:
        name: the node's.
        start, end: seconds from the beginning of the graph.
    """

    name: str
    start: float
    end: float


class Exposed(NamedTuple):
    """A collective, and for how long the program does nothing but wait for it.

    Attributes:
        name: the node's.
        op: the kind of the collective, such as "all-gather".
        ranks: the number of ranks of its group.
        received: the bytes that the busiest rank receives.
        start, end: seconds from the beginning of the graph, on the network.
        exposed: the seconds for which the program waits for it.
        limit: what keeps it from being hidden; empty if it is.
        line: the line of the program that it comes from; empty if it is unknown.
    """

    name: str
    op: str
    ranks: int
    received: int
    start: float
    end: float
    exposed: float
    limit: str
    line: str = ""

    @property
    def seconds(self) -> float:
        """The time of the collective alone."""
        return self.end - self.start


class Timeline(NamedTuple):
    """One graph, as it is simulated.

    Attributes:
        name: such as "graph 1".
        computations: in their order.
        collectives: in their order.
        seconds: the time of the graph.
        peak: the most bytes that it holds at once, beside weights and other inputs that outlive it.
        alike: whether all ranks have this graph, as far as this package knows.
    """

    name: str
    computations: tuple[Computation, ...]
    collectives: tuple[Exposed, ...]
    seconds: float
    peak: int
    alike: bool = False

    @property
    def exposed(self) -> float:
        """The seconds for which the program waits for collectives."""
        return sum(one.exposed for one in self.collectives)

    @property
    def communication(self) -> float:
        """The seconds of all collectives."""
        return sum(one.seconds for one in self.collectives)

    @property
    def computation(self) -> float:
        """The seconds of all that computes."""
        return sum(one.end - one.start for one in self.computations)


class Graph(NamedTuple):
    """A graph before and after the compiler's passes; the same twice, if it was not compiled."""

    before: Timeline
    after: Timeline


@dataclass(frozen=True)
class Overlap:
    """The result of :func:`cute_sharding.overlap`: a simulated run of each graph of a program, in
    the order in which they were compiled.

    ``print`` shows a table. Times are in seconds, and sizes in bytes.

    Attributes:
        graphs: forward and backward passes, each before and after the compiler's passes.
        device: the device whose time is estimated, as text.
        network: the network of the estimated times, as text.

    >>> Overlap((), "H100", "default").peak
    0
    """

    graphs: tuple[Graph, ...]
    device: str
    network: str

    @property
    def exposed(self) -> float:
        """The seconds for which the program waits for collectives."""
        return sum(graph.after.exposed for graph in self.graphs)

    @property
    def seconds(self) -> float:
        """The time of all graphs."""
        return sum(graph.after.seconds for graph in self.graphs)

    @property
    def peak(self) -> int:
        """The most bytes that a graph holds, beside what outlives it."""
        return max([graph.after.peak for graph in self.graphs], default=0)

    @property
    def collectives(self) -> tuple[Exposed, ...]:
        """All collectives."""
        return tuple([one for graph in self.graphs for one in graph.after.collectives])

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"simulated on {self.device}, network {self.network}"
        for before, after in self.graphs:
            yield ""
            yield f"{after.name}: {', '.join(_totals(after))}"
            if before != after._replace(name=before.name, alike=before.alike):
                yield f"  before the compiler's passes: {', '.join(_totals(before))}"
            yield from columns([HEAD, *map(_row, after.collectives)]) if after.collectives else ()

    def to_dict(self) -> dict[str, Any]:
        """The simulation as plain data."""
        return {
            "device": self.device,
            "network": self.network,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed,
            "peak_bytes": self.peak,
            "collectives": [one._asdict() for one in self.collectives],
        }

    def trace(self) -> dict[str, Any]:
        """The simulation as a trace for chrome://tracing or https://ui.perfetto.dev: a process for
        each graph before and after the passes, with a row for computation and one for
        communication.
        """
        events: list[dict[str, Any]] = []
        for number, (before, after) in enumerate(self.graphs):
            for k, (timeline, when) in enumerate(((before, "before"), (after, "after"))):
                named = {"name": f"{timeline.name}, {when} the passes"}
                pid = 2 * number + k
                events.append({"name": "process_name", "ph": "M", "pid": pid, "args": named})
                events += [_event(pid, 0, one, {}) for one in timeline.computations]
                events += [_event(pid, 1, one, one._asdict()) for one in timeline.collectives]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def html(self) -> str:
        """The simulation as one HTML page without other files."""
        return _html.page("Computation and communication", self._repr_html_())

    def _repr_html_(self) -> str:
        parts = [f"<p>Simulated on {escape(self.device)}, network {escape(self.network)}.</p>"]
        for before, after in self.graphs:
            parts.append(f"<h2>{escape(after.name)}</h2>")
            for timeline, when in ((before, "before"), (after, "after")):
                totals = ", ".join(_totals(timeline))
                parts.append(_chart(f"{when} the compiler's passes: {totals}", timeline))
            parts.append(_html.stacked(map(_row, after.collectives), HEAD))
        return "".join(parts)

    def save(self, path: str | Path) -> Path:
        """Write the simulation to a file. The suffix gives the form: a trace (.json), the page
        (.html) or the text (.txt).

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
        """
        forms: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.trace()),
            ".html": self.html,
            ".txt": lambda: f"{self}\n",
        }
        return save(path, "overlap", forms)


HEAD = ("exposed", "alone", "received", "ranks", "collective", "what limits it", "line")


def _row(one: Exposed) -> tuple[str, ...]:
    times = seconds_text(one.exposed), seconds_text(one.seconds)
    return (
        *times,
        bytes_text(one.received),
        str(one.ranks),
        one.op,
        one.limit or "nothing",
        one.line,
    )


def _totals(timeline: Timeline) -> Iterator[str]:
    yield seconds_text(timeline.seconds)
    yield f"{seconds_text(timeline.computation)} of them computation"
    yield counted(len(timeline.collectives), "collective")
    yield (
        f"{seconds_text(timeline.exposed)} of {seconds_text(timeline.communication)} "
        "communication exposed"
    )
    yield f"holds {bytes_text(timeline.peak)}"


def _event(pid: int, row: int, one: Any, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": one.start * 1e6, "dur": (one.end - one.start) * 1e6}
    return {"name": one.name, "ph": "X", "pid": pid, "tid": row, **times, "args": args}


COLLECTIVE, EXPOSED = "collective", "waited for"


def _chart(title: str, timeline: Timeline) -> str:
    """What computes, and what communicates, and when the program waits for it."""
    spans = [
        Span("computation", "computation", one.start, one.end, one.name)
        for one in timeline.computations
    ]
    for one in timeline.collectives:
        text = f"{one.name}: {seconds_text(one.seconds)}"
        spans.append(Span("communication", COLLECTIVE, one.start, one.end, text))
        if one.exposed:
            start = max(one.end - one.exposed, one.start)
            spans.append(Span("communication", EXPOSED, start, one.end, text))
    kinds = ("computation", COLLECTIVE, EXPOSED)
    return time_chart(title, spans, timeline.seconds, kinds)
