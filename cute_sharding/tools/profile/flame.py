"""The lines of a profile as a flame: all, by file, by function, by line, as wide as what they
receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from cute_sharding._words import bytes_text
from cute_sharding.tools.profile.report import Line
from cute_sharding.tools.profile.table import place_text

# Narrower boxes are left out: nobody could read or point at them.
NARROWEST = 0.002
HEIGHT = 26


class Bar(NamedTuple):
    """A part of the flame: from left to right a share of the whole, in a row from the top."""

    label: str
    left: float
    width: float
    row: int
    received: int


def boxes(lines: Sequence[Line]) -> list[Bar]:
    """The boxes of what communicates; none where nothing was received."""
    total = sum(line.received for line in lines)
    found: list[Bar] = []
    if not total:
        return found
    keys: list[Callable[[Line], str]] = [
        lambda line: "all",
        lambda line: line.cause.place.file if line.cause.place else "not known",
        lambda line: line.cause.place.function if line.cause.place else "",
        lambda line: f"{place_text(line.cause)}: {line.cause.op}",
    ]

    def add(some: Sequence[Line], row: int, left: float) -> None:
        if row == len(keys):
            return
        groups: dict[str, list[Line]] = {}
        for line in some:
            groups.setdefault(keys[row](line), []).append(line)
        for label, group in groups.items():
            received = sum(line.received for line in group)
            width = received / total
            if width >= NARROWEST:
                found.append(Bar(label, left, width, row, received))
                add(group, row + 1, left)
            left += width

    add(lines, 0, 0.0)
    return found


def html(lines: Sequence[Line]) -> str:
    """As boxes of HTML."""
    every = boxes(lines)
    if not every:
        return "<p>Nothing was received.</p>"
    rows = 1 + max(box.row for box in every)
    drawn = [
        f'<div class="box row{box.row}" style="left:{box.left:.4%};width:{box.width:.4%};'
        f'top:{box.row * HEIGHT}px" title="{escape(box.label)}: {bytes_text(box.received)}">'
        f"{escape(_short(box.label))} {bytes_text(box.received)}</div>"
        for box in every
    ]
    return f'<div class="flame" style="height:{rows * HEIGHT}px">{"".join(drawn)}</div>'


def _short(label: str) -> str:
    return label.rpartition("/")[2]
