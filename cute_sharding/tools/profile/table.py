"""A profile as text, for a terminal: a row for each line, op and set of placements, and the rows in
sentences.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from itertools import count, groupby, zip_longest
from textwrap import wrap

from cute_sharding._words import bytes_text, counted, seconds_text
from cute_sharding.tools.profile.report import Cause, Line, Report

NARROWEST = 72
# Narrower tables leave out seconds.
WIDE = 96
# So many of the lines that call a function are named.
CALLERS = 5


def text(report: Report, width: int, most: int) -> str:
    """The table, of so many columns and at most so many lines of the program."""
    width = max(width, NARROWEST)
    parts = [_wrapped(head(report), width)]
    sent, left = report.lines[:most], report.lines[most:]
    if sent:
        parts.append(_sent(sent, width))
    if left:
        received = bytes_text(report.total(lambda line: line.received, left))
        parts.append([f"and {counted(len(left), 'more row')}, {received} received"])
    if sent:
        parts.append(_in_words(sent, width))
    return "\n\n".join("\n".join(part) for part in parts if part)


def head(report: Report) -> list[str]:
    """Sentences that say what was recorded in all."""
    on = f"on ({report.settings})" if report.settings else "off"
    where = f"mesh {'; '.join(report.meshes)}" if report.meshes else "no DTensor mesh"
    who = f"Rank {report.rank} of {report.world}, {where}, torch {report.version}."
    said = f"{who} cute_sharding is {on}."
    sent = report.lines
    if not sent:
        return [said, "No communication."]
    places = {(line.cause.place, line.cause.backward) for line in sent}
    many = sum(len(line.events) for line in sent)
    rows = (
        f" ({len(sent):,} rows: one for each op and set of placements)"
        if len(sent) > len(places)
        else ""
    )
    model = seconds_text(report.total(lambda line: line.model))
    measured = seconds_text(report.total(lambda line: line.measured))
    received = bytes_text(report.total(lambda line: line.received))
    return [
        said,
        f"{counted(many, 'collective')} on {counted(len(places), 'line')}{rows}: the busiest rank "
        f"received {received}; {model} by the network model ({report.network}), {measured} "
        "measured, until the program waited for each result.",
    ]


def _sent(lines: Sequence[Line], width: int) -> list[str]:
    rows = [("", "line", "op", "placements", "collectives", "received", "model", "measured")]
    for number, line in enumerate(lines, 1):
        cause = line.cause
        rows.append(
            (
                str(number),
                place_text(cause),
                cause.op,
                ",\n".join(dict.fromkeys(moved.change for moved in cause.moved)) or _as_lies(cause),
                kinds_text(line).replace(", ", ",\n"),
                bytes_text(line.received) + ("" if line.is_of_busiest else "*"),
                seconds_text(line.model),
                seconds_text(line.measured),
            )
        )
    note = "received: bytes that the busiest rank receives."
    if not all(line.is_of_busiest for line in lines):
        note += " *: bytes of this rank, because the bytes of the busiest rank are unknown."
    kept = [row if width >= WIDE else row[:6] for row in rows]
    table = aligned(kept, width, {1, 2, 3, 4}, {1: 14, 2: 8}, {3: 8, 4: 16})
    notes = [note, *_blocks(row[3] for row in kept[1:])]
    return ["Communication, the most bytes first", *table, *_wrapped(notes, width)]


def _blocks(changes: Iterable[str]) -> list[str]:
    """What a _StridedShard is, by the first that appears."""
    found = next(filter(None, (re.search(r"_S\((\d+), (\d+)\)", each) for each in changes)), None)
    if found is None:
        return []
    dim, blocks = found.groups()
    return [
        f"{found[0]}: a _StridedShard; dim {dim} is divided into {blocks} blocks, and each rank "
        "holds its part of every block."
    ]


def place_text(cause: Cause) -> str:
    """The line, and whether it is a gradient."""
    place = "unknown" if cause.place is None else str(cause.place).partition(" ")[0]
    return f"{place} grad" if cause.backward else place


def kinds_text(line: Line) -> str:
    """Which collectives, and how many of each."""
    return ", ".join(f"{n} {kind}" for kind, n in line.kinds.items())


def callers_text(line: Line) -> str:
    """From where the function of the line is called, if from several lines."""
    callers = line.callers
    if len(callers) < 2:
        return ""
    said = [f"{place} ({counted(n, 'collective')})" for place, n in list(callers.items())[:CALLERS]]
    left = len(callers) - len(said)
    more = [f"{counted(left, 'more line')}"] if left else []
    return f"Called from {', '.join([*said, *more])}"


def _as_lies(cause: Cause) -> str:
    """Of what moves no whole operand: how it lies before and after."""
    if not cause.operands or not cause.results:
        return ""
    before, after = (
        each[0].rpartition(" [")[2].rstrip("]") for each in (cause.operands, cause.results)
    )
    return f"{before} -> {after}"


def aligned(
    rows: Sequence[tuple[str, ...]],
    width: int,
    left: set[int],
    least: dict[int, int],
    wraps: dict[int, int] | None = None,
) -> list[str]:
    """Columns: those of ``left`` to the left, the others to the right. Where they do not fit, those
    that have a ``least`` width are cut, the widest first; a line of the program in front, as its
    number is at the end. Where that is not enough, those of ``wraps`` go on in the next line, which
    their newlines ask for, each placement or name whole.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    for narrowest in (least, wraps or {}):
        while sum(widths) + 2 * (len(widths) - 1) > width:
            wide = [i for i in narrowest if widths[i] > narrowest[i]]
            if not wide:
                break
            widths[max(wide, key=lambda i: widths[i])] -= 1

    def cell(i: int, value: str) -> list[str]:
        over = len(value) - widths[i]
        if over > 0 and i in (wraps or {}):
            parts = value.split("\n")
            return [line for part in parts for line in _placements_wrapped(part, widths[i])]
        if over > 0:
            is_line = ".py:" in value
            value = f"..{value[over + 2 :]}" if is_line else f"{value[: widths[i] - 2]}.."
        return [value.replace("\n", " ")]

    def fill(i: int, value: str) -> str:
        return value.ljust(widths[i]) if i in left else value.rjust(widths[i])

    lines = [zip_longest(*(cell(i, x) for i, x in enumerate(row)), fillvalue="") for row in rows]
    return ["  ".join(map(fill, count(), line)).rstrip() for row in lines for line in row]


def _placements_wrapped(text: str, width: int) -> list[str]:
    """Between placements or names, and never inside of one unless it is wider."""
    whole = re.sub(r", (?=[^()]*\))", ",\N{NO-BREAK SPACE}", text)
    lines = wrap(whole, width, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _in_words(lines: Sequence[Line], width: int) -> list[str]:
    """Each row in a sentence; rows in order that say the same are one."""
    said = ["Line by line"]

    def alike(item: tuple[int, Line]) -> tuple[object, ...]:
        return item[1].cause.place, item[1].cause.text

    for _, group in groupby(enumerate(lines, 1), key=alike):
        items = list(group)
        number, line = items[0]
        numbers = str(number) if len(items) == 1 else f"{number}-{items[-1][0]}"
        code = source(line.cause)
        where = f"{numbers}. {place_text(line.cause)}{f':  {code}' if code else ''}"
        callers = dict.fromkeys([callers_text(each) for _, each in items])
        said += _wrapped([where], width)
        said += _wrapped(
            [f"{each}." for each in (line.cause.text, *callers) if each], width, "   ", "   "
        )
    return said


def source(cause: Cause) -> str:
    """The text of the line, where its file is there."""
    return linecache.getline(cause.place.file, cause.place.line).strip() if cause.place else ""


def _wrapped(sentences: Sequence[str], width: int, first: str = "", then: str = "  ") -> list[str]:
    """Lines of so many columns; a number stays with its unit."""
    found = []
    for sentence in sentences:
        joined = re.sub(r"(\d) (?=[kMG]?B\b|[um]?s\b)", "\\1\N{NO-BREAK SPACE}", sentence)
        found += wrap(joined, width, initial_indent=first, subsequent_indent=then)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in found]
