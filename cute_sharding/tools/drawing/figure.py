"""A picture as SVG or PNG, by matplotlib: one page of boxes and text, laid out here in points.

Text is in a fixed-width font, so its width is known, and stays text in an SVG.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_sharding.tools.drawing.libraries import library
from cute_sharding.tools.drawing.palette import ink_on
from cute_sharding.tools.drawing.parts import GAP, Cell, Contents, Panel, Section

SUFFIXES = (".svg", ".png")
FONT, SIZE = "DejaVu Sans Mono", 9.0
# Of a character, and of a line, in points; DejaVu Sans Mono is 0.602 em wide.
WIDE, HIGH = 0.61 * SIZE, 1.35 * SIZE
CELL = 15.0
MARGIN, SPACE = 12.0, 24.0
# The page is as wide as it must be, and blocks go side by side up to here.
PAGE = 900.0
LINE = int(PAGE / WIDE)
GREY = "#595959"
# Nothing of the moment or the machine is written into a file.
SETTINGS = {
    "svg.hashsalt": "cute-sharding",
    "svg.fonttype": "none",
    "font.family": "monospace",
    "font.monospace": [FONT],
    "font.size": SIZE,
    "text.parse_math": False,
}


def save(picture: Contents, path: Path) -> None:
    """Write the picture to a .svg or a .png."""
    _write(picture, path, path.suffix[1:])


def svg(picture: Contents) -> str:
    file = io.BytesIO()
    _write(picture, file, "svg")
    return file.getvalue().decode()


def _write(picture: Contents, file: Any, kind: str) -> None:
    matplotlib = library("matplotlib")
    made = library("matplotlib.figure").Figure
    page = Page(picture)
    with matplotlib.rc_context(SETTINGS):
        figure = made(figsize=(page.width / 72, page.height / 72), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, page.width)
        axes.set_ylim(page.height, 0)
        _draw_boxes(axes, page.boxes)
        for text in page.texts:
            axes.text(
                *(text.x, text.y, text.text),
                color=text.colour,
                ha=text.align,
                va="center_baseline" if text.align == "center" else "baseline",
                fontweight="bold" if text.bold else "normal",
            )
        metadata = {"Title": picture.title, **({"Date": None} if kind == "svg" else {})}
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)


def _draw_boxes(axes: Any, boxes: Sequence[Rectangle]) -> None:
    """One path for all boxes of a colour: a small file."""
    path = library("matplotlib.path").Path
    patch = library("matplotlib.patches").PathPatch
    colours: dict[str, list[Any]] = {}
    for box in boxes:
        right, below = box.x + box.width, box.y + box.height
        corners = [(box.x, box.y), (right, box.y), (right, below), (box.x, below), (box.x, box.y)]
        colours.setdefault(box.colour, []).append(path(corners, closed=True))
    for colour, paths in colours.items():
        whole = path.make_compound_path(*paths)
        axes.add_patch(patch(whole, facecolor=colour, edgecolor="white", linewidth=0.8))


class Text(NamedTuple):
    x: float
    y: float
    text: str
    colour: str = "#000000"
    align: str = "left"
    bold: bool = False


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    colour: str


class FigureBlock(NamedTuple):
    """A part of the page: its size, and what puts it at a place."""

    width: float
    height: float
    put: Callable[[Page, float, float], None]


class Page:
    """The boxes and the text of a picture, and the size of it all."""

    def __init__(self, picture: Contents) -> None:
        self.boxes: list[Rectangle] = []
        self.texts: list[Text] = []
        blocks = [_lines(picture.title, LINE, bold=True)]
        blocks.append(_flowed([_section(section) for section in picture.sections]))
        if picture.legend:
            blocks.append(_legend(picture))
        blocks += [_stacked([_lines(text, LINE) for text in picture.captions])]
        whole = _stacked(blocks, HIGH)
        self.width, self.height = whole.width + 2 * MARGIN, whole.height + 2 * MARGIN
        whole.put(self, MARGIN, MARGIN)

    def write(self, x: float, y: float, text: str, **how: Any) -> None:
        if text:
            self.texts.append(Text(round(x, 2), round(y, 2), text, **how))


def _lines(text: str, most: int, **how: Any) -> FigureBlock:
    """Text, in lines of at most so many characters."""
    lines = textwrap.wrap(text, max(most, 24)) if text else []

    def put(page: Page, x: float, y: float) -> None:
        for i, line in enumerate(lines):
            page.write(x, y + (i + 0.8) * HIGH, line, **how)

    return FigureBlock(max(map(len, lines), default=0) * WIDE, len(lines) * HIGH, put)


def _stacked(blocks: Sequence[FigureBlock], space: float = 0.0) -> FigureBlock:
    blocks = [block for block in blocks if block.height]

    def put(page: Page, x: float, y: float) -> None:
        for block in blocks:
            block.put(page, x, y)
            y += block.height + space

    height = sum(block.height + space for block in blocks) - (space if blocks else 0)
    return FigureBlock(max((block.width for block in blocks), default=0.0), height, put)


def _beside(blocks: Sequence[FigureBlock]) -> FigureBlock:
    def put(page: Page, x: float, y: float) -> None:
        for block in blocks:
            block.put(page, x, y)
            x += block.width + SPACE

    width = sum(block.width + SPACE for block in blocks) - SPACE
    return FigureBlock(width, max(block.height for block in blocks), put)


def _flowed(blocks: Sequence[FigureBlock]) -> FigureBlock:
    """Blocks side by side as far as the page goes, and then below."""
    rows: list[list[FigureBlock]] = []
    for block in blocks:
        if rows and sum(b.width + SPACE for b in rows[-1]) + block.width <= PAGE:
            rows[-1].append(block)
        else:
            rows.append([block])
    return _stacked([_beside(row) for row in rows], 1.5 * HIGH)


def _section(section: Section) -> FigureBlock:
    panels = _flowed([_panel(panel) for panel in section.panels])
    table = _table(section)
    most = int(max(panels.width, table.width, 40 * WIDE) / WIDE)
    title = _lines(section.title, most, bold=True)
    captions = _stacked([_lines(text, most, colour=GREY) for text in section.captions])
    return _stacked([title, panels, table, captions], HIGH / 2)


def _table(section: Section) -> FigureBlock:
    if section.table is None:
        return _stacked([])
    table = section.table
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) + 2 for i in range(len(table.header))]

    def put(page: Page, x: float, y: float) -> None:
        for i, row in enumerate(rows):
            at = x
            for text, width in zip(row, widths):
                page.write(
                    at,
                    y + (i + 0.8) * HIGH,
                    text,
                    bold=i - 1 in table.marked,
                    colour=GREY if i == 0 else "#000000",
                )
                at += width * WIDE

    return FigureBlock(sum(widths) * WIDE, len(rows) * HIGH, put)


def _legend(picture: Contents) -> FigureBlock:
    each = max(len(key.label) for key in picture.legend)
    swatch = max(CELL, (each + 1) * WIDE)
    texts = [_lines(key.text, LINE - each - 4) for key in picture.legend]

    def entry(i: int) -> FigureBlock:
        key = picture.legend[i]

        def put(page: Page, x: float, y: float) -> None:
            _put_cell(page, x, y, swatch, Cell(key.label, key.device))
            texts[i].put(page, x + swatch + WIDE, y + (CELL - HIGH) / 2)

        width = swatch + WIDE + max(text.width for text in texts)
        return FigureBlock(width, max(CELL, texts[i].height) + 2, put)

    entries = [entry(i) for i in range(len(picture.legend))]
    # In columns, read from top to bottom.
    columns = max(1, int((PAGE + SPACE) / (entries[0].width + SPACE)))
    tall = -(-len(entries) // columns)
    return _beside([_stacked(entries[at : at + tall]) for at in range(0, len(entries), tall)])


def _panel(panel: Panel) -> FigureBlock:
    """A grid with its labels; rows and columns that are gaps are narrow."""
    down = f"down: {panel.row_axis}" if panel.row_axis else ""
    across = f"across: {panel.column_axis}" if panel.row_axis else panel.column_axis
    head = [_lines(panel.title, 60), *(_lines(text, 60, colour=GREY) for text in (down, across))]
    top = _stacked(head)
    top = top._replace(height=top.height + HIGH / 4)
    left = max(map(len, panel.rows)) * WIDE + (WIDE if any(panel.rows) else 0)
    ticks = [
        text.replace(":", ":\n").split("\n") if len(text) > 5 else [text] for text in panel.columns
    ]
    tall = max(map(len, ticks)) if any(panel.columns) else 0
    each = max(
        max(len(part) for tick in ticks for part in tick),
        max(len(cell.label) for line in panel.cells for cell in line),
    )
    wide = max(CELL, (each + 1) * WIDE)
    grid = tall * HIGH + len(panel.rows) * CELL + 4

    def put(page: Page, x: float, y: float) -> None:
        top.put(page, x, y)
        y += top.height
        for j, tick in enumerate(ticks):
            for i, part in enumerate(tick):
                at = y + (tall - len(tick) + i + 0.5) * HIGH
                page.write(x + left + (j + 0.5) * wide, at, part, colour=GREY, align="center")
        y += tall * HIGH + 2
        for i, (label, cells) in enumerate(zip(panel.rows, panel.cells)):
            page.write(
                x + left - WIDE / 2,
                y + (i + 0.5) * CELL + 0.35 * SIZE,
                label,
                colour=GREY,
                align="right",
            )
            _put_row(page, x + left, y + i * CELL, wide, cells)

    width = max(top.width, left + len(panel.columns) * wide)
    return FigureBlock(width, top.height + grid, put)


def _put_row(page: Page, x: float, y: float, wide: float, cells: Sequence[Cell]) -> None:
    for j, cell in enumerate(cells):
        _put_cell(page, x + j * wide, y, wide, cell)


def _put_cell(page: Page, x: float, y: float, wide: float, cell: Cell) -> None:
    plain = cell.device is None and cell.share is None
    if not plain:
        page.boxes.append(Rectangle(round(x, 2), round(y, 2), wide, CELL, cell.colour))
    ink = GREY if cell.label == GAP else ink_on(cell.colour)
    page.write(x + wide / 2, y + CELL / 2, cell.label, colour=ink, align="center")
