"""The picture: one immutable value, which renderers turn into text, SVG or PNG."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cute_sharding.drawing.palette import BLANK, of_device, of_share

# What stands where something is left out.
GAP = ".."


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of a panel: elements that the same devices hold, or what one device sends to another.

    Attributes:
        label: the devices or the amount, as text; :data:`GAP` where something is left out.
        device: the number that makes its colour, or None.
        share: an amount as a share of the largest, which makes its shade, or None.
    """

    label: str
    device: int | None = None
    share: float | None = None

    @property
    def colour(self) -> str:
        if self.device is not None:
            return of_device(self.device)
        return BLANK if self.share is None else of_share(self.share)


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
class Table:
    """Lines of text in columns; those in ``marked`` are what the picture is about."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that belong together: a tensor, or a step of a redistribution."""

    title: str
    panels: tuple[Panel, ...]
    table: Table | None = None
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
        legend: which devices the labels and colours stand for.
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
        >>> print(draw(Sharding((2, 4), (2,), (Shard(1),))).text(40))
        (2, 4) on mesh (mesh0=2) as [S(1)]
        <BLANKLINE>
        down: dim 0 (2)
        across: dim 1 (4), cut by mesh0
           0  1  2  3
        0  0  0  1  1
        1  0  0  1  1
        <BLANKLINE>
         0  device 0 (mesh0=0): holds (2, 2)
         1  device 1 (mesh0=1): holds (2, 2)
        """
        from cute_sharding.drawing.terminal import as_text

        return as_text(self, width, colour)

    def show(self, file: Any = None) -> None:
        """Write the picture to a terminal, or to a text file, as wide as it is. Needs rich.

        In colour where the terminal has colours and NO_COLOR is not set.
        """
        from cute_sharding.drawing.terminal import show

        show(self, file)

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file, by its suffix: .svg, .png, or .txt.

        .svg and .png need matplotlib, .txt needs rich. The same picture makes the same SVG.

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
            ImportError: the library that it takes is not installed.
        """
        from cute_sharding.drawing.figure import SUFFIXES, save

        path = Path(path)
        if path.suffix == ".txt":
            path.write_text(self.text() + "\n", encoding="utf-8")
        elif path.suffix in SUFFIXES:
            save(self, path)
        else:
            raise ValueError(
                f"{str(path)!r} ends in {path.suffix!r}: a picture is written to a file that ends "
                f"in {', '.join(SUFFIXES)} or .txt"
            )
        return path

    def to_dict(self) -> dict[str, Any]:
        """The picture as plain data, for JSON."""
        data = asdict(self)
        for section in data["sections"]:
            if section["table"] is not None:
                section["table"]["marked"] = sorted(section["table"]["marked"])
        return data

    def svg(self) -> str:
        """The picture as the text of an SVG. Needs matplotlib."""
        from cute_sharding.drawing.figure import svg

        return svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        # Notebooks prefer this to the SVG, and a wide picture is then scrolled, not squeezed.
        text = self.svg()
        return f'<div style="overflow-x: auto">{text[text.index("<svg") :]}</div>'

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from cute_sharding.drawing.terminal import renderables

        yield from renderables(self, options.max_width)
