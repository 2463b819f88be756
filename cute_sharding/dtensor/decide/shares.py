"""Averages of blocks that differ: what a device has counts by its share.

Where a device has w of W elements, its own mean counts w / W times in that of all: that sum is left
pending. Elements are known by the sizes.

The rows of a loss of classes are not: some may be ignored. Their weights, which the op gives beside
the loss, are added up with it and not, as on stock, with its gradient: one number. Of N devices
each then counts N w / W times in an average, as stock has it. That is exactly once where all have
rows of as much weight, so that a loss which is right on stock is so to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.redistribution_hook import reduce_value
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    TensorMeta,
)
from cute_sharding.propagation.assign import Assignment
from cute_sharding.propagation.operands import Part
from cute_sharding.relations.signature import Signature


def _left_pending(found: Assignment, op: str) -> list[int]:
    """The mesh dims that leave such a reduction pending, of what they cut."""
    return [
        m
        for m, part in enumerate(found.results[0])
        if part == op and not any(parts[m] == op for parts in found.operands)
    ]


def of_results(shares: str | None, found: Assignment) -> list[tuple[Part, ...]]:
    """What each mesh dim does to each result: the weight of all rows is on every device."""
    mesh_dims = _left_pending(found, "avg") if shares == "rows" else []
    return [
        tuple([None if k and m in mesh_dims else part for m, part in enumerate(parts)])
        for k, parts in enumerate(found.results)
    ]


def by_shares(
    answer: Any,
    shares: str,
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    found: Assignment,
) -> Any:
    """The answer for a mean, with the op run so that what a device has counts by its share, where
    that is left pending: averages of rows, or sums of what averages would be of blocks of one size.
    """
    mesh_dims = _left_pending(found, "avg" if shares == "rows" else "sum")
    mesh = specs[0].mesh
    if not mesh_dims:
        return answer
    if shares == "rows":
        total = partial(_added, mesh=mesh, mesh_dims=mesh_dims)
        devices = prod(mesh.size(m) for m in mesh_dims)
        function = partial(_by_weights, schema.op, total, devices)
        return answers.instead(answer, schema, function, reduced=(_weight(specs[0], mesh_dims),))
    dims = _dims_of_elements(signature)
    places = [at for at, arg in enumerate(schema.args_schema) if isinstance(arg, DTensorSpec)]
    n = prod([specs[i].shape[d] for i, d in dims])
    counted = [(places[i], d) for i, d in dims]
    return answers.instead(answer, schema, partial(_by_elements, schema.op, counted, n))


def _dims_of_elements(signature: Signature) -> list[tuple[int, int]]:
    """Of each name that is reduced, an operand that has all its rows, and the dim. (One that is
    broadcast has another name there.)
    """
    dims: dict[str, tuple[int, int]] = {}
    for i, names in enumerate(signature.operands):
        for d, name in enumerate(names):
            if name not in signature.results[0]:
                dims.setdefault(name, (i, d))
    return list(dims.values())


def _by_elements(
    op: Callable[..., torch.Tensor],
    dims: Sequence[tuple[int, int]],
    n: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """What the mean of own elements, ``dims`` of these arguments, is of the mean of ``n``."""
    mean = op(*args, **kwargs)
    counted = share(prod([args[at].shape[d] for at, d in dims]), n, mean)
    return (mean * counted).to(mean.dtype).masked_fill(counted == 0, 0)


def share(own: Any, n: Any, x: torch.Tensor) -> torch.Tensor:
    """What a device has, ``own`` of ``n`` elements, as a factor of ``x``."""
    return x.new_full((), own, dtype=_real(x.dtype)) / n


def _by_weights(
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    total_of: Callable[[torch.Tensor], torch.Tensor],
    devices: int,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the mean of own rows is of an average over ``devices``; and the weight of all rows."""
    mean, weight_of_own = op(scores, target, weight, reduction, ignore_index)
    own = weight_of_own.to(_real(weight_of_own.dtype))
    total = total_of(own)
    counted = (mean * (own * devices / total)).to(mean.dtype)
    if weight is None:
        counted = counted.masked_fill((own == 0) & (total != 0), 0)
    else:  # rows that weigh nothing together may not do so each
        added = op(scores, target, weight, 2, ignore_index)[0]
        counted = torch.where(own == 0, (added * (devices / total)).to(mean.dtype), counted)
    return counted, total.to(weight_of_own.dtype)


def _added(x: torch.Tensor, mesh: Any, mesh_dims: Sequence[int]) -> torch.Tensor:
    for m in mesh_dims:
        x = reduce_value(Partial("sum"), x, mesh, m)
    return x


def _weight(scores: DTensorSpec, mesh_dims: Sequence[int]) -> DTensorSpec:
    """How the weight of own rows lies before it is added up."""
    pending = [Partial("sum") if m in mesh_dims else Replicate() for m in range(scores.mesh.ndim)]
    meta: Any = scores.tensor_meta
    number = TensorMeta(torch.Size(()), (), _real(meta.dtype))
    return DTensorSpec(scores.mesh, tuple(pending), number)


def _real(dtype: torch.dtype) -> torch.dtype:
    """Of real numbers, one that holds counts as exactly as a kernel adds them up."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
