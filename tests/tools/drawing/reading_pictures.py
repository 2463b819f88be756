"""A picture read back: which devices each of its cells says hold which elements."""

from __future__ import annotations

import re
from itertools import product

from cute_sharding.tools.drawing.picture import GAP


def devices_of(picture, mesh, names):
    """The devices that each label stands for, by the coordinates that the legend gives: the others
    are any.
    """
    meant = {}
    for key in picture.legend:
        fixed = {name: int(c) for name, c in re.findall(r"(\w+)=(\d+)", key.text)}
        meant[key.label] = {
            rank
            for rank, device in enumerate(product(*map(range, mesh)))
            if all(device[names.index(name)] == c for name, c in fixed.items())
        }
    return meant


def rows_of(tick):
    start, _, stop = tick.partition(":")
    return range(int(start), int(stop) if stop else int(start) + 1)


def elements_of(panel, ndim):
    """(elements, label) for each cell that stands for elements."""
    leading = panel.title.strip("[]").split(", ")[:-2] if panel.title else []
    before = [rows_of(tick) for tick in leading]
    for row, cells in zip(panel.rows, panel.cells, strict=True):
        for column, cell in zip(panel.columns, cells, strict=True):
            if cell.label == GAP:
                continue
            ticks = [row, column][2 - min(ndim, 2) :]
            yield product(*before, *map(rows_of, ticks)), cell.label


def holders(section, meant, ndim):
    """Of each element that is drawn, the devices that hold it."""
    found = {}
    for panel in section.panels:
        for elements, label in elements_of(panel, ndim):
            for element in elements:
                assert element not in found, f"{element} is drawn twice"
                # With very many sets of devices the legend leaves some out: those of one device
                # are their numbers.
                found[element] = meant[label] if label in meant else {int(label)}
    return found
