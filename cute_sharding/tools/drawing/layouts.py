"""A layout as a picture: the value at each coordinate."""

from __future__ import annotations

from itertools import islice, product
from math import prod
from typing import Any

from cute_sharding.layout import Layout, LayoutError
from cute_sharding.layout.symbolic import is_static
from cute_sharding.tools.drawing.grids import COLUMNS, PANELS, ROWS, SMALL_COLUMNS, SMALL_ROWS
from cute_sharding.tools.drawing.parts import GAP, Cell, Panel, Section
from cute_sharding.tools.drawing.picture import Picture


def layout_picture(layout: Layout) -> Picture:
    """The value of a layout at each coordinate: its last two modes as a grid, coloured by the index
    into its first mode, which in a layout of a sharding are the devices.

    Raises:
        LayoutError: a size or a stride is a symbol.
    """
    if not all(is_static(n) for leaf in layout.leaves for n in leaf):
        raise LayoutError(
            f"{layout!r} has symbols, but a picture can show only numbers: replace the symbols by "
            "numbers"
        )
    title = f"layout {layout!r}"
    modes = tuple(layout)
    if not prod(mode.size for mode in modes):
        return Picture(title, (Section("", (), captions=("the layout has no coordinates",)),))
    small = len(modes) > 2
    limits = [LEADING_MODE] * (len(modes) - 2)
    limits += [SMALL_ROWS if small else ROWS] if len(modes) > 1 else []
    limits += [SMALL_COLUMNS if small else COLUMNS] if modes else []
    shown, captions = [], []
    for m, (mode, most) in enumerate(zip(modes, limits)):
        indices = _indices(int(mode.size), most)
        shown.append(indices)
        if None in indices:
            first, last = most - 1, int(mode.size) - 2
            captions.append(f"mode {m}: indices {first} to {last} of {mode.size} are left out")
    leading = [[i for i in indices if i is not None] for indices in shown[:-2]]
    count = prod(map(len, leading))
    panels = tuple(_panel(modes, at, shown[-2:]) for at in islice(product(*leading), PANELS))
    if count > PANELS:
        captions.append(f"{PANELS} of {count} panels are shown; the others are left out")
    return Picture(title, (Section("", panels, captions=tuple(captions)),))


# Indices of a mode before the last two that are shown.
LEADING_MODE = 3


def _indices(n: int, most: int) -> list[int | None]:
    """All indices of a mode, or the first ones, None for those left out, and the last."""
    return [*range(n)] if n <= most else [*range(most - 1), None, n - 1]


def _panel(modes: tuple[Layout, ...], at: tuple[int, ...], shown: list[Any]) -> Panel:
    two = len(modes) > 1
    rows = shown[0] if two else [0]
    columns = shown[-1] if modes else [0]
    cells = []
    for i in rows:
        line = []
        for j in columns:
            if i is None or j is None:
                line.append(Cell(GAP))
                continue
            index = (*at, *((i,) if two else ()), *((j,) if modes else ()))
            value = sum(int(mode(c)) for mode, c in zip(modes, index))
            line.append(Cell(str(value), device=index[0] if index else 0))
        cells.append(tuple(line))
    return Panel(
        title=f"[{', '.join([*map(str, at), ':', ':'])}]" if at else "",
        row_axis=_axis(modes, len(modes) - 2) if two else "",
        column_axis=_axis(modes, len(modes) - 1) if modes else "",
        rows=tuple(_text(i) for i in rows) if two else ("",),
        columns=tuple(_text(j) for j in columns) if modes else ("",),
        cells=tuple(cells),
    )


def _axis(modes: tuple[Layout, ...], m: int) -> str:
    return f"mode {m}, {modes[m]!r}"


def _text(index: int | None) -> str:
    return GAP if index is None else str(index)
