"""Norms of images: of batches, instances and groups of channels, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    TensorMeta,
    cut_of,
)
from cute_sharding.dtensor.run.folds.along import moments
from cute_sharding.dtensor.run.folds.states import States, wide, wider
from cute_sharding.dtensor.run.groups import on_all_ranks, on_each_rank, place
from cute_sharding.dtensor.run.numbered import (
    as_number,
    chain_of_dim,
    numbers_of,
)
from cute_sharding.dtensor.run.placements import placement_of
from cute_sharding.dtensor.run.redistribute import combined
from cute_sharding.layout.layout import row_major


def _of_channels(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers of channels, as the dim 1 of images."""
    return x.reshape(-1, *[1] * (like.ndim - 2))


def _batch_norm(
    fold: States,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the mean of each channel, one over the deviation, and the sum of squares."""
    mean, squares = moments(fold, x)
    scale = on_all_ranks(lambda squares: (squares / fold.rows + eps).rsqrt(), squares)

    def finish(x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        given = [_of_channels(each, x) for each in others]
        found = (x - mean).mul_(scale)
        found = found if weight is None else found.mul_(given.pop(0))
        return found if bias is None else found.add_(given.pop(0))

    others = [each for each in (weight, bias) if each is not None]
    flat = on_all_ranks(lambda mean: mean.reshape(-1), mean)
    return (
        fold.finish(finish, x, mean, scale, *others),
        flat,
        on_all_ranks(lambda scale: scale.reshape(-1), scale),
        on_all_ranks(lambda squares: squares.reshape(-1), squares),
    )


def _running(
    fold: States,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    momentum: float,
    own: torch.Tensor,
    squares: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The running statistics after a batch."""
    freedom = fold.rows - 1

    def moved(before: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor | None:
        if before is None:
            return None
        return on_all_ranks(
            lambda before, now: now.to(before.dtype) * momentum + before * (1 - momentum),
            before,
            now,
        )

    unbiased = on_all_ranks(lambda squares: squares / freedom, squares)
    return moved(mean, own), moved(variance, unbiased)


def _update(before: torch.Tensor | None, after: torch.Tensor | None) -> None:
    if before is not None and after is not None:
        on_all_ranks(lambda before, after: before.copy_(after), before, after)


def batch_norm(
    fold: States,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    _: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    y, mean, scale, squares = _batch_norm(fold, x, weight, bias, eps)
    after = _running(fold, running_mean, running_variance, momentum, mean, squares)
    _update(running_mean, after[0])
    _update(running_variance, after[1])
    return y, mean, scale


def batch_norm_alone(
    fold: States, x: Any, weight: Any, bias: Any, _: bool, __: float, eps: float
) -> tuple[torch.Tensor, ...]:
    return _batch_norm(fold, x, weight, bias, eps)[:3]


def batch_norm_anew(
    fold: States, x: Any, weight: Any, bias: Any, *given: Any
) -> tuple[torch.Tensor | None, ...]:
    running_mean, running_variance, _, momentum, eps = given
    y, mean, scale, squares = _batch_norm(fold, x, weight, bias, eps)
    after = _running(fold, running_mean, running_variance, momentum, mean, squares)
    return y, mean, scale, *after


def _with_nothing_saved(fold: States, *given: Any) -> tuple[torch.Tensor, ...]:
    """As :func:`batch_norm`, with a last result that is empty: what a backend would save."""
    found = batch_norm(fold, *given)
    return *found, on_all_ranks(lambda x: x.new_empty(0, dtype=torch.uint8), given[0])


def batch_norm_updating(fold: States, *given: Any) -> tuple[torch.Tensor, ...]:
    return _with_nothing_saved(fold, *given[:5], True, *given[5:])


def batch_norm_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *given: Any,
) -> tuple[torch.Tensor | None, ...]:
    _, _, mean, scale, _, _, mask, *_ = given
    weights = () if weight is None else (weight,)
    operands = grad, x, mean, scale

    def of_row(grad: Any, x: Any, mean: Any, scale: Any) -> Any:
        centred = (x - wide(_of_channels(mean, x))).mul_(_of_channels(scale, x))
        return wide(grad), centred

    one, other = fold.all(
        "sum",
        fold.folded(lambda grad: grad, grad),
        fold.folded(lambda *given: prod(of_row(*given)), *operands),
    )

    def finish(one: Any, other: Any, *given: Any) -> torch.Tensor:
        own, row = of_row(*given[:4])
        found = own - one / fold.rows - row * (other / fold.rows)
        found = found * _of_channels(given[3], given[1])
        return found * _of_channels(given[4], given[1]) if weights else found

    flat = [
        on_all_ranks(lambda x, k=k: x.reshape(-1).to(fold.dtype(k)), x) if mask[k] else None
        for k, x in ((1, other), (2, one))
    ]
    return fold.finish(finish, one, other, *operands, *weights) if mask[0] else None, *flat


def batch_norm_backward_of_cudnn(
    fold: States, x: Any, grad: Any, weight: Any, *given: Any
) -> tuple[torch.Tensor | None, ...]:
    *statistics, eps, _ = given
    return batch_norm_backward(fold, grad, x, weight, *statistics, True, eps, [True] * 3)


# Of groups of channels: a channel's group is a row of the state. A device adds up what it has of
# each group; it has all groups, or, if none is on several devices, its own.


def _groups(fold: States, x: torch.Tensor) -> torch.Tensor:
    """For each of the device's channels its group among those of its states."""
    channels, groups = as_number(fold.shape[1]), as_number(fold.of_state[1])
    chain = chain_of_dim(1, fold.placements, fold.mesh)

    def of_rank(rank: int, x: torch.Tensor) -> torch.Tensor:
        own = torch.arange(x.shape[1], device=x.device)
        if _are_all_here(fold):
            own = numbers_of(own, channels, chain, place(fold.mesh, rank))
        return own // (channels // groups)

    return on_each_rank(of_rank, x)


def _are_all_here(fold: States) -> bool:
    """Whether a device has states of all groups; otherwise only of those of its own channels."""
    return all(m in fold.over for *_, m in chain_of_dim(1, fold.placements, fold.mesh))


def _sum_of_groups(
    fold: States, at: torch.Tensor, function: Callable[..., Any], *tensors: Any
) -> torch.Tensor:
    """The local state: for each image and group the sum of the function's values, which gets the
    channels' groups, and these tensors.
    """
    channels, groups = as_number(fold.shape[1]), as_number(fold.of_state[1])

    def of_rank(at: Any, *xs: Any) -> torch.Tensor:
        found = function(at, *xs)
        inner = tuple(range(2, found.ndim))
        found = found.sum(inner, dtype=wider(found.dtype)) if inner else wide(found)
        count = groups if _are_all_here(fold) else found.shape[1] * groups // channels
        sums = found.new_zeros(found.shape[0], count).index_add_(1, at, found)
        return sums.reshape(*sums.shape, *[1] * (len(fold.shape) - 2))

    return on_all_ranks(of_rank, at, *tensors)


def _of_its_group(state: Any, x: Any, at: torch.Tensor) -> torch.Tensor:
    """For each channel of x the state of its group."""
    shape = [*state.shape[:2], *[1] * (x.ndim - 2)]
    return state.reshape(shape)[:, at]


def group_norm(
    fold: States, x: torch.Tensor, weight: Any, bias: Any, *given: Any
) -> tuple[torch.Tensor, ...]:
    rows, eps, at = prod(fold.shape[1:]) / fold.of_state[1], given[-1], _groups(fold, x)
    (total,) = fold.all("sum", _sum_of_groups(fold, at, lambda _, x: x, x))
    mean = total / rows

    def deviation(at: Any, x: Any, mean: Any) -> torch.Tensor:
        return (x - _of_its_group(mean, x, at)).square_()

    (squares,) = fold.all("sum", _sum_of_groups(fold, at, deviation, x, mean))
    scale = on_all_ranks(lambda squares: (squares / rows + eps).rsqrt(), squares)

    def finish(at: Any, x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        given = [_of_channels(each, x) for each in others]
        found = x - _of_its_group(mean, x, at)
        found = found.mul_(_of_its_group(scale, x, at))
        found = found if weight is None else found.mul_(given.pop(0))
        return found if bias is None else found.add_(given.pop(0))

    others = [each for each in (weight, bias) if each is not None]

    def flat(k: int, state: torch.Tensor) -> torch.Tensor:
        return on_all_ranks(lambda s: s.reshape(s.shape[:2]).to(fold.dtype(k)), state)

    return fold.finish(finish, at, x, mean, scale, *others), flat(1, mean), flat(2, scale)


def group_norm_backward(
    fold: States, grad: Any, x: Any, mean: Any, scale: Any, weight: Any, *given: Any
) -> tuple[torch.Tensor | None, ...]:
    mask, rows = given[-1], prod(fold.shape[1:]) / fold.of_state[1]
    weights = () if weight is None else (weight,)
    at = _groups(fold, x)
    operands = grad, x, mean, scale, *weights

    def centred(at: Any, x: Any, mean: Any, scale: Any) -> torch.Tensor:
        found = x - wide(_of_its_group(mean, x, at))
        return found.mul_(_of_its_group(scale, x, at))

    def own(grad: Any, *weight: Any) -> torch.Tensor:
        return wide(grad) * _of_channels(weight[0], grad) if weight else wide(grad)

    dx = None
    if mask[0]:
        sums = fold.all(
            "sum",
            _sum_of_groups(fold, at, lambda _, grad, *weight: own(grad, *weight), grad, *weights),
            _sum_of_groups(
                fold,
                at,
                lambda at, grad, x, mean, scale, *weight: (
                    own(grad, *weight) * centred(at, x, mean, scale)
                ),
                *operands,
            ),
        )

        def finish(at: Any, one: Any, other: Any, grad: Any, x: Any, *given: Any) -> Any:
            mean, scale, *weight = given
            one, other = (_of_its_group(each, x, at) / rows for each in (one, other))
            found = own(grad, *weight) - one - centred(at, x, mean, scale) * other
            return found * _of_its_group(scale, x, at)

        dx = fold.finish(finish, at, *sums, *operands)

    def over_images(x: torch.Tensor) -> torch.Tensor:
        return x.sum([d for d in range(x.ndim) if d != 1], dtype=wider(x.dtype))

    return (
        dx,
        _of_weights(
            fold,
            1,
            lambda at, grad, x, mean, scale: over_images(grad * centred(at, x, mean, scale)),
            at,
            *operands[:4],
        )
        if mask[1]
        else None,
        _of_weights(fold, 2, over_images, grad) if mask[2] else None,
    )


def _of_weights(
    fold: States, k: int, function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """The gradient of weights of channels: the sum of the function's values, of all elements of an
    image; over images it is left pending.
    """
    sums = on_all_ranks(lambda *xs: function(*xs), *tensors)
    cuts = list(map(cut_of, fold.placements))
    ends = [
        [
            Replicate() if cut is None else placement_of((0, cut[1])) if cut[0] == 1 else of(cut[0])
            for cut in cuts
        ]
        for of in (lambda _: Partial("sum"), lambda d: Replicate() if d else Partial("sum"))
    ]
    if ends[0] != ends[1]:
        shape = (fold.shape[1],)
        meta = TensorMeta(torch.Size(shape), row_major(shape), sums.dtype)
        before, after = (DTensorSpec(fold.mesh, tuple(end), meta) for end in ends)
        sums = combined(sums, before, after)
    return on_all_ranks(lambda sums: sums.to(fold.dtype(k)), sums)


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "batch_norm_alone": batch_norm_alone,
    "batch_norm_anew": batch_norm_anew,
    "batch_norm_updating": batch_norm_updating,
    "batch_norm_of_cudnn": _with_nothing_saved,
    "batch_norm_backward": batch_norm_backward,
    "batch_norm_backward_of_cudnn": batch_norm_backward_of_cudnn,
    "group_norm": group_norm,
    "group_norm_backward": group_norm_backward,
}
