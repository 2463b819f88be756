"""Averages of blocks that differ: what a device has counts by its share.

An average that is pending on N devices is the mean of N local ones. Where a device has w of W
elements, or rows of a loss that weigh so much, its own mean counts N w / W times. The factor is
exactly one where all have the same, so that a loss which is right on stock is so to the last bit.

Elements are known by the sizes. The rows of a loss of classes are not: some may be ignored. Their
weights, which the op gives beside the loss, are added up with it and not, as on stock, with its
gradient: one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.torch_private import answers
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.redistribution_hook import reduce_value
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec, Partial
from cute_sharding.ops.assign import Assignment
from cute_sharding.ops.operands import Part
from cute_sharding.ops.signature import Signature

# Losses that give the weight of their rows as a second result.
_WEIGH_ROWS = frozenset(["nll_loss_forward.default", "nll_loss2d_forward.default"])


def averaged(found: Assignment) -> list[int]:
    """The mesh dims on which averages are left pending, of what these cut."""
    return [
        m
        for m, part in enumerate(found.results[0])
        if part == "avg" and not any(parts[m] == "avg" for parts in found.operands)
    ]


def of_results(name: str, found: Assignment) -> list[tuple[Part, ...]]:
    """What each mesh dim does to each result. The weight of all rows is on every device."""
    mesh_dims = averaged(found) if name in _WEIGH_ROWS else []
    return [
        tuple([None if k and m in mesh_dims else part for m, part in enumerate(parts)])
        for k, parts in enumerate(found.results)
    ]


def by_shares(
    answer: Any,
    name: str,
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    found: Assignment,
    *,
    anyway: bool,
) -> Any:
    """The answer; where averages are pending of blocks that differ, with the op run so that each
    counts by its share; ``anyway`` where they may differ in another call.
    """
    mesh_dims, mesh = averaged(found), specs[0].mesh
    if not mesh_dims:
        return answer
    parts = prod(mesh.size(m) for m in mesh_dims)
    if name in _WEIGH_ROWS:
        every = partial(_added, mesh=mesh, mesh_dims=mesh_dims)
        return answers.instead(answer, schema, partial(_by_weights, schema.op, every, parts))
    if not (found.shares or anyway):
        return answer
    dims = [d for d, one in enumerate(signature.operands[0]) if one not in signature.results[0]]
    n = prod([specs[0].shape[d] for d in dims])
    return answers.instead(answer, schema, partial(_by_elements, schema.op, dims, n, parts))


def _by_elements(
    op: Callable[..., torch.Tensor],
    dims: Sequence[int],
    n: Any,
    parts: int,
    x: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The mean over ``dims``, of ``n`` elements in all."""
    mean = op(x, *args, **kwargs)
    own = x.new_full((), prod([x.shape[d] for d in dims]), dtype=_exact(mean.dtype))
    return (mean * (own * parts / n)).to(mean.dtype).masked_fill(own == 0, 0)


def _by_weights(
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    every: Callable[[torch.Tensor], torch.Tensor],
    parts: int,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss, and the weight of all rows."""
    mean, of_own = op(x, target, weight, reduction, ignore_index)
    own = of_own.to(_exact(of_own.dtype))
    total = every(own)
    counted = (mean * (own * parts / total)).to(mean.dtype)
    if weight is None:
        counted = counted.masked_fill((own == 0) & (total != 0), 0)
    else:  # rows that weigh nothing together may not do so each
        added = op(x, target, weight, 2, ignore_index)[0]
        counted = torch.where(own == 0, (added * (parts / total)).to(mean.dtype), counted)
    return counted, total.to(of_own.dtype)


def _added(x: torch.Tensor, mesh: Any, mesh_dims: Sequence[int]) -> torch.Tensor:
    for m in mesh_dims:
        x = reduce_value(Partial("sum"), x, mesh, m)
    return x


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Of real numbers, one that holds counts as exactly as a kernel adds them up."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
