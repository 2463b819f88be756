"""What devices do by themselves: windows of the rows that theirs are made of, each once, and back
to their sum; triangles of matrices of which they have some rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_sharding.movement.rows import Window, beginnings, spans
from cute_sharding.redistribution.meeting import Chain, Run, Runs, count_rows, rows_held


def windows_of(rows: torch.Tensor, dim: int, n: int, chain: Chain, window: Window) -> torch.Tensor:
    """The windows that a device holds; their rows are a last dim. A view, where they begin one step
    apart.

    Args:
        rows: what they are made of, in ``dim``.
        n: the number of all windows.
        chain: how these are cut, with the device's coordinates.
    """
    held = rows_held(n, chain)
    begin = beginnings(held, window)
    step = _step(begin)
    if step is not None:
        return rows.unfold(dim, window.size, step)
    if not begin:
        shape = (*rows.shape[:dim], 0, *rows.shape[dim + 1 :], window.size)
        return rows.new_empty(shape)
    index = _index(begin, window, rows.device)
    taken = rows.index_select(dim, index.reshape(-1))
    return taken.unflatten(dim, tuple(index.shape)).movedim(dim + 1, -1).contiguous()


def sum_of_windows(
    windows: torch.Tensor, dim: int, n: int, chain: Chain, window: Window
) -> torch.Tensor:
    """Of each row that some of a device's windows are made of, the sum of what these have."""
    held = rows_held(n, chain)
    begin = beginnings(held, window)
    shape = list(windows.shape[:-1])
    shape[dim] = count_rows(spans(held, window))
    step = _step(begin)
    if step is not None:
        return torch.ops.aten.unfold_backward(windows, shape, dim, window.size, step)
    result = windows.new_zeros(shape)
    if not begin:
        return result
    index = _index(begin, window, windows.device)
    return result.index_add_(
        dim, index.reshape(-1), windows.movedim(-1, dim + 1).flatten(dim, dim + 1)
    )


def _step(begin: Sequence[Run]) -> int | None:
    """How far apart windows begin, the first at row 0; None where that differs."""
    if len(begin) != 1 or begin[0].x or begin[0].y:
        return None
    (run,) = begin
    if not run.loops:
        return 1
    if len(run.loops) == 1 and run.length == 1 and run.loops[0][1] == 1:
        return run.loops[0][2]
    return None


def _index(begin: Runs, window: Window, device: torch.device) -> torch.Tensor:
    """For each window the rows that it is made of."""
    first = _numbers(tuple([run.flipped() for run in begin]), device)
    return first.unsqueeze(-1) + torch.arange(window.size, device=device)


def triangle_of(
    matrices: torch.Tensor, is_lower: bool, diagonal: int, rows: Runs, columns: Runs
) -> torch.Tensor:
    """tril or triu of the matrices of which a device has these rows and columns."""
    if all(len(some) <= 1 and not any(run.loops for run in some) for some in (rows, columns)):
        below = (rows[0].x if rows else 0) - (columns[0].x if columns else 0)
        return (matrices.tril if is_lower else matrices.triu)(diagonal + below)
    above = _numbers(columns, matrices.device) - _numbers(rows, matrices.device).unsqueeze(-1)
    return matrices.masked_fill(above > diagonal if is_lower else above < diagonal, 0)


def _numbers(rows: Runs, device: torch.device) -> torch.Tensor:
    """The number of each row, in the order in which the device has them."""
    numbers = torch.empty(count_rows(rows), dtype=torch.int64, device=device)
    for run in rows:
        x, y = (torch.tensor(start, device=device) for start in (run.x, run.y))
        for count, dx, dy in (*run.loops, (run.length, 1, 1)):
            turns = torch.arange(count, device=device)
            x, y = x.unsqueeze(-1) + turns * dx, y.unsqueeze(-1) + turns * dy
        numbers[y.reshape(-1)] = x.reshape(-1)
    return numbers
