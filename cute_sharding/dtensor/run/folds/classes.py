"""Losses of classes. The class of a row is on one device, which gives what it picks; the others
give nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.run.folds.states import States, wide
from cute_sharding.dtensor.run.groups import all_on_all_ranks, all_on_each_rank, on_each_rank, place
from cute_sharding.dtensor.run.numbered import (
    as_number,
    chain_of_dim,
    checked,
    own_rows,
)


def _of_classes(fold: States, target: torch.Tensor, ignore: int) -> tuple[torch.Tensor, ...]:
    """For each row, the number of its class among this device's own classes, with a dim for them,
    and whether the row counts here.
    """
    (dim,), n = fold.dims, as_number(fold.shape[fold.dims[0]])
    chain = chain_of_dim(dim, fold.placements, fold.mesh)

    def of_rank(rank: int, target: torch.Tensor) -> list[torch.Tensor]:
        counted = target != ignore
        classes = checked(target.masked_fill(~counted, 0), n, "Target")
        own, _, is_own = own_rows(classes, n, chain, place(fold.mesh, rank))
        counts = (is_own & counted).unsqueeze(dim)
        return [own.unsqueeze(dim).masked_fill(~counts, 0), counts]

    return tuple(all_on_each_rank(of_rank, target))


def _pick(x: torch.Tensor, at: torch.Tensor, counts: torch.Tensor, dim: int) -> torch.Tensor:
    """The numbers of the rows' own classes, and 0 of other rows."""
    if x.shape[dim] == 0:
        return torch.zeros_like(counts, dtype=x.dtype)
    return x.gather(dim, at).masked_fill(~counts, 0)


def _weights(
    weight: torch.Tensor, at: torch.Tensor, counts: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """The weights of the rows' own classes, and 0 of other rows."""
    if weight.shape[0] == 0:
        return torch.zeros_like(counts, dtype=like.dtype)
    return weight[at].to(like.dtype).masked_fill(~counts, 0)


def nll_loss(
    fold: States,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    (dim,) = fold.dims
    at, counts = _of_classes(fold, target, ignore)
    weights = () if weight is None else (weight,)

    def picked(x: Any, at: Any, counts: Any, *weight: Any) -> list[torch.Tensor]:
        found = -wide(_pick(x, at, counts, dim))
        if not weight:
            return [found]
        of_rows = _weights(weight[0], at, counts, found)
        return [found * of_rows, of_rows]

    states = fold.all("sum", *all_on_all_ranks(picked, x, at, counts, *weights))

    def finish(target: Any, loss: Any, *of_rows: Any) -> list[torch.Tensor]:
        loss = loss.squeeze(dim)
        one = of_rows[0].squeeze(dim) if of_rows else (target != ignore).to(loss.dtype)
        total = one.sum()
        if reduction == 0:
            loss, total = loss, total.new_zeros(())
        else:
            loss = loss.sum() / total if reduction == 1 else loss.sum()
        return [loss.to(fold.dtype(0)), total.to(fold.dtype(1))]

    loss, total = all_on_all_ranks(finish, target, *states)
    return loss, total


def nll_loss_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
    total: torch.Tensor,
) -> torch.Tensor:
    (dim,) = fold.dims
    at, counts = _of_classes(fold, target, ignore)
    weights = () if weight is None else (weight,)

    def of_rank(
        _: int, grad: Any, x: Any, total: Any, at: Any, counts: Any, *weight: Any
    ) -> torch.Tensor:
        zeros = torch.zeros_like(x)
        if x.shape[dim] == 0:
            return zeros
        of_rows = wide(grad.unsqueeze(dim) if reduction == 0 else grad).expand(counts.shape)
        if weight:
            of_rows = of_rows * _weights(weight[0], at, counts, of_rows)
        if reduction == 1:
            of_rows = of_rows / wide(total)
        return zeros.scatter(dim, at, -of_rows.masked_fill(~counts, 0).to(x.dtype))

    return on_each_rank(of_rank, grad, x, total, at, counts, *weights)


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nll_loss": nll_loss,
    "nll_loss_backward": nll_loss_backward,
}
