"""Ops that take rows, or fill elements, by their numbers among all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.run.folds.states import States
from cute_sharding.dtensor.run.groups import all_on_each_rank, on_all_ranks, on_each_rank, place
from cute_sharding.dtensor.run.numbered import (
    as_number,
    chain_of_dim,
    checked,
    is_at_hand,
    numbers_of,
    own_rows,
)


def bags(
    fold: States,
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: torch.Tensor | None = None,
    with_last: bool = False,
    padding: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Sums or means of bags of rows. A device takes the rows that it has, in the order of the
    indices, and zeros for others, and the op runs on these.
    """
    n = as_number(fold.shape[0])
    chain = chain_of_dim(0, fold.placements, fold.mesh)
    padding = padding + n if padding < -1 else padding
    given = () if weights is None else (weights,)

    def of_rank(rank: int, table: Any, indices: Any, offsets: Any, *weights: Any) -> Any:
        own, count, is_own = own_rows(
            checked(indices, n, "index"), n, chain, place(fold.mesh, rank)
        )
        rows = table if count else table.new_zeros(1, *table.shape[1:])
        rows = rows.index_select(0, own.masked_fill(~is_own, 0))
        rows = rows.masked_fill(~is_own.unsqueeze(1), 0)
        at = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
        if padding >= 0:  # a row that no bag counts
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
            at = torch.where(indices == padding, indices.shape[0], at)
        return fold.op(
            rows,
            at,
            offsets,
            by_frequency,
            mode,
            sparse,
            weights[0] if weights else None,
            with_last,
            indices.shape[0] if padding >= 0 else -1,
        )

    summed, *others = all_on_each_rank(of_rank, table, indices, offsets, *given)
    (total,) = fold.of_result(0).all("sum", summed)
    return total, *others


def masked_scatter(
    fold: States, x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """A device counts the elements that come before its own in the whole mask."""
    shape = tuple(map(as_number, fold.shape))
    chains = [chain_of_dim(d, fold.placements, fold.mesh) for d in range(len(shape))]

    def of_rank(rank: int, x: Any, mask: Any, source: Any) -> torch.Tensor:
        mask = mask.expand(shape)
        at = mask.reshape(-1).cumsum(0).reshape(shape) - 1
        if is_at_hand(mask) and mask.sum() > source.numel():
            return fold.op(x.new_zeros(shape), mask, source)  # which raises
        for d, chain in enumerate(chains):
            if chain:
                own = torch.arange(x.shape[d], device=x.device)
                numbers = numbers_of(own, shape[d], chain, place(fold.mesh, rank))
                mask, at = mask.index_select(d, numbers), at.index_select(d, numbers)
        if source.numel() == 0:
            return x.clone()
        return torch.where(mask, source.reshape(-1)[at.clamp_min(0)], x)

    found = on_each_rank(of_rank, x, mask, source)
    if fold.op._schema.is_mutable:
        on_all_ranks(lambda x, found: x.copy_(found), x, found)
        return x
    return found


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bags": bags,
    "masked_scatter": masked_scatter,
}
