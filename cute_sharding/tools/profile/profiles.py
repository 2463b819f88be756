"""``profile``: what a program sends, line by line; as plain values, as text, as a trace in Chrome's
format, and as a page of HTML.
"""

from __future__ import annotations

import json
import linecache
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from cute_sharding import _html
from cute_sharding._words import bytes_text, columns, counted, seconds_text
from cute_sharding.exchange.network import Network
from cute_sharding.programs.plan import StepPlan
from cute_sharding.tools.drawing.charts import Bar, BarGroup, Span, bar_chart, time_chart
from cute_sharding.tools.files import save
from cute_sharding.tools.profile.values import (
    Cause,
    Collective,
    Line,
    Place,
    PlannedStep,
    with_plan,
)

NARROWEST = 72
# So many of the lines that call a function are named.
CALLERS = 5
# The most lines of the program in a chart.
BARS = 12


@dataclass(eq=False)
class Profile:
    """The result of :func:`profile`: the communication inside the block, for each line of the
    program. It is filled when the block ends.

    ``print`` shows a table. Sizes are in bytes, and times in seconds. Received bytes are those of
    the busiest rank, and all other values are those of this rank. Only :attr:`collectives` also
    count elements.

    Attributes:
        lines: the lines that communicate, with the most bytes first.
        rank, world: the rank of this process, and the number of ranks.
        meshes: the meshes of the DTensors that communicate, as text.
        settings: the settings of this package, as text; empty if the package was off.
        network: the network of the modeled seconds, as text.
        torch_version: the version of torch.
        seconds: the duration of the block.
        planned: what the plan of the step saves, if one is given.

    >>> with profile() as p:
    ...     pass
    >>> isinstance(p, Profile), p.lines, p.collectives
    (True, (), [])
    """

    lines: tuple[Line, ...] = ()
    rank: int = 0
    world: int = 1
    meshes: tuple[str, ...] = ()
    settings: str = ""
    network: str = "default"
    torch_version: str = ""
    seconds: float = 0.0
    planned: PlannedStep | None = None

    @property
    def collectives(self) -> list[Collective]:
        """All collectives, in the order in which they ran. ``received``, ``sent`` and ``busiest``
        of a collective count elements. ``received_bytes``, ``sent_bytes`` and ``busiest_bytes``
        count bytes.
        """
        return sorted([one for line in self.lines for one in line.collectives], key=_start)

    def totals(self) -> dict[str, Any]:
        """The sums over all lines."""
        return {
            "collectives": len(self.collectives),
            "received_bytes": sum(line.received for line in self.lines),
            "model_seconds": sum(line.model for line in self.lines),
            "measured_seconds": sum(line.measured for line in self.lines),
        }

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data for JSON, in bytes and seconds."""
        lines = [line.to_dict() for line in self.lines]
        planned = self.planned and self.planned.to_dict()
        given = {**vars(self), "meshes": list(self.meshes), "planned": planned}
        return {**given, **self.totals(), "lines": lines}

    def compare(self, other: Profile) -> str:
        """This profile beside another, as text: for each line of the program the bytes that the
        busiest rank received, the collectives, and the time by the network model. The lines that
        differ most come first.
        """
        sides = [_by_place(self.lines), _by_place(other.lines)]
        names = [f"cute_sharding {'on' if of.settings else 'off'}" for of in (self, other)]
        if names[0] == names[1]:
            names = ["this", "other"]

        def differs(place: str) -> int:
            one, two = [side.get(place, (0, 0, 0.0))[0] for side in sides]
            return abs(one - two)

        places = sorted({**sides[0], **sides[1]}, key=differs, reverse=True)
        rows = [("line", *names)]
        rows += [(place, *[_sent(side.get(place)) for side in sides]) for place in places]
        totals = [of.totals() for of in (self, other)]
        kinds = ("received_bytes", "collectives", "model_seconds")
        rows.append(("in all", *[_sent([of[kind] for kind in kinds]) for of in totals]))
        return "\n".join(columns(rows, left=1, right=2))

    def _head(self) -> list[str]:
        """Sentences that say what was recorded in all."""
        if not self.torch_version:
            return ["This profile is filled when its with block ends: read it after the block."]
        on = f"on ({self.settings})" if self.settings else "off"
        where = f"mesh {'; '.join(self.meshes)}" if self.meshes else "no DTensor mesh"
        said = [f"Rank {self.rank} of {self.world}, {where}, torch {self.torch_version}."]
        said[0] += f" cute_sharding is {on}."
        if not self.lines:
            return [*said, "No communication."]
        places, totals = (
            {(line.cause.place, line.cause.backward) for line in self.lines},
            self.totals(),
        )
        said.append(
            f"{counted(totals['collectives'], 'collective')} on {counted(len(places), 'line')} of "
            f"the program: the busiest rank received {bytes_text(totals['received_bytes'])}; "
            f"{seconds_text(totals['model_seconds'])} by the network model ({self.network}), "
            f"{seconds_text(totals['measured_seconds'])} measured, until the program waited for "
            "each result."
        )
        if not all(line.is_of_busiest for line in self.lines):
            said.append("*: bytes of this rank, because those of the busiest rank are unknown.")
        return said

    def table(self, width: int | None = None, most: int = 20) -> str:
        """The profile as text, in ``width`` columns (default: the width of the terminal), with the
        ``most`` rows that receive the most: one for each line, op and set of placements.
        """
        wide = shutil.get_terminal_size((100, 24)).columns if width is None else width
        wide = max(wide, NARROWEST)
        text = [part for said in self._head() for part in wrap(said, wide, subsequent_indent="  ")]
        text += _change_first(self.planned, wide) if self.planned else []
        shown, left = self.lines[:most], self.lines[most:]
        if shown:
            numbers = columns([NUMBERS, *map(_numbers, shown)], right=3)
            text += ["", numbers[0]]
            for line, row in zip(shown, numbers[1:]):
                text.append(row)
                for said in _sentences(line):
                    text += wrap(said, wide, initial_indent="    ", subsequent_indent="      ")
        if left:
            received = bytes_text(sum(line.received for line in left))
            many = counted(sum(len(line.collectives) for line in left), "collective")
            text += ["", f"and {counted(len(left), 'more row')}: {received} received in {many}"]
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Profile of {len(self.collectives)} collectives>"

    def trace(self) -> dict[str, Any]:
        """The profile as data of a trace in Chrome's format, which Perfetto (ui.perfetto.dev)
        reads: an event for each collective. Collectives that run at one time are on rows of their
        own. (The format: "Trace Event Format" of the Chromium project; times in microseconds.)
        """
        events = [_named("process_name", self, 0, f"rank {self.rank} of {self.world}")]
        ends: list[float] = []
        every = [(one, line.cause) for line in self.lines for one in line.collectives]
        for one, cause in sorted(every, key=lambda each: each[0].start):
            row = next((k for k, end in enumerate(ends) if end <= one.start), len(ends))
            if row == len(ends):
                ends.append(0.0)
                events.append(_named("thread_name", self, row, "collectives"))
            ends[row] = one.start + one.measured
            events.append(
                {
                    "ph": "X",
                    "name": f"{one.op} ({cause.op})",
                    "cat": one.op,
                    "pid": self.rank,
                    "tid": row,
                    "ts": one.start * 1e6,
                    "dur": one.measured * 1e6,
                    "args": {
                        "line": cause.place and f"{cause.place.file}:{cause.place.line}",
                        "text": cause.text,
                        **one.to_dict(),
                    },
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def html(self) -> str:
        """The profile as one HTML page without other files: charts, what to change first if a plan
        of the step is given, and the table.
        """
        return _html.page("Communication by line", self._repr_html_())

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(sentence)}</p>" for sentence in self._head()]
        if self.lines:
            parts += [self._bars(), self._timeline()]
        if self.planned:
            parts += [f"<p>{escape(self.planned.head)}</p>"]
            parts += [_html.stacked(self.planned.rows(), CHANGES)] if self.planned.lines else []
            parts += [f"<p>{escape(self.planned.tail)}</p>"]
        if self.lines:
            rows = [(*_numbers(line), " ".join(_sentences(line))) for line in self.lines]
            parts.append(_html.stacked(rows, (*NUMBERS, "")))
        return "".join(parts)

    @property
    def _kinds(self) -> list[str]:
        """The kinds of collectives, in the order of their colours."""
        return sorted({one.op for one in self.collectives})

    def _bars(self) -> str:
        """A chart of the bytes that each line of the program receives, in both passes."""
        amounts: dict[Place | None, Counter[str]] = {}
        for line in self.lines:
            for one in line.collectives:
                found = amounts.setdefault(line.cause.place, Counter())
                found[one.op] += one.most * one.itemsize
        most = sorted(amounts, key=lambda place: -amounts[place].total())
        groups = []
        for place in most[:BARS]:
            many = sum(len(of.collectives) for of in self.lines if of.cause.place == place)
            text = f"{bytes_text(amounts[place].total())} in {counted(many, 'collective')}"
            title = "unknown line" if place is None else str(place)
            groups.append(BarGroup(title, [Bar("", text, amounts[place])], _source(place)))
        left = f", {BARS} lines of {len(most)}" if len(most) > BARS else ""
        return bar_chart(f"Received for each line, with its gradient{left}", groups, self._kinds)

    def _timeline(self) -> str:
        """A chart of when collectives ran, as measured, for each set of mesh dims."""
        spans = [
            Span(
                f"{one.over}, gradients" if one.backward else one.over,
                one.op,
                one.start,
                one.start + one.measured,
                f"{one.op}, {bytes_text(one.most * one.itemsize)}, {seconds_text(one.measured)}, "
                f"{one.place or 'unknown line'}",
            )
            for one in self.collectives
        ]
        return time_chart("When collectives ran, as measured", spans, self.seconds, self._kinds)

    def save(self, path: str | Path) -> Path:
        """Write the profile to a file. The suffix gives the form: a trace (.json), the page (.html)
        or the table (.txt).

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
        return save(path, "profile", forms)


# What is received comes first: it is on a narrow screen as well.
NUMBERS = ("received", "model", "measured", "collectives", "over", "line")
CHANGES = ("line", "saves", "by the plan")


def _change_first(planned: PlannedStep, wide: int) -> list[str]:
    """What to change first, as lines of text."""
    text = ["", *wrap(planned.head, wide, subsequent_indent="  ")]
    rows = planned.rows()
    for row, (_, _, does) in zip(columns([row[:2] for row in rows]) if rows else (), rows):
        text.append(f"  {row}")
        text += wrap(does, wide, initial_indent="    ", subsequent_indent="      ")
    return text + wrap(planned.tail, wide, initial_indent="  ", subsequent_indent="  ")


def _start(one: Collective) -> float:
    return one.start


def _by_place(lines: Sequence[Line]) -> dict[str, tuple[int, int, float]]:
    """For each line of the program: bytes, collectives, and seconds by the network model."""
    found: dict[str, tuple[int, int, float]] = {}
    for line in lines:
        place = _place(line.cause)
        many, n, seconds = found.get(place, (0, 0, 0.0))
        found[place] = (
            many + line.received,
            n + len(line.collectives),
            seconds + line.model,
        )
    return found


def _sent(amount: Sequence[float] | None) -> str:
    """Bytes, collectives and seconds, in words."""
    if amount is None:
        return "0 B"
    received, collectives, seconds = amount
    return f"{bytes_text(received)} in {collectives:,}, {seconds_text(seconds)}"


def _place(cause: Cause) -> str:
    """A line of the program, and whether it is its gradient."""
    place = "unknown" if cause.place is None else str(cause.place).partition(" ")[0]
    return f"{place} grad" if cause.backward else place


def _numbers(line: Line) -> tuple[str, ...]:
    """A row of the table."""
    return (
        bytes_text(line.received) + ("" if line.is_of_busiest else "*"),
        seconds_text(line.model),
        seconds_text(line.measured),
        ", ".join(f"{n} {kind}" for kind, n in line.kinds.items()),
        ", ".join(line.over),
        _place(line.cause),
    )


def _sentences(line: Line) -> list[str]:
    """The text of a line of the program, what communicates there, from where the function of the
    line is called, if from several lines, and what the line receives by the plan.
    """
    callers = [f"{place} ({counted(n, 'collective')})" for place, n in line.callers.items()]
    more = [counted(len(callers) - CALLERS, "more line")] if len(callers) > CALLERS else []
    called = f"Called from {', '.join([*callers[:CALLERS], *more])}." if len(callers) > 1 else ""
    planned = line.planned.text if line.planned else ""
    return [
        text for text in (_source(line.cause.place), f"{line.cause.text}.", called, planned) if text
    ]


def _source(place: Place | None) -> str:
    """The text of a line, where its file is there."""
    return linecache.getline(place.file, place.line).strip() if place else ""


def _named(what: str, of: Profile, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": of.rank, "tid": row, "args": {"name": name}}


class Profiling(AbstractContextManager[Profile]):
    """What :func:`profile` returns: it records inside of a ``with`` block, and is no profile.

    >>> print(profile())
    profile() records nothing by itself. Write "with cute_sharding.profile() as p:", and the step \
in the block; after the block, print(p).
    """

    def __init__(self, block: AbstractContextManager[Profile]) -> None:
        self._block = block

    def __enter__(self) -> Profile:
        return self._block.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._block.__exit__(*raised)

    def __repr__(self) -> str:
        return (
            'profile() records nothing by itself. Write "with cute_sharding.profile() as p:", and '
            "the step in the block; after the block, print(p)."
        )

    def __getattr__(self, name: str) -> Any:
        if hasattr(Profile, name):
            raise AttributeError(
                f"profile() itself has no {name!r}, because it records only inside of a with block:"
                " write `with cute_sharding.profile() as p:`, and read p after the block"
            )
        raise AttributeError(f"profile() has no attribute {name!r}")


def profile(
    *, network: Network | str | None = None, plan: StepPlan | str | Path | None = None
) -> Profiling:
    """Record the communication inside the ``with`` block, for each line of the program: with this
    package on or off, eager or compiled, forward and backward.

    Nothing is changed outside of the block. A profile records this rank and this thread, and the
    backward passes that this thread starts. The bytes of the busiest rank are known for planned
    redistributions, and for collectives in which all ranks receive the same.
    ``cute_sharding.exchange.step`` says how bytes are counted. On backends whose collectives
    run asynchronously, such as NCCL, measured seconds are those of the host.

    In a compiled program, a profile records the collectives of the graphs. With the backends
    ``eager`` and ``aot_eager``, it knows the line of each collective. With Inductor, it lists all
    collectives under the line that calls the compiled program.

    Args:
        network: the network that gives the modeled seconds, as for :func:`cute_sharding.enable`. By
            default the network of the settings, or NVLink within hosts of eight devices and
            InfiniBand between.
        plan: of a step, or its path: what to change first, and below each line that the plan
            changes what the line receives by it. The program need not run by the plan.

    Returns:
        A context. ``with`` gives a :class:`Profile`, which is filled when the block ends.

    >>> with profile() as p:
    ...     pass
    >>> print(p.table().partition("off.")[2].strip())
    No communication.
    """
    return Profiling(_profiled(network, plan))


@contextmanager
def _profiled(
    network: Network | str | None, plan: StepPlan | str | Path | None
) -> Iterator[Profile]:
    from cute_sharding.tools.profile.causes import recorded
    from cute_sharding.tools.profile.recorder import Recorder

    recorder, found = Recorder(), Profile()
    known = StepPlan.load(plan) if isinstance(plan, (str, Path)) else plan

    def fill() -> None:
        vars(found).update(recorded(recorder, network))
        if known is not None:
            found.lines = with_plan(found.lines, known)
            found.planned = PlannedStep.of(known)

    try:
        with recorder:
            yield found
    except BaseException:
        with suppress(Exception):  # what the program raises comes first
            fill()
        raise
    fill()
