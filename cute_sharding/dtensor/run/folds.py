"""Folds: ops along a sharded dim that gather no rows. Each device folds its rows to a small state,
the devices combine their states, and each finishes its own rows.

A state has the shape of the op's first operand, with one row of each folded dim. It is a tensor
with a pending reduction, and combining it is a redistribution of that tensor (:mod:`.redistribute`):
one all-reduce, or what is cheaper, eager and in graphs. A device without rows has the neutral state
and takes part. Numbers of 16 bits are folded in 32, as PyTorch's kernels do; squares are summed
about the mean, and exponentials below the maximum.

The states and their gradients are well known: of a softmax (Milakov and Gimelshein 2018), of a
variance in two passes (Chan, Golub and LeVeque 1983).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    TensorMeta,
    cut_of,
)
from cute_sharding.dtensor.run.groups import on_each_rank
from cute_sharding.dtensor.run.placements import placement_of
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.layout.layout import row_major

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Fold:
    """How the states of one op lie.

    Attributes:
        mesh: the DeviceMesh.
        shape: of the first operand.
        dims: its dims that are folded.
        placements: those of the first operand.
        over: the mesh dims that shard a folded dim.
        dtypes: of the op's results.
    """

    mesh: Any
    shape: tuple[Any, ...]
    dims: tuple[int, ...]
    placements: tuple[Placement, ...]
    over: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def rows(self) -> Any:
        """The number of rows that are folded to one state."""
        return prod([self.shape[d] for d in self.dims])

    def all(self, op: str, *states: torch.Tensor) -> list[torch.Tensor]:
        """The states of all devices together, combined by ``op``; several travel in one."""
        shape = tuple([1 if d in self.dims else n for d, n in enumerate(self.shape)])
        several = len(states) > 1
        if several:
            shape = (len(states), *shape)
        state = on_each_rank(lambda _, *xs: torch.stack(xs), *states) if several else states[0]
        ends = []
        for placement in (Partial(op), Replicate()):
            placements = tuple(
                [
                    placement if m in self.over else _behind(p, int(several))
                    for m, p in enumerate(self.placements)
                ]
            )
            meta = TensorMeta(torch.Size(shape), row_major(shape), state.dtype)
            ends.append(DTensorSpec(self.mesh, placements, meta))
        combined = redistribute_local_tensor(state, *ends)
        return list(combined.unbind()) if several else [combined]

    def folded(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """The local state: the sum of the function's values over the folded dims, in a wider dtype
        where these have 16 bits.
        """
        return on_each_rank(
            lambda _, *xs: function(*map(wide, xs)).sum(self.dims, keepdim=True), *tensors
        )

    def greatest(self, x: torch.Tensor) -> torch.Tensor:
        """The greatest number of each row; without rows minus infinity."""

        def of_rank(_: int, x: torch.Tensor) -> torch.Tensor:
            x = wide(x)
            if any(x.shape[d] == 0 for d in self.dims):
                shape = [1 if d in self.dims else n for d, n in enumerate(x.shape)]
                return x.new_full(shape, -torch.inf)
            return x.amax(self.dims, keepdim=True)

        return on_each_rank(of_rank, x)

    def finish(
        self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor, result: int = 0
    ) -> torch.Tensor:
        """A result of this device's own rows, from operands and combined states."""
        dtype = self.dtypes[result]
        return on_each_rank(lambda _, *xs: function(*map(wide, xs)).to(dtype), *tensors)

    def without(self, x: torch.Tensor, keepdim: bool) -> torch.Tensor:
        """A result that has the folded dims only with ``keepdim``."""
        return x if keepdim else x.squeeze(self.dims)


def _behind(placement: Placement, dims: int) -> Placement:
    """The placement of a tensor with so many more dims in front."""
    cut = cut_of(placement)
    return placement if cut is None or not dims else placement_of((cut[0] + dims, cut[1]))


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor with at least 32 bits a number."""
    return x.to(_WIDER.get(x.dtype, x.dtype))


# -- along dims ------------------------------------------------------------------------------------


def softmax(fold: Fold, x: torch.Tensor, *_: Any) -> torch.Tensor:
    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - top).exp(), x, top))
    return fold.finish(lambda x, top, total: (x - top).exp() / total, x, top, total)


def log_softmax(fold: Fold, x: torch.Tensor, *_: Any) -> torch.Tensor:
    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - top).exp(), x, top))
    return fold.finish(lambda x, top, total: (x - top) - total.log(), x, top, total)


def softmax_backward(fold: Fold, grad: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    (total,) = fold.all("sum", fold.folded(lambda grad, y: grad * y, grad, y))
    return fold.finish(lambda grad, y, total: (grad - total) * y, grad, y, total)


def log_softmax_backward(fold: Fold, grad: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    (total,) = fold.all("sum", fold.folded(lambda grad: grad, grad))
    return fold.finish(lambda grad, y, total: grad - y.exp() * total, grad, y, total)


def logsumexp(fold: Fold, x: torch.Tensor, dims: Any, keepdim: bool = False) -> torch.Tensor:
    def base(top: torch.Tensor) -> torch.Tensor:
        return top.masked_fill(top.isinf(), 0)  # infinity less infinity is no number

    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - base(top)).exp(), x, top))
    return fold.without(
        fold.finish(lambda top, total: total.log() + base(top), top, total), keepdim
    )


def _moments(fold: Fold, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of each row, and the sum of squares about it."""
    (total,) = fold.all("sum", fold.folded(lambda x: x, x))
    mean = total / fold.rows
    (squares,) = fold.all("sum", fold.folded(lambda x, mean: (x - mean).square(), x, mean))
    return mean, squares


def _spread(*, root: bool, mean: bool) -> Callable[..., Any]:
    """A variance or a standard deviation, alone or with the mean."""

    def spread(
        fold: Fold, x: torch.Tensor, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
    ) -> Any:
        centre, squares = _moments(fold, x)
        freedom = max(fold.rows - (1 if correction is None else correction), 0)

        def finish(squares: torch.Tensor) -> torch.Tensor:
            found = squares / freedom
            return found.sqrt() if root else found

        found = fold.without(fold.finish(finish, squares), keepdim)
        if not mean:
            return found
        return found, fold.without(fold.finish(lambda mean: mean, centre, result=1), keepdim)

    return spread


# -- norms -----------------------------------------------------------------------------------------


def layer_norm(
    fold: Fold,
    x: torch.Tensor,
    _: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    mean, squares = _moments(fold, x)
    scale = on_each_rank(lambda _, squares: (squares / fold.rows + eps).rsqrt(), squares)

    def finish(x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        found, given = (x - mean) * scale, list(others)
        found = found if weight is None else found * given.pop(0)
        return found if bias is None else found + given.pop(0)

    others = [each for each in (weight, bias) if each is not None]
    return (
        fold.finish(finish, x, mean, scale, *others),
        fold.finish(lambda mean: mean, mean, result=1),
        fold.finish(lambda scale: scale, scale, result=2),
    )


def layer_norm_backward(
    fold: Fold,
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
        return grad * weight[0] if weight else grad, (x - mean) * scale

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
        return x.sum(outer) if outer else x

    return (
        dx,
        fold.finish(
            lambda grad, x, mean, scale: over_rows(grad * ((x - mean) * scale)),
            *given[:4],
            result=1,
        )
        if mask[1]
        else None,
        fold.finish(over_rows, grad, result=2) if mask[2] else None,
    )


def rms_norm(
    fold: Fold, x: torch.Tensor, _: Any, weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, ...]:
    (squares,) = fold.all("sum", fold.folded(torch.square, x))
    least = torch.finfo(squares.dtype).eps if eps is None else eps
    scale = on_each_rank(lambda _, squares: (squares / fold.rows + least).rsqrt(), squares)

    def finish(x: Any, scale: Any, *weight: Any) -> torch.Tensor:
        return x * scale * weight[0] if weight else x * scale

    weights = () if weight is None else (weight,)
    return (
        fold.finish(finish, x, scale, *weights),
        fold.finish(lambda scale: scale, scale, result=1),
    )


def rms_norm_backward(
    fold: Fold,
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
        return grad * weight[0] if weight else grad, x * scale

    dx = None
    if mask[0]:
        (total,) = fold.all("sum", fold.folded(lambda *given: prod(of_row(*given)), *given))

        def finish(total: Any, *given: Any) -> torch.Tensor:
            of, row = of_row(*given)
            return (of - row * (total / fold.rows)) * given[2]

        dx = fold.finish(finish, total, *given)
    outer = [d for d in range(len(fold.shape)) if d not in fold.dims]

    def over_rows(grad: Any, x: Any, scale: Any) -> torch.Tensor:
        return (grad * (x * scale)).sum(outer) if outer else grad * (x * scale)

    return dx, fold.finish(over_rows, *given[:3], result=1) if mask[1] else None


FOLDS: dict[str, Callable[..., Any]] = {
    "_softmax.default": softmax,
    "_log_softmax.default": log_softmax,
    "_softmax_backward_data.default": softmax_backward,
    "_log_softmax_backward_data.default": log_softmax_backward,
    "logsumexp.default": logsumexp,
    "var.correction": _spread(root=False, mean=False),
    "std.correction": _spread(root=True, mean=False),
    "var_mean.correction": _spread(root=False, mean=True),
    "std_mean.correction": _spread(root=True, mean=True),
    "native_layer_norm.default": layer_norm,
    "native_layer_norm_backward.default": layer_norm_backward,
    "_fused_rms_norm.default": rms_norm,
    "_fused_rms_norm_backward.default": rms_norm_backward,
}
