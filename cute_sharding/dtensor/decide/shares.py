"""Averages over devices with blocks of different sizes: each device counts by its share.

If a device has w of W elements, its own mean counts w / W times in the mean of all, and a sum is
left pending. The numbers of elements follow from the sizes.

In a loss of classes, sizes do not say how many rows count: some may be ignored. The op returns
their total weight beside the loss; it is summed over the devices with the loss (on stock with its
gradient): one number. Each of N devices counts N w / W times in an average, as on stock. That is
exactly 1 if all have rows of equal weight: a loss that is right on stock has the same bits here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.redistribution_hook import reduce_value
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
)
from cute_sharding.propagation.assign import Assignment
from cute_sharding.propagation.operands import Part
from cute_sharding.relations.signature import Signature


def _left_pending(found: Assignment, op: str) -> list[int]:
    """The mesh dims whose cuts leave this reduction pending in the first result."""
    return [
        m
        for m, part in enumerate(found.results[0])
        if part == op and not any(parts[m] == op for parts in found.operands)
    ]


def of_results(shares: str | None, found: Assignment) -> list[tuple[Part, ...]]:
    """The parts of the results by mesh dim. The total weight of all rows is on every device with a
    mean of them; and nothing reads it beside losses of each row.
    """
    if shares != "rows":
        return list(found.results)
    pending = _left_pending(found, "sum")
    first, *others = found.results
    return [
        first,
        *(
            tuple([part if m in pending else None for m, part in enumerate(parts)])
            for parts in others
        ),
    ]


def by_shares(
    shares: str,
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    found: Assignment,
) -> Callable[..., Any] | None:
    """What runs in place of a mean that is left pending, so that each device counts by its share:
    an average of rows; or a sum, where equal blocks would leave an average. None if none is left.
    """
    mesh_dims = _left_pending(found, "avg" if shares == "rows" else "sum")
    mesh = specs[0].mesh
    if not mesh_dims:
        return None
    if shares == "rows":
        total = partial(_add_up, mesh=mesh, mesh_dims=mesh_dims)
        devices = prod(mesh.size(m) for m in mesh_dims)
        return partial(_by_weights, schema.op, total, devices)
    dims = _dims_of_elements(signature)
    places = [at for at, arg in enumerate(schema.args_schema) if isinstance(arg, DTensorSpec)]
    n = prod([specs[i].shape[d] for i, d in dims])
    counted = [(places[i], d) for i, d in dims]
    return partial(_by_elements, schema.op, counted, n)


def _dims_of_elements(signature: Signature) -> list[tuple[int, int]]:
    """For each reduced name, an operand that has all its rows, and the dim: (operand, dim). (A dim
    that is broadcast has another name.)
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
    """The part of a device in a mean of ``n`` elements; ``dims`` count its own elements."""
    mean = op(*args, **kwargs)
    counted = share(prod([args[at].shape[d] for at, d in dims]), n, mean)
    return (mean * counted).to(mean.dtype).masked_fill(counted == 0, 0)


def share(own: Any, n: Any, x: torch.Tensor) -> torch.Tensor:
    """A device's share, ``own`` of ``n`` elements, as a factor of ``x``."""
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
    """The part of a device in an average over ``devices``, and the total weight of all rows."""
    mean, weight_of_own = op(scores, target, weight, reduction, ignore_index)
    own = weight_of_own.to(_real(weight_of_own.dtype))
    total = total_of(own)
    counted = (mean * (own * devices / total)).to(mean.dtype)
    if weight is None:
        counted = counted.masked_fill((own == 0) & (total != 0), 0)
    else:  # weights that add up to 0 need not all be 0
        added = op(scores, target, weight, 2, ignore_index)[0]
        counted = torch.where(own == 0, (added * (devices / total)).to(mean.dtype), counted)
    return counted, total.to(weight_of_own.dtype)


def _add_up(x: torch.Tensor, mesh: Any, mesh_dims: Sequence[int]) -> torch.Tensor:
    for m in mesh_dims:
        x = reduce_value(Partial("sum"), x, mesh, m)
    return x


def _real(dtype: torch.dtype) -> torch.dtype:
    """A real dtype that holds counts as exactly as a kernel sums them up."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
