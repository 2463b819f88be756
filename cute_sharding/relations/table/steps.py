"""Ops that are several steps, each a view or a movement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.relations.table import movement, views
from cute_sharding.relations.table.names import Shape
from cute_sharding.relations.table.row import ByDimMap, ByRows, BySteps, RowStep

_ROWS: dict[str, ByDimMap | ByRows] = {
    **{row.op: row for row in views.ROWS},
    **{row.op: row for row in movement.ROWS},
}


def _step(op: str, *args: Any) -> RowStep:
    return RowStep(_ROWS[op], args)


def _regrouped(onto: Shape, order: Sequence[int], result: Shape) -> list[RowStep]:
    """The last dims, viewed as ``onto``, permuted, and viewed as ``result``."""
    return [
        _step("Tensor.view", onto),
        _step("torch.permute", tuple(order)),
        _step("Tensor.view", result),
    ]


def shuffled(x: Shape, factor: int) -> list[RowStep] | None:
    """The op splits channels into (C, r, r), and moves them to rows (H, r) and columns (W, r)."""
    if len(x) < 3 or factor < 1 or x[-3] % factor**2:
        return None
    *batch, channels, height, width = x
    k, c = len(batch), channels // factor**2
    return _regrouped(
        (*batch, c, factor, factor, height, width),
        (*range(k), k, k + 3, k + 1, k + 4, k + 2),
        (*batch, c, height * factor, width * factor),
    )


def unshuffled(x: Shape, factor: int) -> list[RowStep] | None:
    """The op splits rows into (H, r) and columns into (W, r), and moves the dims r to channels."""
    if len(x) < 3 or factor < 1 or x[-2] % factor or x[-1] % factor:
        return None
    *batch, c, height, width = x
    k, (h, w) = len(batch), (height // factor, width // factor)
    return _regrouped(
        (*batch, c, h, factor, w, factor),
        (*range(k), k, k + 2, k + 4, k + 1, k + 3),
        (*batch, c * factor**2, h, w),
    )


def interleaved(x: Shape, groups: int) -> list[RowStep] | None:
    """The op takes the first channel of each group, then the second of each, and so on."""
    if len(x) < 3 or groups < 1 or x[1] % groups:
        return None
    images, channels, *sizes = x
    grouped = (images, groups, channels // groups, *sizes)
    return _regrouped(grouped, (0, 2, 1, *range(3, len(x) + 1)), x)


def squeezed(x: Shape, *dims: int | Sequence[int]) -> list[RowStep]:
    """The op removes dims of which the global size is 1, even if others have local size 1."""
    return [_step("torch.squeeze", *dims)]


def _pads(padding: Sequence[int], sign: int) -> list[RowStep]:
    down, right = (sign * n for n in padding)
    if not down and not right:
        return []
    return [_step("torch.nn.functional.pad", (right, right, down, down))]


def _counts(sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [(n - size) // step + 1 for n, size, step in zip(sizes, kernel, stride)]


def columns(
    x: Shape,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> list[RowStep] | None:
    """Each window of the last two dims becomes one column, with its elements in all channels."""
    if len(x) < 3 or any(n > 1 and size > 1 for n, size in zip(dilation, kernel)):
        return None
    *batch, c, height, width = x
    k = len(batch)
    counts = _counts((height + 2 * padding[0], width + 2 * padding[1]), kernel, stride)
    if min(counts) < 1:
        return None
    return [
        *_pads(padding, 1),
        _step("Tensor.unfold", k + 1, kernel[0], stride[0]),
        _step("Tensor.unfold", k + 2, kernel[1], stride[1]),
        _step("torch.permute", (*range(k), k, k + 3, k + 4, k + 1, k + 2)),
        _step("Tensor.view", (*batch, c * kernel[0] * kernel[1], counts[0] * counts[1])),
    ]


def of_columns(
    x: Shape,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> list[RowStep] | None:
    """For each element of the result, the op adds up all windows that contain the element."""
    per = kernel[0] * kernel[1]
    if len(x) < 2 or x[-2] % per or any(n > 1 and s > 1 for n, s in zip(dilation, kernel)):
        return None
    *batch, channels, columns = x
    k, c = len(batch), channels // per
    height, width = (n + 2 * pad for n, pad in zip(size, padding))
    counts = _counts((height, width), kernel, stride)
    if min(counts) < 1 or counts[0] * counts[1] != columns:
        return None
    once = (*batch, c, counts[0], width, kernel[0])
    return [
        _step("Tensor.view", (*batch, c, *kernel, *counts)),
        _step("torch.permute", (*range(k), k, k + 3, k + 4, k + 1, k + 2)),
        _step("unfold's gradient", once, k + 2, kernel[1], stride[1]),
        _step("unfold's gradient", (*batch, c, height, width), k + 1, kernel[0], stride[0]),
        *_pads(padding, -1),
    ]


ROWS: tuple[BySteps, ...] = (
    BySteps(("pixel_shuffle.default",), shuffled, filled=True),
    BySteps(("pixel_unshuffle.default",), unshuffled, filled=True),
    BySteps(("channel_shuffle.default",), interleaved),
    BySteps(("im2col.default",), columns, is_signed=False),
    BySteps(("col2im.default",), of_columns, is_signed=False),
    BySteps(
        ("squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims"),
        squeezed,
        is_signed=False,
        is_wrong_in_torch=True,
    ),
)
