"""Tilers of a layout, and operations applied mode by mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from cute_sharding._words import counted
from cute_sharding.layout.errors import LayoutError
from cute_sharding.layout.layout import Layout, make_layout

Tiler: TypeAlias = "Layout | int | Sequence[Tiler] | None"
"""A tiler of a layout: a layout, an int n for the layout n:1, None for "leave this mode", or a
tuple of tilers, one for each mode.

>>> tiler: Tiler = (2, None)
>>> logical_divide(Layout((4, 16)), tiler)
((2,2),16):((16,32),1)
"""


def by_mode(
    operation: Callable[[Layout, Tiler], Layout], a: Layout, tiler: Sequence[Tiler]
) -> Layout:
    """Apply ``operation`` to each mode with its tiler; a mode with no tiler or None stays."""
    if a.rank < len(tiler):
        raise LayoutError(
            f"the tiler {tiler} has {counted(len(tiler), 'entry', 'entries')}, but {a!r} has only "
            f"{counted(a.rank, 'mode')}: give at most one entry for each mode"
        )
    modes = tuple(a)
    return make_layout(
        *(m if t is None else operation(m, t) for m, t in zip(modes, tiler, strict=False)),
        *modes[len(tiler) :],
    )


def unzip(operation: Callable[[Layout, Tiler], Layout], a: Layout, tiler: Tiler) -> Layout:
    """Apply ``operation`` mode by mode; gather the first halves in mode 0, the second in mode 1."""
    if tiler is None:
        return make_layout(Layout(1, 0), a)
    if not isinstance(tiler, (tuple, list)):
        return operation(a, tiler)
    if a.rank < len(tiler):
        raise LayoutError(
            f"the tiler {tiler} has {counted(len(tiler), 'entry', 'entries')}, but {a!r} has only "
            f"{counted(a.rank, 'mode')}: give at most one entry for each mode"
        )
    modes = tuple(a)
    split = [unzip(operation, m, t) for m, t in zip(modes, tiler, strict=False)]
    return make_layout(
        make_layout(*(s[0] for s in split)),
        make_layout(*(s[1] for s in split), *modes[len(tiler) :]),
    )
