"""A picture on a terminal, by rich: blocks of lines, side by side as far as they fit."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from cute_sharding.tools.drawing.libraries import library
from cute_sharding.tools.drawing.palette import ink_on
from cute_sharding.tools.drawing.parts import GAP, Cell, Contents, Panel, Section, Table

# Between blocks that stand side by side.
SPACE = 4
# Ticks of columns that are longer take two lines.
TICK = 5


def as_text(picture: Contents, width: int, colour: bool) -> str:
    """The picture as text of so many columns."""
    console = library("rich.console").Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        legacy_windows=False,
        _environ={},
    )
    _print(console, picture)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def for_output(picture: Contents, width: int | None) -> str:
    """The picture as standard output takes it, with the escapes of its colours if it has any."""
    console = library("rich.console").Console(width=width)
    with console.capture() as capture:
        _print(console, picture)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def show(picture: Contents, file: Any) -> None:
    _print(library("rich.console").Console(file=file), picture)


def _print(console: Any, picture: Contents) -> None:
    for line in renderables(picture, console.width):
        console.print(line, highlight=False, markup=False, emoji=False)


def renderables(picture: Contents, width: int) -> Iterable[Any]:
    """The lines of a picture, as rich Texts."""
    lines = _wrapped(picture.title, width, "bold")
    blocks = [_section(section, width) for section in picture.sections]
    lines += _flowed(blocks, width)
    if picture.legend:
        lines.append(_text(""))
        lines += _legend(picture, width)
    if picture.captions:
        lines.append(_text(""))
        for caption in picture.captions:
            lines += _wrapped(caption, width)
    return lines


def _section(section: Section, width: int) -> list[Any]:
    lines = _wrapped(section.title, width, "bold") if section.title else []
    panels = [_panel(panel, width) for panel in section.panels]
    lines += _flowed(panels, width, first=not section.title)
    if section.table is not None:
        lines += [_text(""), *_table(section.table)]
    most = max([40, *(line.cell_len for line in lines)])
    for caption in section.captions:
        lines += _wrapped(caption, min(width, most), "italic")
    return lines


def _panel(panel: Panel, width: int) -> list[Any]:
    lines = [_text(panel.title, "bold")] if panel.title else []
    if panel.row_axis:
        lines += _wrapped(f"down: {panel.row_axis}", width)
    lines += _wrapped(
        f"across: {panel.column_axis}" if panel.row_axis else panel.column_axis, width
    )
    heads = [_tick(text) for text in panel.columns]
    each = max(
        [
            *(len(part) for head in heads for part in head),
            *(len(cell.label) for line in panel.cells for cell in line),
        ]
    )
    margin = max(map(len, panel.rows))
    columns, hidden = _fitting(len(panel.columns), max(0, width - margin - 1) // (each + 2))
    tall = max(map(len, heads))
    for level in range(tall):
        line = _text(" " * (margin + 1))
        for j in columns:
            head = ("",) * (tall - len(heads[j])) + heads[j] if j is not None else ("",) * tall
            line.append(f" {head[level]:^{each}} ", style="dim")
        if line.plain.strip():
            lines.append(line)
    for label, cells in zip(panel.rows, panel.cells):
        line = _text(f"{label:>{margin}} ", "dim")
        for j in columns:
            _append(line, Cell(GAP) if j is None else cells[j], each)
        lines.append(line)
    if hidden:
        first, last = panel.columns[hidden[0]], panel.columns[hidden[-1]]
        text = f"columns {first} to {last} are not shown: the terminal is {width} wide"
        lines += _wrapped(text, width, "italic")
    return lines


def _tick(text: str) -> tuple[str, ...]:
    if len(text) <= TICK or ":" not in text:
        return (text,)
    start, stop = text.split(":")
    return f"{start}:", stop


def _fitting(count: int, room: int) -> tuple[list[int | None], range]:
    """The columns that fit, None for those between that do not, and which these are."""
    if count <= room:
        return [*range(count)], range(0)
    kept = max(room - 2, 1)
    return [*range(kept), None, count - 1], range(kept, count - 1)


def _append(line: Any, cell: Cell, width: int) -> None:
    text = f" {cell.label:^{width}} "
    if cell.device is None and cell.share is None:
        line.append(text)
    else:
        line.append(text, style=f"{ink_on(cell.colour)} on {cell.colour}".lower())


def _legend(picture: Contents, width: int) -> list[Any]:
    each = max(len(key.label) for key in picture.legend)
    lines = []
    for key in picture.legend:
        parts = textwrap.wrap(key.text, max(width - each - 3, 20))
        for i, part in enumerate(parts):
            line = _text("")
            if i:
                line.append(" " * (each + 2))
            else:
                _append(line, Cell(key.label, key.device), each)
            line.append(f" {part}")
            lines.append(line)
    return lines


def _table(table: Table) -> list[Any]:
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    lines = []
    for i, row in enumerate(rows):
        text = "  ".join(f"{part:<{w}}" for part, w in zip(row, widths)).rstrip()
        style = "dim" if i == 0 else "bold" if i - 1 in table.marked else ""
        lines.append(_text(text, style))
    return lines


def _flowed(blocks: Sequence[list[Any]], width: int, first: bool = False) -> list[Any]:
    """Blocks of lines side by side as far as they fit, and then below, an empty line between."""
    lines: list[Any] = []
    row: list[list[Any]] = []
    for block in blocks:
        if row and sum(map(_width, [*row, block])) + SPACE * len(row) > width:
            lines += [*([] if first and not lines else [_text("")]), *_beside(row)]
            row = []
        row.append(block)
    if row:
        lines += [*([] if first and not lines else [_text("")]), *_beside(row)]
    return lines


def _width(block: Sequence[Any]) -> int:
    return max((line.cell_len for line in block), default=0)


def _beside(blocks: Sequence[list[Any]]) -> list[Any]:
    if len(blocks) == 1:
        return blocks[0]
    lines = []
    for i in range(max(map(len, blocks))):
        line = _text("")
        for block in blocks[:-1]:
            part = block[i] if i < len(block) else _text("")
            line.append_text(part)
            line.append(" " * (_width(block) + SPACE - part.cell_len))
        if i < len(blocks[-1]):
            line.append_text(blocks[-1][i])
        lines.append(line)
    return lines


def _wrapped(text: str, width: int, style: str = "") -> list[Any]:
    return [_text(line, style) for line in textwrap.wrap(text, max(width, 20)) or [""]]


def _text(text: str, style: str = "") -> Any:
    # The style is a span: a Text's own would go on to whatever is appended.
    made = library("rich.text").Text(no_wrap=True, overflow="crop")
    return made.append(text, style=style)
