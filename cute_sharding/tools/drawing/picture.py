"""The picture: one immutable value, which shows itself: as lines of styled text of a given width,
by rich; and the same lines as SVG or PNG, by matplotlib. Both libraries are optional: a picture is
made without either.
"""

from __future__ import annotations

import importlib
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cute_sharding._words import columns
from cute_sharding.tools.drawing.palette import ink_on, of_device, of_share
from cute_sharding.tools.files import save

# What stands where something is left out.
GAP = ".."
PURPOSES = {"rich": "on a terminal or as a file", "matplotlib": "as SVG or PNG"}
# Between blocks that stand side by side, and the narrowest text below a panel.
SPACE, NARROW = 4, 40
# Ticks of columns that are longer take two lines.
TICK = 5
# Of an image: columns of text; a character and a line, in points; DejaVu Sans Mono is 0.602 em
# wide. Nothing of the moment or the machine is written into a file.
PAGE, SIZE = 150, 9.0
WIDE, HIGH = 0.602 * SIZE, 1.5 * SIZE
GREY = "#595959"
SETTINGS = {
    "svg.hashsalt": "cute-sharding",
    "svg.fonttype": "none",
    "font.family": "monospace",
    "font.monospace": ["DejaVu Sans Mono"],
    "font.size": SIZE,
    "text.parse_math": False,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of a panel: elements that the same ranks hold, or what one rank sends to another.

    Attributes:
        label: the ranks or the amount, as text; :data:`GAP` where something is left out.
        device: the number that makes its colour, or None.
        share: an amount as a share of the largest, which makes its shade, or None.
    """

    label: str
    device: int | None = None
    share: float | None = None

    @property
    def colour(self) -> str | None:
        """The colour of the box; None where nobody holds anything."""
        if self.device is not None:
            return of_device(self.device)
        return None if self.share is None else of_share(self.share)


@dataclass(frozen=True, slots=True)
class Panel:
    """A grid of cells with labels on its rows and columns, and names for its two axes."""

    title: str
    row_axis: str
    column_axis: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that belong together: a tensor, or a step of a redistribution; and lines of text in
    columns, whose first is the header.
    """

    title: str
    panels: tuple[Panel, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    captions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """A line of the legend: what a label and a colour stand for."""

    label: str
    device: int
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """What :func:`cute_sharding.draw` returns.

    It shows itself in a notebook; ``print`` and :meth:`show` write it to a terminal, :meth:`save`
    to a file.

    Attributes:
        title: what is drawn.
        sections: its parts, in order.
        legend: which ranks the labels and colours stand for.
        captions: what else is to be said: above all what is left out.
    """

    title: str
    sections: tuple[Section, ...]
    legend: tuple[Key, ...] = ()
    captions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        panels = sum(len(section.panels) for section in self.sections)
        return f"<Picture of {self.title}: {panels} panel{'s' * (panels != 1)}>"

    def __str__(self) -> str:
        """The picture as text without colour, 100 columns wide. Needs rich."""
        return self.text()

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        """The picture as text of so many columns; with colour, as ANSI escapes. Needs rich.

        >>> from cute_sharding import draw
        >>> from cute_sharding.sharding import Shard, Sharding
        >>> print(draw(Sharding((2, 4), (2,), (Shard(1),))).text(60))
        (2, 4): [S(1)] on mesh (mesh0=2) of ranks 0, 1
        <BLANKLINE>
        down: dim 0 (2)
        across: dim 1 (4), on mesh0
           0  1  2  3
        0  0  0  1  1
        1  0  0  1  1
        <BLANKLINE>
         0  rank 0 (mesh0=0): holds (2, 2)
         1  rank 1 (mesh0=1): holds (2, 2)
        """
        return as_text(self, width, colour)

    def show(self, file: Any = None) -> None:
        """Write the picture to a terminal, or to a text file, as wide as it is. Needs rich.

        In colour where the terminal has colours and NO_COLOR is not set.
        """
        library("rich.console").Console(file=file).print(self)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file, by its suffix: .svg, .png, or .txt.

        .txt needs rich; .svg and .png also need matplotlib. The same picture makes the same SVG.

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
            ImportError: the library that it takes is not installed.
        """
        forms: dict[str, Callable[[], str | bytes]] = {
            ".svg": lambda: as_image(self, "svg"),
            ".png": lambda: as_image(self, "png"),
            ".txt": lambda: f"{self.text()}\n",
        }
        return save(path, "picture", forms)

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain data, for JSON."""
        return asdict(self)

    def svg(self) -> str:
        """The picture as the text of an SVG. Needs rich and matplotlib."""
        return as_image(self, "svg").decode()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        # Notebooks prefer this to the SVG, and a wide picture is then scrolled, not squeezed.
        text = self.svg()
        return f'<div style="overflow-x: auto">{text[text.index("<svg") :]}</div>'

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from lines_of(self, options.max_width)


def library(name: str) -> Any:
    """A module of rich or matplotlib, by its dotted name.

    Raises:
        ImportError: the library is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        of = name.split(".")[0]
        raise ImportError(
            f"a picture {PURPOSES[of]} needs {of}, which cannot be imported ({error}): run "
            'pip install "cute-sharding[draw]"',
            name=of,
        ) from error


def as_text(picture: Picture, width: int | None, colour: bool | None) -> str:
    """The picture as text of so many columns; None: as standard output takes it."""
    console = library("rich.console").Console
    if colour is None:
        made = console(width=width)
    else:
        made = console(
            width=width,
            force_terminal=colour,
            color_system="truecolor" if colour else None,
            legacy_windows=False,
            _environ={},
        )
    with made.capture() as capture:
        made.print(picture)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def as_image(picture: Picture, kind: str) -> bytes:
    """The picture as an SVG or a PNG: its lines on a page, character by character."""
    matplotlib = library("matplotlib")
    lines = lines_of(picture, PAGE, whole=True)
    wide, high = (max(line.cell_len for line in lines) + 2) * WIDE, (len(lines) + 1) * HIGH
    file = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure = library("matplotlib.figure").Figure(
            figsize=(wide / 72, high / 72), facecolor="white"
        )
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(high, 0))
        axes.set_axis_off()
        boxes: dict[str, list[Any]] = {}
        for i, line in enumerate(lines):
            _put_line(axes, boxes, line, (i + 0.5) * HIGH)
        path = library("matplotlib.path").Path
        for colour, paths in boxes.items():  # one path for all boxes of a colour: a small file
            patch = library("matplotlib.patches").PathPatch
            whole = path.make_compound_path(*paths)
            axes.add_patch(patch(whole, facecolor=colour, edgecolor="white", linewidth=0.8))
        metadata = {"Title": picture.title, **({"Date": None} if kind == "svg" else {})}
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
    return file.getvalue()


def _put_line(axes: Any, boxes: dict[str, list[Any]], line: Any, y: float) -> None:
    """Text of one style after the other, at the places of its words: an SVG may be shown in another
    font.
    """
    right = WIDE
    for text, style, _ in line.render(library("rich.console").Console(width=PAGE)):
        left, right = right, right + len(text) * WIDE
        if style is not None and style.bgcolor is not None:
            below = y + HIGH
            corners = [(left, y), (right, y), (right, below), (left, below), (left, y)]
            made = library("matplotlib.path").Path(corners, closed=True)
            boxes.setdefault(style.bgcolor.name, []).append(made)
        soft = style is not None and (style.dim or style.italic)
        for words in re.finditer(r"\S+( \S+)*", text):
            axes.text(
                *(round(left + words.start() * WIDE, 2), round(y + 0.72 * HIGH, 2), words[0]),
                color=style.color.name if style and style.color else GREY if soft else "#000000",
                fontweight="bold" if style and style.bold else "normal",
            )


def lines_of(picture: Picture, width: int, *, whole: bool = False) -> list[Any]:
    """The lines of a picture, as rich Texts. Unless ``whole``, columns of panels that do not fit
    into ``width`` are left out.
    """
    lines = _wrapped(picture.title, width, "bold")
    lines += _flowed([_section(section, width, whole) for section in picture.sections], width)
    if picture.legend:
        lines.append(_text())
        each = max(len(key.label) for key in picture.legend)
        for key in picture.legend:
            for i, part in enumerate(textwrap.wrap(key.text, max(width - each - 3, 20))):
                line = _text(" " * (each + 2)) if i else _text()
                if not i:
                    _append(line, key.label, of_device(key.device), each)
                lines.append(line.append(f" {part}"))
    if picture.captions:
        lines.append(_text())
        for caption in picture.captions:
            lines += _wrapped(caption, width)
    return lines


def _section(section: Section, width: int, whole: bool) -> list[Any]:
    lines = _wrapped(section.title, width, "bold") if section.title else []
    if section.panels:
        flowed = _flowed([_panel(panel, width, whole) for panel in section.panels], width)
        lines += flowed if section.title else flowed[1:]
    if section.table:
        header, *rows = columns(section.table)
        lines += [_text(), _text(header, "dim"), *map(_text, rows)]
    most = max([NARROW, *(line.cell_len for line in lines)])
    for caption in section.captions:
        lines += _wrapped(caption, min(width, most), "italic")
    return lines


def _panel(panel: Panel, width: int, whole: bool) -> list[Any]:
    lines = [_text(panel.title, "bold")] if panel.title else []
    across = f"across: {panel.column_axis}" if panel.row_axis else panel.column_axis
    for axis in ([f"down: {panel.row_axis}"] if panel.row_axis else []) + [across]:
        lines += _wrapped(axis, width)
    ticks = [
        text.replace(":", ":\n").split("\n") if len(text) > TICK else [text]
        for text in panel.columns
    ]
    labels = [cell.label for row in panel.cells for cell in row]
    each = max(map(len, [*labels, *(part for tick in ticks for part in tick)]))
    tall = max(map(len, ticks))
    margin = max(map(len, panel.rows))
    room = max(2, (width - margin - 1) // (each + 2))
    shown, hidden = [*range(len(ticks))], []
    if len(shown) > room and not whole:
        shown, hidden = [*shown[: room - 2], shown[-1]], shown[room - 2 : -1]
    for level in range(tall) if any(panel.columns) else ():
        line = _text(" " * (margin + 1))
        for j in shown:
            tick = [""] * (tall - len(ticks[j])) + ticks[j]
            line.append(f" {tick[level]:^{each}} ", style="dim")
        lines.append(line)
    for label, cells in zip(panel.rows, panel.cells):
        line = _text(f"{label:>{margin}} ", "dim")
        for j in shown:
            _append(line, cells[j].label, cells[j].colour, each)
        lines.append(line)
    if hidden:
        first, last = panel.columns[hidden[0]], panel.columns[hidden[-1]]
        text = f"columns {first} to {last} are not shown: the terminal is {width} wide"
        lines += _wrapped(text, width, "italic")
    return lines


def _append(line: Any, label: str, colour: str | None, width: int) -> None:
    style = "" if colour is None else f"{ink_on(colour)} on {colour}".lower()
    line.append(f" {label:^{width}} ", style=style)


def _flowed(blocks: Sequence[list[Any]], width: int) -> list[Any]:
    """Blocks of lines side by side as far as they fit, and then below, after an empty line."""
    rows: list[list[list[Any]]] = []
    for block in blocks:
        if rows and sum(map(_width, [*rows[-1], block])) + SPACE * len(rows[-1]) <= width:
            rows[-1].append(block)
        else:
            rows.append([block])
    lines = []
    for row in rows:
        lines.append(_text())
        for i in range(max(map(len, row))):
            line = _text()
            for block in row:
                part = block[i] if i < len(block) else _text()
                line.append_text(part)
                if block is not row[-1]:
                    line.append(" " * (_width(block) + SPACE - part.cell_len))
            lines.append(line)
    return lines


def _width(block: Sequence[Any]) -> int:
    return max((line.cell_len for line in block), default=0)


def _wrapped(text: str, width: int, style: str = "") -> list[Any]:
    return [_text(line, style) for line in textwrap.wrap(text, max(width, 20)) or [""]]


def _text(text: str = "", style: str = "") -> Any:
    # The style is a span: a Text's own would go on to whatever is appended.
    made = library("rich.text").Text(no_wrap=True, overflow="crop")
    return made.append(text, style=style)
