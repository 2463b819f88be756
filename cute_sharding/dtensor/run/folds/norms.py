"""Norms of rows, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.run.folds.along import moments
from cute_sharding.dtensor.run.folds.states import States, wide, wider
from cute_sharding.dtensor.run.groups import on_all_ranks


def layer_norm(
    fold: States,
    x: torch.Tensor,
    _: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    mean, squares = moments(fold, x)
    scale = on_all_ranks(lambda squares: (squares / fold.rows + eps).rsqrt(), squares)

    def finish(x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        found, given = (x - mean).mul_(scale), list(others)
        found = found if weight is None else found.mul_(given.pop(0))
        return found if bias is None else found.add_(given.pop(0))

    others = [each for each in (weight, bias) if each is not None]
    return (
        fold.finish(finish, x, mean, scale, *others),
        fold.finish(lambda mean: mean, mean, result=1),
        fold.finish(lambda scale: scale, scale, result=2),
    )


def layer_norm_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    _: Any,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    weights = () if weight is None else (weight,)
    given = grad, x, mean, scale, *weights

    def of_row(grad: Any, x: Any, mean: Any, scale: Any, *weight: Any) -> Any:
        grad = wide(grad)
        return grad * weight[0] if weight else grad, (x - wide(mean)).mul_(scale)

    dx = None
    if mask[0]:
        sums = fold.all(
            "sum",
            fold.folded(lambda *given: of_row(*given)[0], *given),
            fold.folded(lambda *given: prod(of_row(*given)), *given),
        )

        def finish(one: Any, other: Any, *given: Any) -> torch.Tensor:
            of, row = of_row(*given)
            return (of - one / fold.rows - row * (other / fold.rows)) * given[3]

        dx = fold.finish(finish, *sums, *given)
    outer = [d for d in range(len(fold.shape)) if d not in fold.dims]

    def over_rows(x: torch.Tensor) -> torch.Tensor:
        return x.sum(outer, dtype=wider(x.dtype)) if outer else x

    return (
        dx,
        fold.finish(
            lambda grad, x, mean, scale: over_rows((x - wide(mean)).mul_(scale).mul_(grad)),
            *given[:4],
            result=1,
        )
        if mask[1]
        else None,
        fold.finish(over_rows, grad, result=2) if mask[2] else None,
    )


def rms_norm(
    fold: States, x: torch.Tensor, _: Any, weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, ...]:
    (squares,) = fold.all("sum", fold.folded(lambda x: wide(x).square(), x))
    least = torch.finfo(squares.dtype).eps if eps is None else eps
    scale = on_all_ranks(lambda squares: (squares / fold.rows + least).rsqrt(), squares)

    def finish(x: Any, scale: Any, *weight: Any) -> torch.Tensor:
        return (x * scale).mul_(weight[0]) if weight else x * scale

    weights = () if weight is None else (weight,)
    return (
        fold.finish(finish, x, scale, *weights),
        fold.finish(lambda scale: scale, scale, result=1),
    )


def rms_norm_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    _: Any,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    weights = () if weight is None else (weight,)
    given = grad, x, scale, *weights

    def of_row(grad: Any, x: Any, scale: Any, *weight: Any) -> Any:
        grad = wide(grad)
        return grad * weight[0] if weight else grad, x * wide(scale)

    dx = None
    if mask[0]:
        (total,) = fold.all("sum", fold.folded(lambda *given: prod(of_row(*given)), *given))

        def finish(total: Any, *given: Any) -> torch.Tensor:
            of, row = of_row(*given)
            return (of - row * (total / fold.rows)) * given[2]

        dx = fold.finish(finish, total, *given)
    outer = [d for d in range(len(fold.shape)) if d not in fold.dims]

    def over_rows(grad: Any, x: Any, scale: Any) -> torch.Tensor:
        found = (x * wide(scale)).mul_(grad)
        return found.sum(outer) if outer else found

    return dx, fold.finish(over_rows, *given[:3], result=1) if mask[1] else None


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
}
