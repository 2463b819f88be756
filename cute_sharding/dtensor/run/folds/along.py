"""Softmaxes, logarithms of sums, variances, norms and distances along dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.run.folds.states import States, wide
from cute_sharding.dtensor.run.groups import on_all_ranks


def _exponentials(fold: States, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row, and the sum of exponentials below it."""
    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - top).exp_(), x, top))
    return top, total


def softmax(fold: States, x: torch.Tensor, *_: Any) -> torch.Tensor:
    states = _exponentials(fold, x)
    return fold.finish(lambda x, top, total: (x - top).exp_().div_(total), x, *states)


def safe_softmax(
    fold: States, x: torch.Tensor, _: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """0 in rows that are all minus infinity."""
    x = x if dtype is None else x.to(dtype)
    (top,) = fold.all("max", fold.greatest(x))
    base = on_all_ranks(lambda top: top.masked_fill(top == -torch.inf, 0), top)
    (total,) = fold.all("sum", fold.folded(lambda x, base: (x - base).exp_(), x, base))

    def finish(x: Any, base: Any, total: Any) -> torch.Tensor:
        return (x - base).exp_().div_(total).masked_fill_(total == 0, 0)

    return fold.finish(finish, x, base, total)


def log_softmax(fold: States, x: torch.Tensor, *_: Any) -> torch.Tensor:
    states = _exponentials(fold, x)
    return fold.finish(lambda x, top, total: (x - top).sub_(total.log()), x, *states)


def softmax_backward(fold: States, grad: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    (total,) = fold.all("sum", fold.folded(lambda grad, y: wide(grad).mul(y), grad, y))
    return fold.finish(lambda grad, y, total: (grad - total).mul_(y), grad, y, total)


def log_softmax_backward(
    fold: States, grad: torch.Tensor, y: torch.Tensor, *_: Any
) -> torch.Tensor:
    (total,) = fold.all("sum", fold.folded(lambda grad: grad, grad))
    return fold.finish(
        lambda grad, y, total: wide(y).exp().mul_(total).neg_().add_(grad), grad, y, total
    )


def logsumexp(fold: States, x: torch.Tensor, dims: Any, keepdim: bool = False) -> torch.Tensor:
    def base(top: torch.Tensor) -> torch.Tensor:
        return top.masked_fill(top.isinf(), 0)  # infinity less infinity is no number

    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - base(top)).exp_(), x, top))
    return fold.without(
        fold.finish(lambda top, total: total.log() + base(top), top, total), keepdim
    )


def moments(fold: States, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of each row, and the sum of squares about it."""
    (total,) = fold.all("sum", fold.folded(lambda x: x, x))
    mean = total / fold.rows
    (squares,) = fold.all("sum", fold.folded(lambda x, mean: (x - mean).square_(), x, mean))
    return mean, squares


def _spread(*, root: bool, mean: bool) -> Callable[..., Any]:
    """A variance or a standard deviation, alone or with the mean."""

    def spread(
        fold: States,
        x: torch.Tensor,
        dim: Any = None,
        *,
        correction: Any = 1,
        keepdim: bool = False,
    ) -> Any:
        centre, squares = moments(fold, x)
        freedom = max(fold.rows - (1 if correction is None else correction), 0)

        def finish(squares: torch.Tensor) -> torch.Tensor:
            found = squares / freedom
            return found.sqrt() if root else found

        found = fold.without(fold.finish(finish, squares), keepdim)
        if not mean:
            return found
        return found, fold.without(fold.finish(lambda mean: mean, centre, result=1), keepdim)

    return spread


def _powers(x: torch.Tensor, p: float) -> torch.Tensor:
    """What is added up for a norm of this order; of order infinity what is compared."""
    x = wide(x).abs()
    return x if p in (1, torch.inf) else (x != 0).to(x.dtype) if p == 0 else x.pow(p)


def _root(total: torch.Tensor, p: float) -> torch.Tensor:
    return total if p in (0, 1, torch.inf) else total.pow(1 / p)


def renorm(fold: States, x: torch.Tensor, p: float, _: int, most: float) -> torch.Tensor:
    """Rows of which the norm is greater than ``most`` get that norm."""

    def of_rank(x: torch.Tensor) -> torch.Tensor:
        found = _powers(x, p)
        if p != torch.inf:
            return found.sum(fold.dims, keepdim=True)
        sizes = [1 if d in fold.dims else n for d, n in enumerate(x.shape)]
        return found.amax(fold.dims, keepdim=True) if x.numel() else found.new_zeros(sizes)

    (total,) = fold.all("max" if p == torch.inf else "sum", on_all_ranks(of_rank, x))

    def finish(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        norm = _root(total, p)
        return x * torch.where(norm > most, most / (norm + 1e-7), 1)

    return fold.finish(finish, x, total)


def distances(
    fold: States, x: torch.Tensor, y: torch.Tensor, p: float = 2, *given: Any
) -> torch.Tensor:
    """Of each pair of rows, of which each device has some columns."""

    def of_rank(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        options = (p, *given) if fold.op._schema.name == "aten::_cdist_forward" else ()
        found = fold.op(x, y, *options)
        return found if p == 0 else _powers(found, p)

    of_pairs = fold.of_result(0)
    (total,) = of_pairs.all("max" if p == torch.inf else "sum", on_all_ranks(of_rank, x, y))
    return fold.finish(lambda total: _root(total, p), total)


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "safe_softmax": safe_softmax,
    "log_softmax": log_softmax,
    "softmax_backward": softmax_backward,
    "log_softmax_backward": log_softmax_backward,
    "logsumexp": logsumexp,
    "var": _spread(root=False, mean=False),
    "std": _spread(root=True, mean=False),
    "var_mean": _spread(root=False, mean=True),
    "std_mean": _spread(root=True, mean=True),
    "renorm": renorm,
    "distances": distances,
}
