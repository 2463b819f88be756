"""Who holds what, as panels: grids of the last two dims, one for each run of rows of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, product
from math import prod

from cute_sharding.sharding.digits import digits
from cute_sharding.tools.drawing.holding import Holding
from cute_sharding.tools.drawing.owners import OwnedRows, runs_shown
from cute_sharding.tools.drawing.parts import GAP, Cell, Key, Panel

# The most that is shown: rows and columns of a grid, of one of several grids, and grids; runs of a
# leading dim; lines of the legend.
ROWS, COLUMNS = 16, 24
SMALL_ROWS, SMALL_COLUMNS = 8, 16
PANELS, LEADING = 6, 4
KEYS = 16


def panels_of(holding: Holding) -> tuple[tuple[Panel, ...], tuple[str, ...]]:
    """The panels of a tensor, and what is left out of them, in words.

    There are at most ``PANELS`` of ``ROWS`` by ``COLUMNS`` cells, however large the tensor and
    the mesh.
    """
    ndim = len(holding.shape)
    if not prod(holding.shape):
        return (), ("no elements: nobody holds any",)
    small = ndim > 2
    shown: list[list[OwnedRows]] = []
    for dim, n in enumerate(holding.shape):
        if dim < ndim - 2:
            most = PANELS if ndim == 3 else LEADING
            shown.append(runs_shown(n, holding.cuts_of(dim), most, singly=False))
            continue
        most = (
            (SMALL_COLUMNS if small else COLUMNS)
            if dim == ndim - 1
            else (SMALL_ROWS if small else ROWS)
        )
        shown.append(runs_shown(n, holding.cuts_of(dim), most, singly=True))
    captions = [
        text
        for dim, runs in enumerate(shown)
        for run in runs
        if (text := _left_out(holding, dim, run))
    ]
    leading = shown[: max(ndim - 2, 0)]
    kept = [[run for run in runs if run.owner is not None] for runs in leading]
    count = prod(map(len, kept))
    panels = tuple(
        _panel(holding, before, shown[max(ndim - 2, 0) :])
        for before in islice(product(*kept), PANELS)
    )
    if count > PANELS:
        captions.append(f"{PANELS} of {count} panels are shown; the others are left out")
    return panels, tuple(captions)


def panels_of_elements(
    shape: tuple[int, ...], holding: Holding, element: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> tuple[Panel, ...]:
    """The panels of a tensor of ``shape`` that has the elements of ``holding`` in other places, one
    cell for each; none where they are too many.

    Args:
        shape: its shape.
        holding: who holds the elements.
        element: from a place in ``shape`` to the place in the tensor that is held.
    """
    ndim = len(shape)
    most = (SMALL_ROWS, SMALL_COLUMNS) if ndim > 2 else (ROWS, COLUMNS)
    rows, columns = (1, 1, *shape)[-2:]
    leading = shape[: max(ndim - 2, 0)]
    if not prod(shape) or prod(leading) > PANELS or rows > most[0] or columns > most[1]:
        return ()
    panels = []
    for at in product(*map(range, leading)):
        cells = []
        for place in product(range(rows), range(columns)):
            fixed = holding.holders(element((*at, *place[2 - min(ndim, 2) :])))
            cells.append(Cell(holding.label(fixed), holding.device(fixed)))
        panels.append(
            Panel(
                title=f"[{', '.join([*map(str, at), ':', ':'])}]" if at else "",
                row_axis=f"dim {ndim - 2} ({rows})" if ndim > 1 else "",
                column_axis=f"dim {ndim - 1} ({columns})" if ndim else "a scalar",
                rows=tuple(map(str, range(rows))) if ndim > 1 else ("",),
                columns=tuple(map(str, range(columns))) if ndim else ("",),
                cells=tuple(tuple(cells[i * columns : (i + 1) * columns]) for i in range(rows)),
            )
        )
    return tuple(panels)


def legend_of(
    holding: Holding, after: Holding | None = None
) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """A line for each set of devices that hold the same, of a tensor or of one before and after a
    change; of very many the first ones and the last, and which are left out, in words.
    """
    sides = {"before": holding} if after is None else {"before": holding, "after": after}
    return legend_of_sides(sides)


def legend_of_sides(sides: dict[str, Holding]) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """As :func:`legend_of`, of tensors by what each is called."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    colours: dict[tuple[str, str], int] = {}
    left_out: dict[str, None] = {}
    for side, of in sides.items():
        groups = of.groups
        for number in range(groups) if groups <= KEYS else [*range(KEYS - 1), groups - 1]:
            fixed = of.group(number)
            key = of.label(fixed), of.who(fixed)
            lines.setdefault(key, {})[side] = of.what(fixed)
            colours.setdefault(key, of.device(fixed))
        if groups > KEYS:
            left_out[_left_out_of_legend(of)] = None
    keys = tuple(
        Key(label, colours[label, who], f"{who}: {_held(shapes, sides)}")
        for (label, who), shapes in lines.items()
    )
    return keys, tuple(left_out)


def _held(shapes: dict[str, str], sides: dict[str, Holding]) -> str:
    if len(shapes) == len(sides):
        return "holds " + ", then ".join(dict.fromkeys(shapes.values()))
    ((side, shape),) = shapes.items()
    return f"{side}, holds {shape}"


def _left_out_of_legend(holding: Holding) -> str:
    groups = holding.groups
    word = holding.word
    in_a_row = holding.ranks is None or isinstance(holding.ranks, range)
    if in_a_row and not holding.replicated and not holding.pending:
        first, last = (holding.number(n) for n in (KEYS - 1, groups - 2))
        return f"{word}s {first} to {last} of {groups} are left out of the legend"
    return (
        f"of {groups} sets of {word}s that hold the same, the first {KEYS - 1} and the last are in "
        "the legend; the others are left out"
    )


def _left_out(holding: Holding, dim: int, run: OwnedRows) -> str | None:
    if run.owner is not None:
        return None
    n = holding.shape[dim]
    # Where the rows are a layout, it says of the rest what it says of the first ones.
    regular = digits(n, holding.chains[dim], holding.mesh) is not None
    how = "go on alike" if regular else "are left out"
    return f"dim {dim}: rows {run.start} to {run.stop - 1} of {n} {how}"


def _panel(
    holding: Holding, before: tuple[OwnedRows, ...], shown: Sequence[list[OwnedRows]]
) -> Panel:
    """The grid of the last two dims at those runs of rows of the others."""
    ndim = len(holding.shape)
    rows = shown[0] if ndim > 1 else [OwnedRows(0, 1, ())]
    columns = shown[-1] if ndim else [OwnedRows(0, 1, ())]
    fixed: dict[int, int] = {}
    for dim, run in enumerate(before):
        fixed |= holding.owner(dim, run.owner or ())
    cells = []
    for row in rows:
        line = []
        for column in columns:
            if row.owner is None or column.owner is None:
                line.append(Cell(GAP))
                continue
            at = dict(fixed)
            if ndim > 1:
                at |= holding.owner(ndim - 2, row.owner)
            if ndim:
                at |= holding.owner(ndim - 1, column.owner)
            line.append(Cell(holding.label(at), holding.device(at)))
        cells.append(tuple(line))
    where = [_rows_text(run) for run in before]
    return Panel(
        title=f"[{', '.join([*where, ':', ':'])}]" if before else "",
        row_axis=_axis(holding, ndim - 2) if ndim > 1 else "",
        column_axis=_axis(holding, ndim - 1) if ndim else "a scalar",
        rows=tuple(_rows_text(run) for run in rows) if ndim > 1 else ("",),
        columns=tuple(_rows_text(run) for run in columns) if ndim else ("",),
        cells=tuple(cells),
    )


def _axis(holding: Holding, dim: int) -> str:
    return f"dim {dim} ({holding.shape[dim]}){holding.cut_text(dim)}"


def _rows_text(run: OwnedRows) -> str:
    if run.owner is None:
        return GAP
    return str(run.start) if run.stop - run.start == 1 else f"{run.start}:{run.stop}"
