"""What notebooks show of a value: tables of HTML, from its plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import chain, islice, repeat
from typing import Any

ROWS = 50  # of a table that are shown

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 1rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
th, td { border-bottom: 1px solid #8884; padding: .35rem .5rem; text-align: left;
  vertical-align: top }
.stacked td:nth-child(-n+3) { white-space: nowrap }
@media (max-width: 640px) {
  .stacked tr { display: block; border-bottom: 1px solid #8884; padding: .2rem 0 }
  .stacked tr:first-child { display: none }
  .stacked td { display: inline-block; border: 0; padding: .1rem .6rem .1rem 0 }
  .stacked td:first-child { font-weight: bold }
  .stacked td:not(:first-child)::before { content: attr(data-of) " "; opacity: .7 }
}
"""

_NUMBER = ' style="text-align: right"'


def table(
    rows: Iterable[Sequence[Any]],
    head: Sequence[str] = (),
    caption: str = "",
    *,
    named: bool = False,
) -> str:
    """Rows of cells, the first ``ROWS`` of them; ``head`` has names for their columns. ``named``:
    each cell also knows the name of its column.

    >>> table([("a < b",)], ("what",))
    '<table><tr><th>what</th></tr><tr><td>a &lt; b</td></tr></table>'
    """
    rows = iter(rows)
    parts = [f"<caption>{escape(caption)}</caption>"] if caption else []
    if head:
        parts.append(_row(f"<th>{escape(name)}</th>" for name in head))
    names_of = head if named else ()
    parts += [_row(map(_cell, row, chain(names_of, repeat("")))) for row in islice(rows, ROWS)]
    left = sum(1 for _ in rows)
    if left:
        parts.append(f'<tr><td colspan="{max(len(head), 1)}">and {left:,} more</td></tr>')
    return f"<table>{''.join(parts)}</table>"


def stacked(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    """A table for :func:`page`, whose rows are blocks on a narrow screen: the first cell, then each
    with the name of its column.
    """
    return f'<div class="scroll stacked">{table(rows, head, named=True)}</div>'


def page(title: str, body: str) -> str:
    """One page of HTML without other files, which fits a narrow screen, and is light or dark as the
    reader has it.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>"
    )


def of_data(title: str, data: Mapping[str, Any]) -> str:
    """Plain data, as ``to_dict`` gives it: a table for each list of mappings, the totals last."""
    parts = [f"<p><b>{escape(title)}</b></p>"]
    totals = {}
    for name, value in data.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            head = list(dict.fromkeys(key for each in value for key in each))
            parts.append(
                table([[each.get(key) for key in head] for each in value], _words(head), name)
            )
        else:
            totals[name] = value
    parts.append(table([list(totals.values())], _words(totals), "in all") if totals else "")
    return "".join(parts)


def of_text(text: str) -> str:
    """Text whose lines and columns stay as they are."""
    return f"<pre>{escape(text)}</pre>"


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: Any, name: str) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    of = f' data-of="{escape(name)}"' if name else ""
    return f"<td{of}{_NUMBER if is_number else ''}>{escape(_text(value))}</td>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(_text, value[:8]))
        return shown if len(value) <= 8 else f"{shown} and {len(value) - 8:,} more"
    return str(value)


def _words(names: Iterable[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]
