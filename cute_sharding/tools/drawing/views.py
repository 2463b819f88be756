"""Before and after a view, with the modes that moved marked."""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.layout import Layout, LayoutError
from cute_sharding.propagation.views import carry, cheapest, parts_that_do_not_divide
from cute_sharding.relations.view import View
from cute_sharding.sharding import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    format_placements,
)
from cute_sharding.tools.drawing.devices import coordinate
from cute_sharding.tools.drawing.grids import legend_of, panels_of, panels_of_elements
from cute_sharding.tools.drawing.holding import Holding, title_of
from cute_sharding.tools.drawing.parts import Panel, Section, Table
from cute_sharding.tools.drawing.picture import Picture

MOVED = "*"


def view_picture(before: Sharding, view: View, names: tuple[str, ...], what: str) -> Picture:
    """Who holds what before and after a view; where it is not free, before it, what blocks it, and
    the placements that would make it free.
    """
    holding = Holding.of(before, names)
    carried = carry(view, before.cuts, before.mesh)
    title = f"{what} of {title_of(before, holding)}"
    if carried.blocked is not None:
        keys, left_out = legend_of(holding)
        panels, captions = panels_of(holding)
        sections = [Section(f"before: {_side(before)}", panels, captions=captions)]
        if would := _would_hold(view, holding):
            said = ("what each device would hold: no placements say so",)
            sections.append(Section(f"after: {view.output_shape}", would, captions=said))
        why = _why_not(before, view, carried.blocked, names)
        return Picture(title, tuple(sections), keys, (*left_out, *why))
    after = Sharding(view.output_shape, before.mesh, replaced(before.placements, carried.cuts))
    keys, left_out = legend_of(holding, Holding.of(after, names))
    sections = [
        _section(name, side, other, names)
        for name, side, other in (("before", before, after), ("after", after, before))
    ]
    captions = ("free: no element moves between devices",)
    if any(section.table is not None and section.table.marked for section in sections):
        captions += (f"{MOVED} marks the modes that moved: another dim, or another stride",)
    return Picture(title, tuple(sections), keys, (*left_out, *captions))


def replaced(
    placements: Sequence[Placement], cuts: Sequence[tuple[int, int] | None]
) -> tuple[Placement, ...]:
    """The placements of the cuts; a pending reduction stays."""
    return tuple(
        Shard(*cut) if cut is not None else p if isinstance(p, Partial) else Replicate()
        for p, cut in zip(placements, cuts)
    )


def _side(sharding: Sharding) -> str:
    return f"{sharding.shape} as {format_placements(sharding.placements)}"


def _section(name: str, side: Sharding, other: Sharding, names: tuple[str, ...]) -> Section:
    panels, captions = panels_of(Holding.of(side, names))
    table, more = _modes(side, other, names)
    return Section(f"{name}: {_side(side)}", panels, table, (*captions, *more))


def _modes(
    side: Sharding, other: Sharding, names: tuple[str, ...]
) -> tuple[Table, tuple[str, ...]]:
    """The modes of a sharding's layout, whose each is, and those that the other side has not."""
    rows: list[tuple[str, ...]] = []
    marked = set()
    mine, others = _layout(side), _layout(other)
    captions: tuple[str, ...] = ()
    if mine is None:
        captions = ("no layout: blocks differ in size, or begin in an earlier split",)
    for m, (name, placement) in enumerate(zip(names, side.placements)):
        mode = "-" if mine is None else repr(mine[0][m])
        moved = placement != other.placements[m]
        if mine is not None and others is not None:
            moved |= mine[0][m] != others[0][m]
        if moved:
            marked.add(len(rows))
        rows.append((MOVED if moved else "", name, mode, str(placement)))
    if mine is not None:
        # A local mode moved where the other side has none like it.
        there = [] if others is None else list(others[1])
        for dim, local in enumerate(mine[1]):
            moved = others is not None and local not in there
            if moved:
                marked.add(len(rows))
            else:
                there = _without(there, local)
            rows.append((MOVED if moved else "", "local", repr(local), f"dim {dim}"))
    return Table(("", "whose", "mode", "placed"), tuple(rows), frozenset(marked)), captions


def _without(modes: list[Layout], mode: Layout) -> list[Layout]:
    if mode not in modes:
        return modes
    at = modes.index(mode)
    return [*modes[:at], *modes[at + 1 :]]


def _layout(sharding: Sharding) -> Layout | None:
    try:
        return sharding.layout
    except LayoutError:
        return None


def _would_hold(view: View, holding: Holding) -> tuple[Panel, ...]:
    """The output, if it is small, with who holds each element of it."""
    shape = view.output_shape
    if len(view.target) != len(shape):
        return ()  # an element of the output is several of the input

    def element(place: tuple[int, ...]) -> tuple[int, ...]:
        index = 0
        for c, n in zip(place, shape):
            index = index * n + c
        # A flat index is a number in the tensor's shape, as a device's is in the mesh.
        return coordinate(holding.shape, int(view.layout(index)))

    return panels_of_elements(shape, holding, element)


def _why_not(before: Sharding, view: View, blocked: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """What blocks the view, and where to redistribute first."""
    fixed = [m for m, p in enumerate(before.placements) if isinstance(p, Partial)]
    split = parts_that_do_not_divide(view, before.cuts, before.mesh, blocked)
    lines = [
        f"not free: no Shard or _StridedShard of the output, {view.output_shape}, gives the "
        f"devices of {names[blocked]} the elements that {before.placements[blocked]} gives them"
    ]
    if split:
        lines.append(split)
    target = cheapest(view, before.cuts, before.mesh, fixed=fixed)
    source, output = (
        format_placements(replaced(before.placements, cuts))
        for cuts in (target.source, target.output)
    )
    lines.append(
        f"redistributed to {source} first, it is free, as {output}: a device receives up to "
        f"{target.received} elements"
    )
    return tuple(lines)
