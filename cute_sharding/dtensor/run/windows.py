"""What a device computes alone if rows of a tensor are not the rows of the exchange one for one
(relations/forms.py): windows, folds and diagonals, and their sums back to the rows; triangles of
matrices of which it has some rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_sharding.exchange.meetings import Side
from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.rows import Rows, held_rows
from cute_sharding.sharding.meeting import Runs, count_rows, rows_held


def collapse(local: torch.Tensor, rows: Rows, side: Side) -> torch.Tensor:
    """An operand's local tensor with the exchange's rows: for windows and folds the sum of their
    rows, for a diagonal its elements (a view if the device has consecutive rows and columns).
    """
    assert rows.dim is not None and rows.form is not None
    return _COLLAPSED[type(rows.form)](local, rows, side)


def expand(local: torch.Tensor, rows: Rows, side: Side) -> torch.Tensor:
    """A result's local tensor from the exchange's rows: windows (a view if they begin one step
    apart), folds, or a diagonal among zeros.
    """
    assert rows.dim is not None and rows.form is not None
    return _EXPANDED[type(rows.form)](local, rows, side)


def _held(side: Side) -> list[Runs]:
    return list(map(rows_held, side.sizes, side.chains))


def _places(wanted: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The local positions of the rows with these numbers, on a device with the rows ``runs``."""
    numbers, order = _numbers(runs, wanted.device).sort()
    return order[torch.searchsorted(numbers, wanted)]


# -- windows, and folds ----------------------------------------------------------------------------


def _of_windows(rows: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Window)
    dim, window, (windows, within) = of.dim, of.form, _held(side)
    counts = count_rows(windows), count_rows(within)
    if 0 in counts:
        return rows.new_empty((*rows.shape[:dim], counts[0], *rows.shape[dim + 1 :], counts[1]))
    step = window.evenly(windows, within)
    if step is not None:
        return rows.unfold(dim, counts[1], step)
    index = _index_of_windows(windows, within, window, held_rows(of, *side), rows.device)
    taken = rows.index_select(dim, index.reshape(-1))
    return taken.unflatten(dim, tuple(index.shape)).movedim(dim + 1, -1).contiguous()


def _sum_of_windows(local: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Window)
    dim, window, (windows, within) = of.dim, of.form, _held(side)
    shape = list(local.shape[:-1])
    shape[dim] = count_rows(held_rows(of, *side))
    if 0 in local.shape:
        return local.new_zeros(shape)
    step = window.evenly(windows, within)
    if step is not None:
        return torch.ops.aten.unfold_backward(local, shape, dim, count_rows(within), step)
    index = _index_of_windows(windows, within, window, held_rows(of, *side), local.device)
    flat = local.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return local.new_zeros(shape).index_add_(dim, index.reshape(-1), flat)


def _index_of_windows(
    windows: Runs, within: Runs, window: Window, rows: Runs, device: torch.device
) -> torch.Tensor:
    """For each window, the local positions of its rows."""
    numbers = _numbers(windows, device).unsqueeze(-1) * window.step + _numbers(within, device)
    return _places(numbers, rows)


def _index_of_fold(of: Rows, side: Side, device: torch.device) -> torch.Tensor:
    """For each row of a fold, the local position of the row that it is taken from."""
    assert isinstance(of.form, Fold)
    numbers = _numbers(_held(side)[0], device)
    found = torch.zeros_like(numbers)
    for start, stop, a, b in of.form.pieces:
        found = torch.where((numbers >= start) & (numbers < stop), numbers * a + b, found)
    return _places(found, held_rows(of, *side))


def _of_fold(rows: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None
    return rows.index_select(of.dim, _index_of_fold(of, side, rows.device))


def _sum_of_fold(local: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None
    shape = list(local.shape)
    shape[of.dim] = count_rows(held_rows(of, *side))
    index = _index_of_fold(of, side, local.device)
    return local.new_zeros(shape).index_add_(of.dim, index, local)


# -- diagonals, and triangles ----------------------------------------------------------------------


def _offset(form: Diagonal, side: Side) -> int | None:
    """The number of the diagonal in the local tensor; None if the device's rows have gaps."""
    firsts = []
    for some in _held(side):
        if len(some) > 1 or any(run.loops for run in some):
            return None
        firsts.append(some[0].x if some else 0)
    return form.right - form.down + firsts[0] - firsts[1]


def _crossings(of: Rows, side: Side, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The local positions of a diagonal's elements, in both dims."""
    assert isinstance(of.form, Diagonal)
    numbers = _numbers(held_rows(of, *side), device)
    rows, columns = _held(side)
    return _places(numbers + of.form.down, rows), _places(numbers + of.form.right, columns)


def _of_diagonal(local: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Diagonal)
    place = of.dim - (of.form.across < of.dim)
    offset = _offset(of.form, side)
    if offset is not None:
        return local.diagonal(offset, of.dim, of.form.across).movedim(-1, place)
    matrices = local.movedim((of.dim, of.form.across), (0, 1))
    return matrices[_crossings(of, side, local.device)].movedim(0, place)


def _into_diagonal(rows: torch.Tensor, of: Rows, side: Side) -> torch.Tensor:
    assert of.dim is not None and isinstance(of.form, Diagonal)
    place = of.dim - (of.form.across < of.dim)
    sizes = [count_rows(some) for some in _held(side)]
    elements = rows.movedim(place, 0)
    result = rows.new_zeros((*sizes, *elements.shape[1:]))
    offset = _offset(of.form, side)
    if offset is not None:
        result.diagonal(offset).copy_(elements.movedim(0, -1))
    else:
        result[_crossings(of, side, rows.device)] = elements
    return result.movedim((0, 1), (of.dim, of.form.across)).contiguous()


def put_diagonal(local: torch.Tensor, elements: torch.Tensor, of: Rows, side: Side) -> None:
    """Write the elements of a diagonal, from :func:`collapse`, to their places. If they are a view
    of the local tensor, nothing is left to do.
    """
    assert of.dim is not None and isinstance(of.form, Diagonal)
    if _offset(of.form, side) is None:
        place = of.dim - (of.form.across < of.dim)
        matrices = local.movedim((of.dim, of.form.across), (0, 1))
        matrices[_crossings(of, side, local.device)] = elements.movedim(place, 0)


def triangle_of(
    matrices: torch.Tensor, is_lower: bool, diagonal: int, rows: Runs, columns: Runs
) -> torch.Tensor:
    """The tril or triu of matrices of which a device has these rows and columns."""
    if all(len(some) <= 1 and not any(run.loops for run in some) for some in (rows, columns)):
        below = (rows[0].x if rows else 0) - (columns[0].x if columns else 0)
        return (matrices.tril if is_lower else matrices.triu)(diagonal + below)
    above = _numbers(columns, matrices.device) - _numbers(rows, matrices.device).unsqueeze(-1)
    return matrices.masked_fill(above > diagonal if is_lower else above < diagonal, 0)


def _numbers(rows: Runs, device: torch.device) -> torch.Tensor:
    """The global number of each row, in the device's order."""
    numbers = torch.empty(count_rows(rows), dtype=torch.int64, device=device)
    for run in rows:
        x, y = (torch.full((), start, device=device) for start in (run.x, run.y))
        for count, dx, dy in (*run.loops, (run.length, 1, 1)):
            turns = torch.arange(count, device=device)
            x, y = x.unsqueeze(-1) + turns * dx, y.unsqueeze(-1) + turns * dy
        numbers[y.reshape(-1)] = x.reshape(-1)
    return numbers


_Local = Callable[[torch.Tensor, Rows, Side], torch.Tensor]
_COLLAPSED: dict[type, _Local] = {
    Window: _sum_of_windows,
    Fold: _sum_of_fold,
    Diagonal: _of_diagonal,
}
_EXPANDED: dict[type, _Local] = {Window: _of_windows, Fold: _of_fold, Diagonal: _into_diagonal}
