"""Charts of a page: bars of amounts, and a timeline, for a whole model. Text is HTML beside the
pictures, so it wraps on a narrow screen and has the colours of the page; pictures are SVG in per
cent of its width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from cute_sharding._words import seconds_text
from cute_sharding.tools.drawing.palette import of_device

HEIGHT = 14  # of a bar, in pixels
THIN = 0.05  # of a span, in per cent: the least that can be seen


class Bar(NamedTuple):
    """An amount, in parts.

    Attributes:
        label: what it is of; empty if its group says so.
        text: the amount in words.
        parts: the amount of each kind.
    """

    label: str
    text: str
    parts: Mapping[str, float]


class BarGroup(NamedTuple):
    """Bars that are compared with one another.

    Attributes:
        title: what they are of.
        bars: the bars.
        note: more words about it, such as the text of a line of the program.
    """

    title: str
    bars: Sequence[Bar]
    note: str = ""


class Span(NamedTuple):
    """What takes time.

    Attributes:
        row: the row of the timeline.
        kind: gives the colour.
        start, end: in seconds.
        text: what a pointer shows.
    """

    row: str
    kind: str
    start: float
    end: float
    text: str


def bar_chart(title: str, groups: Sequence[BarGroup], kinds: Sequence[str]) -> str:
    """Horizontal bars, of which the longest fills the width. ``kinds`` gives each kind its colour.

    >>> group = BarGroup("a.py:1", [Bar("", "8 B", {"all-gather": 8})])
    >>> chart = bar_chart("Bytes", [group], ["all-gather"])
    >>> "a.py:1" in chart, 'width="100.00%"' in chart
    (True, True)
    """
    bars = [bar for group in groups for bar in group.bars]
    most = max([sum(bar.parts.values()) for bar in bars], default=0) or 1
    colours = _colours(kinds)
    body = ""
    for group in groups:
        body += f'<div style="margin-top:.6rem;overflow-wrap:anywhere"><b>{escape(group.title)}</b>'
        body += f" <code>{escape(group.note)}</code>" if group.note else ""
        body += f"{''.join(_bar(bar, most, colours) for bar in group.bars)}</div>"
    return _figure(title, colours, body)


def time_chart(title: str, spans: Sequence[Span], seconds: float, kinds: Sequence[str]) -> str:
    """Spans of time, in rows that begin with the first span of each. ``kinds`` gives each kind its
    colour.

    >>> span = Span("tp", "all-gather", 0.5, 1.0, "here")
    >>> 'x="25.00%" width="25.00%"' in time_chart("Step", [span], 2.0, ["all-gather"])
    True
    """
    colours = _colours(kinds)
    scale = 100 / (max([seconds, *[span.end for span in spans]]) or 1)
    body = ""
    for row in dict.fromkeys(span.row for span in spans):
        parts = "".join(
            _rect(
                span.start * scale,
                max((span.end - span.start) * scale, THIN),
                colours[span.kind],
                span.text,
            )
            for span in spans
            if span.row == row
        )
        body += f'<div style="margin-top:.6rem">{escape(row)}{_picture(row, parts)}</div>'
    middle, end = (seconds_text(part * 100 / scale) for part in (0.5, 1))
    ends = "".join(f"<span>{text}</span>" for text in ("0 s", middle, end))
    body += f'<div style="display:flex;justify-content:space-between">{ends}</div>'
    return _figure(title, colours, body)


def _colours(kinds: Sequence[str]) -> dict[str, str]:
    return {kind: of_device(i) for i, kind in enumerate(kinds)}


def _bar(bar: Bar, most: float, colours: Mapping[str, str]) -> str:
    at, parts = 0.0, ""
    for kind, amount in bar.parts.items():
        share = 100 * amount / most
        parts += _rect(at, share, colours[kind], kind) if share else ""
        at += share
    said = escape(": ".join(filter(None, (bar.label, bar.text))))
    return f"<div>{said}{_picture(bar.text, parts)}</div>"


def _rect(at: float, wide: float, colour: str, text: str) -> str:
    return (
        f'<rect x="{at:.2f}%" width="{wide:.2f}%" height="{HEIGHT}" fill="{colour}">'
        f"<title>{escape(text)}</title></rect>"
    )


def _picture(text: str, parts: str) -> str:
    return (
        f'<svg role="img" aria-label="{escape(text)}" width="100%" height="{HEIGHT}" '
        f'style="display:block;background:#8883">{parts}</svg>'
    )


def _figure(title: str, colours: Mapping[str, str], body: str) -> str:
    legend = " ".join(
        f'<span style="white-space:nowrap"><svg width="10" height="10"><rect width="10" '
        f'height="10" fill="{colour}"/></svg> {escape(kind)}</span>'
        for kind, colour in colours.items()
    )
    return (
        f'<figure style="margin:1.2rem 0"><figcaption><b>{escape(title)}</b> {legend}</figcaption>'
        f"{body}</figure>"
    )
