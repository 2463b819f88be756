"""Windows of a dim: from the rows that a device's windows are made of, each once, and back to their
sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_sharding.movement.rows import Window, beginnings, spans
from cute_sharding.redistribution.meeting import Chain, Run, count_rows, rows_held


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


def _index(begin: Sequence[Run], window: Window, device: torch.device) -> torch.Tensor:
    """For each window the rows that it is made of."""
    first = torch.empty(count_rows(tuple(begin)), dtype=torch.int64, device=device)
    for run in begin:
        at, row = (torch.tensor(start, device=device) for start in (run.x, run.y))
        for count, dx, dy in (*run.loops, (run.length, 1, 1)):
            turns = torch.arange(count, device=device)
            at, row = at.unsqueeze(-1) + turns * dx, row.unsqueeze(-1) + turns * dy
        first[at.reshape(-1)] = row.reshape(-1)
    return first.unsqueeze(-1) + torch.arange(window.size, device=device)
