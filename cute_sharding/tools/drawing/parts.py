"""What a picture is made of: immutable values, which renderers turn into text, SVG or PNG."""

from __future__ import annotations

from dataclasses import dataclass

from cute_sharding.tools.drawing.palette import BLANK, of_device, of_share

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
class Contents:
    """All that a renderer is given of a picture.

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
