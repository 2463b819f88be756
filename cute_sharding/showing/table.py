"""A profile as text, for a terminal: what is sent, why, what would avoid it, and what is free with
this package.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence
from itertools import count, groupby, zip_longest
from textwrap import wrap

from cute_sharding.profiling import Cause, Line, Other, Report, Root
from cute_sharding.showing.amounts import bytes_text, of_many, seconds_text

NARROWEST = 72
# Narrower tables leave out seconds.
WIDE = 96
# So many of the lines that call a function are named.
CALLERS = 5
# Seconds that differ by less of them are alike.
ALIKE = 0.01
# A remedy with more characters is not said twice.
REPEATED = 140
# Communication that follows from one line is said first if it has at least this share of the bytes.
LARGE = 0.1
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
            parts.append([f"and {of_many(len(left), 'row')} more, {received} received"])
        parts.append(_reasons(sent[:most], width))
    if report.freed:
        parts.append(_freed(report.freed[:most], width))
    return "\n\n".join("\n".join(part) for part in parts if part)


# -- what it says first ----------------------------------------------------------------------------


def head(report: Report) -> list[str]:
    """Sentences that say what was seen, and what the same ops receive without or with this
    package.
    """
    on = f"on ({report.settings})" if report.settings else "off"
    where = f"mesh {'; '.join(report.meshes)}" if report.meshes else "no DTensor mesh"
    who = f"Rank {report.rank} of {report.world}, {where}, torch {report.version}."
    said = [f"{who} cute_sharding is {on}."]
    sent = report.communicating
    if not sent:
        return [*said, "No communication.", *_compared(report)]
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
    said.append(
        f"{of_many(many, 'collective')} on {of_many(len(places), 'line')}{rows}: the busiest rank "
        f"received {received}; {model} by the network model ({report.network}), {measured} "
        "measured, until the program waited for each result."
    )
    return [*said, *_rooted(report), *_compared(report)]


def _rooted(report: Report) -> list[str]:
    """The lines from which much of the communication may follow, by bytes."""
    whole = report.total(lambda line: line.received)
    found: dict[Root, list[Line]] = {}
    for line in report.communicating:
        if line.cause.root is not None:
            found.setdefault(line.cause.root, []).append(line)
    said = []
    for root, lines in found.items():
        received = report.total(lambda line: line.received, lines)
        if received >= LARGE * whole:
            places = {(line.cause.place, line.cause.backward) for line in lines}
            many = f"{bytes_text(received)} on {of_many(len(places), 'line')} may follow from"
            said.append((received, f"To change first: {many} one op. {root.text}."))
    return [text for _, text in sorted(said, reverse=True)]


def _compared(report: Report) -> list[str]:
    who, state = ("PyTorch", "off") if report.settings else ("this package", "on")
    ours, theirs, unknown = report.compared(
        (lambda cause: cause.torch) if report.settings else (lambda cause: cause.package)
    )
    if not theirs and not (report.settings and ours):
        return []
    if report.settings:
        one_by_one = (
            f"PyTorch's rules would receive {bytes_text(theirs)}, and cute_sharding received "
            f"{bytes_text(ours)}"
        )
    else:
        one_by_one = f"{SWITCH} would receive {bytes_text(theirs)} of {bytes_text(ours)}"
    return [
        f"Op by op, each with its present placements: {one_by_one}.{_left_out(unknown, who)} This "
        f"does not compare whole programs: with the package {state}, later tensors would have "
        f"other placements, and the total may be larger or smaller.",
        f"For the total with each setting: {_estimate(report)} (see docs/estimate.md).",
        *(_slower(report) if report.settings else ()),
    ]


def _estimate(report: Report) -> str:
    """The command that compares whole programs on this mesh."""
    mesh = next(iter(report.meshes), "N").replace(", ", ",")
    sizes = re.sub(r"mesh dim \d+=", "", mesh)
    return f"python -m cute_sharding estimate FILE.py:FUNCTION --mesh {sizes}"


def _slower(report: Report) -> list[str]:
    ours, theirs = report.compared_seconds()
    if ours <= theirs * (1 + ALIKE):
        return []
    todo = (
        'first make the change that is named after "To change first"'
        if _rooted(report)
        else ("compare the flags, with the option --settings PyTorch,views,all of estimate")
    )
    return [
        f"By the network model, the collectives of these ops take longer than with PyTorch's "
        f"rules: {seconds_text(ours)} instead of {seconds_text(theirs)}. What to do: {todo}."
    ]


def _left_out(unknown: int, who: str) -> str:
    return (
        f" ({of_many(unknown, 'row')} left out, because the bytes for {who} are unknown.)"
        if unknown
        else ""
    )


# -- what is sent ----------------------------------------------------------------------------------


def _sent(report: Report, lines: Sequence[Line], width: int) -> list[str]:
    other = "PyTorch" if report.settings else "with it"
    rows = [("", "line", "op", "placements", "collectives", "received", "model", "measured", other)]
    for number, line in enumerate(lines, 1):
        cause = line.cause
        theirs = cause.torch if report.settings else cause.package
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
                _other(line, theirs),
            )
        )
    note = (
        f"received: bytes that the busiest rank receives. {other}: bytes that it would receive "
        + ("by PyTorch's rules" if report.settings else "with cute_sharding")
        + ", for the same op and placements."
    )
    if not all(line.is_of_busiest for line in lines):
        note += " *: bytes of this rank, because the bytes of the busiest rank are unknown."
    if any(row[-1] == "?" for row in rows):
        note += (
            " ?: unknown, for communication that the program asks for, for ops that have special "
            "functions in PyTorch, and for _StridedShard placements that PyTorch may misread."
        )
    kept = [row if width >= WIDE else (*row[:6], *row[8:]) for row in rows]
    table = aligned(kept, width, {1, 2, 3, 4}, {1: 14, 2: 8}, {3: 8, 4: 16})
    notes = [note, *_blocks(row[3] for row in kept[1:])]
    return ["Communication, the most bytes first", *table, *_wrapped(notes, width)]


def _other(line: Line, theirs: Other) -> str:
    received = line.of(theirs)
    if received is not None:
        return bytes_text(received)
    return "raises" if theirs.error else "?"


def _blocks(changes: Iterable[str]) -> list[str]:
    """What a _StridedShard is, by the first that appears."""
    found = next(filter(None, (re.search(r"_S\((\d+), (\d+)\)", each) for each in changes)), None)
    if found is None:
        return []
    dim, blocks = found.groups()
    return [
        f"{found[0]}: a _StridedShard; dim {dim} is divided into {blocks} blocks, and each rank "
        f"holds "
        "its part of every block."
    ]


def place_text(cause: Cause, *, with_function: bool = False) -> str:
    """The line, and whether it is a gradient."""
    if cause.place is None:
        place = "unknown"
    else:
        where = str(cause.place).partition(" ")[0]
        function = cause.place.function.rpartition("<locals>.")[2]
        place = f"{where} in {function}" if with_function else where
    return f"{place} grad" if cause.backward else place


def kinds_text(line: Line) -> str:
    """Which collectives, and how many of each."""
    return ", ".join(f"{n} {kind}" for kind, n in line.kinds.items())


def callers_text(line: Line) -> str:
    """From where the function of the line is called, if from several lines."""
    callers = line.callers
    if len(callers) < 2:
        return ""
    said = [f"{place} ({of_many(n, 'collective')})" for place, n in list(callers.items())[:CALLERS]]
    left = len(callers) - len(said)
    more = [f"{of_many(left, 'line')} more"] if left else []
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


# -- why -------------------------------------------------------------------------------------------


def _reasons(lines: Sequence[Line], width: int) -> list[str]:
    """Of each row a reason; rows in order that say the same are one."""
    said = ["Why, and how to avoid it"]
    first: dict[str, str] = {}  # by remedy, the number under which it is said
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
        callers = dict.fromkeys([callers_text(each) for _, each in items])
        said += _wrapped([f"{each}." for each in callers if each], width, "   ", "   ")
        for todo in line.cause.todo:
            at = first.setdefault(todo, numbers) if len(todo) > REPEATED else numbers
            said += _wrapped(
                [f"- {todo}." if at == numbers else f"- see {at}: {_begin(todo)} ..."],
                width,
                "   ",
                "     ",
            )
    return said


def _begin(todo: str) -> str:
    """The first part of a remedy."""
    return todo.partition(": ")[0].partition(", ")[0]


def source(cause: Cause) -> str:
    """The text of the line, where its file is there."""
    return linecache.getline(cause.place.file, cause.place.line).strip() if cause.place else ""


def _freed(lines: Sequence[Line], width: int) -> list[str]:
    rows = [("line", "op", "calls", "PyTorch's rules would receive", "by")]
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
        "Nothing is sent here; PyTorch's rules would send, for the same placements",
        *aligned(rows, width, {0, 1, 4}, {0: 20, 4: 12}),
    ]


def _wrapped(sentences: Sequence[str], width: int, first: str = "", then: str = "  ") -> list[str]:
    """Lines of so many columns; a number stays with its unit."""
    found = []
    for sentence in sentences:
        joined = re.sub(r"(\d) (?=[kMG]?B\b|[um]?s\b)", "\\1\N{NO-BREAK SPACE}", sentence)
        found += wrap(joined, width, initial_indent=first, subsequent_indent=then)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in found]
