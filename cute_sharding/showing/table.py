"""A profile as text, for a terminal: what is sent, why, what would avoid it, and what this package
has removed.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from cute_sharding.profiling import Cause, Line, Report
from cute_sharding.showing.amounts import bytes_text, of_many, seconds_text

NARROWEST = 72
# Narrower tables leave out seconds.
WIDE = 96
SWITCH = "cute_sharding.enable(redistribution=True, movement=True)"


def text(report: Report, width: int, most: int) -> str:
    """The table, of so many columns and at most so many lines of the program."""
    width = max(width, NARROWEST)
    parts = [_wrapped(head(report), width)]
    sent = report.communicating
    if sent:
        parts.append(_sent(report, sent[:most], width))
        left = sent[most:]
        if left:
            received = bytes_text(report.total(lambda line: line.received, left))
            parts.append([f"and {of_many(len(left), 'line')} more, {received} received"])
        parts.append(_reasons(sent[:most], width))
    if report.freed:
        parts.append(_freed(report.freed[:most], width))
    return "\n\n".join("\n".join(part) for part in parts if part)


# -- what it says first ----------------------------------------------------------------------------


def head(report: Report) -> list[str]:
    """Sentences that say what was seen, and what of it this package removes."""
    on = f"on ({report.settings})" if report.settings else "off"
    where = f"mesh {'; '.join(report.meshes)}" if report.meshes else "no DTensor mesh"
    who = f"Rank {report.rank} of {report.world}, {where}, torch {report.version}."
    said = [f"{who} cute_sharding is {on}."]
    sent = report.communicating
    if not sent:
        return [*said, "No communication.", *_compared(report)]
    places = {(line.cause.place, line.cause.backward) for line in sent}
    count = sum(len(line.events) for line in sent)
    model = seconds_text(report.total(lambda line: line.model))
    measured = seconds_text(report.total(lambda line: line.measured))
    received = bytes_text(report.total(lambda line: line.received))
    said.append(
        f"{of_many(count, 'collective')} on {of_many(len(places), 'line')}: the busiest rank "
        f"received {received}; {model} by the network model ({report.network}), {measured} "
        "measured until each result was waited for."
    )
    return [*said, *_compared(report)]


def _compared(report: Report) -> list[str]:
    if report.settings:
        ours, theirs, unknown = report.compared(lambda cause: cause.torch)
        if not theirs and not ours:
            return []
        said = (
            f"PyTorch alone would have received {bytes_text(theirs)} for the same ops on the same "
            f"placements, and received here were {bytes_text(ours)}"
        )
        less = theirs - ours
        tail = (
            f": cute_sharding removes {bytes_text(less)} ({less / theirs:.0%})."
            if (less > 0)
            else "."
        )
        return [said + tail + _left_out(unknown, "PyTorch")]
    theirs, ours, unknown = report.compared(lambda cause: cause.package)
    if not theirs:
        return []
    said = f"With {SWITCH} the same ops would receive {bytes_text(ours)} of {bytes_text(theirs)}"
    less = theirs - ours
    tail = f": {bytes_text(less)} less ({less / theirs:.0%})." if less > 0 else ", no less."
    again = " Later ops would see other placements: profile the program switched on for its own."
    return [said + tail + _left_out(unknown, "this package") + again]


def _left_out(unknown: int, who: str) -> str:
    return f" ({of_many(unknown, 'line')} left out: not known for {who}.)" if unknown else ""


# -- what is sent ----------------------------------------------------------------------------------


def _sent(report: Report, lines: Sequence[Line], width: int) -> list[str]:
    other = "PyTorch" if report.settings else "with it"
    rows = [("", "line", "op", "placements", "collectives", "received", "model", "measured", other)]
    for number, line in enumerate(lines, 1):
        cause = line.cause
        theirs = line.of(cause.torch if report.settings else cause.package)
        rows.append(
            (
                str(number),
                place_text(cause),
                cause.op,
                ", ".join(dict.fromkeys(moved.change for moved in cause.moved)) or _as_lies(cause),
                kinds_text(line),
                bytes_text(line.received) + ("" if line.is_of_busiest else "*"),
                seconds_text(line.model),
                seconds_text(line.measured),
                "?" if theirs is None else bytes_text(theirs),
            )
        )
    note = (
        f"received: bytes, by the busiest rank. {other}: what "
        + ("PyTorch alone" if report.settings else "cute_sharding, switched on,")
        + " would receive."
    )
    if not all(line.is_of_busiest for line in lines):
        note += " *: by this rank, as the busiest is not known."
    kept = [row if width >= WIDE else (*row[:6], *row[8:]) for row in rows]
    table = aligned(kept, width, {1, 2, 3, 4}, {1: 16, 3: 10, 4: 12})
    return ["What is sent, the most first", *table, *_wrapped([note], width)]


def place_text(cause: Cause, *, with_function: bool = False) -> str:
    """The line, and whether it is a gradient."""
    if cause.place is None:
        place = "not known"
    else:
        where = str(cause.place).partition(" ")[0]
        function = cause.place.function.rpartition("<locals>.")[2]
        place = f"{where} in {function}" if with_function else where
    return f"{place} grad" if cause.backward else place


def kinds_text(line: Line) -> str:
    """Which collectives, and how many of each."""
    return ", ".join(f"{n} {kind}" for kind, n in line.kinds.items())


def _as_lies(cause: Cause) -> str:
    """Of what moves no whole operand: how it lies before and after."""
    if not cause.operands or not cause.results:
        return ""
    before, after = (
        each[0].rpartition(" [")[2].rstrip("]") for each in (cause.operands, cause.results)
    )
    return f"{before} -> {after}"


def aligned(
    rows: Sequence[tuple[str, ...]], width: int, left: set[int], least: dict[int, int]
) -> list[str]:
    """Columns: those of ``left`` to the left, the others to the right. Where they do not fit, those
    that have a ``least`` width are cut, the widest first; a line of the program in front, as its
    number is at the end.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        wide = [i for i in least if widths[i] > least[i]]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1

    def cell(i: int, value: str) -> str:
        over = len(value) - widths[i]
        if over > 0:
            is_line = ".py:" in value
            value = f"..{value[over + 2 :]}" if is_line else f"{value[: widths[i] - 2]}.."
        return value.ljust(widths[i]) if i in left else value.rjust(widths[i])

    return ["  ".join(cell(i, value) for i, value in enumerate(row)).rstrip() for row in rows]


# -- why -------------------------------------------------------------------------------------------


def _reasons(lines: Sequence[Line], width: int) -> list[str]:
    """Of each row a reason; rows in order that say the same are one."""
    said = ["Why, and what would avoid it"]
    numbered = list(enumerate(lines, 1))

    def reason(item: tuple[int, Line]) -> tuple[object, ...]:
        cause = item[1].cause
        return cause.place, cause.why, cause.todo

    for _, group in groupby(numbered, key=reason):
        items = list(group)
        number, line = items[0]
        numbers = str(number) if len(items) == 1 else f"{number}-{items[-1][0]}"
        code = source(line.cause)
        said += _wrapped(
            [f"{numbers}. {place_text(line.cause)}{f':  {code}' if code else ''}"], width
        )
        said += _wrapped([f"{line.cause.why}."], width, "   ", "   ")
        for todo in line.cause.todo:
            said += _wrapped([f"- {todo}."], width, "   ", "     ")
    return said


def source(cause: Cause) -> str:
    """The text of the line, where its file is there."""
    return linecache.getline(cause.place.file, cause.place.line).strip() if cause.place else ""


def _freed(lines: Sequence[Line], width: int) -> list[str]:
    rows = [("line", "op", "calls", "PyTorch would receive", "by")]
    for line in lines:
        cause, theirs = line.cause, line.of(line.cause.torch)
        rows.append(
            (
                place_text(cause),
                cause.op,
                f"{line.calls:,}",
                "nothing: it raises" if theirs is None else bytes_text(theirs),
                cause.torch.error or cause.why.rpartition("redistributes its ")[2],
            )
        )
    return [
        "What cute_sharding removes: nothing is sent here",
        *aligned(rows, width, {0, 1, 4}, {0: 20, 4: 12}),
    ]


def _wrapped(sentences: Sequence[str], width: int, first: str = "", then: str = "  ") -> list[str]:
    """Lines of so many columns; a number stays with its unit."""
    found = []
    for sentence in sentences:
        joined = re.sub(r"(\d) (?=[kMG]?B\b|[um]?s\b)", "\\1\N{NO-BREAK SPACE}", sentence)
        found += wrap(joined, width, initial_indent=first, subsequent_indent=then)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in found]
