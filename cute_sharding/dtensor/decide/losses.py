"""Placements that loss_parallel takes. With a sharded vocabulary, torch's losses need logits whose
other dims have plain shards, and targets that are sharded like the logits; and no label smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import count
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    dtensor_of,
    is_dtensor,
)
from cute_sharding.dtensor.run.placements import without
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor


def loss_handler(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of torch's: it redistributes logits and targets that torch would refuse,
    and then calls torch's.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at, targets = op_schemas.place_of(op, "self"), op_schemas.place_of(op, "target")
        if at is None or not is_dtensor(args[at]):
            return stock(op, args, kwargs)
        given = list(args)
        given[at] = _redistribute(args[at], without((StridedShard,), args[at].placements))
        if targets is not None and is_dtensor(args[targets]):
            given[targets] = _redistribute(args[targets], _of_targets(given[at]))
        if any(a is not b for a, b in zip(args, given)):
            count(registry.name_of(op), "gate")
        return stock(op, tuple(given), kwargs)

    return handler


def outside_loss_parallel(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs an op which writes to a Partial, and raises within loss_parallel. There
    the gradient of log_softmax is part of that of the loss. F.cross_entropy with label_smoothing
    writes to a pending sum between the two, which torch refuses, and the gradient would be wrong.
    """

    def refusing(*args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            RuntimeError: loss_parallel is in force.
        """
        if torch.ops.aten.nll_loss_forward.default not in registry.op_handlers():
            return run(*args, **kwargs)
        raise RuntimeError(
            f"{run} cannot write to a Partial within loss_parallel. For example, the gradient of "
            "F.cross_entropy with label_smoothing would be wrong. First redistribute the written "
            "tensor, move the op out of loss_parallel, or leave out label_smoothing."
        )

    return refusing


def _of_targets(logits: Any) -> list[Placement]:
    """The placements of the logits, with the dim of classes replicated."""
    classes = 1 if logits.ndim > 1 else 0
    return [
        Shard(p.dim - (p.dim > classes))
        if isinstance(p, Shard) and p.dim != classes
        else Replicate()
        for p in logits.placements
    ]


def _redistribute(tensor: Any, placements: Sequence[Placement]) -> Any:
    """The tensor in these placements; outside of autograd."""
    if tuple(placements) == tuple(tensor.placements):
        return tensor
    spec = tensor._spec
    target = DTensorSpec(spec.mesh, tuple(placements), spec.tensor_meta)
    local = redistribute_local_tensor(tensor._local_tensor, spec, target)
    return dtensor_of(local, target, requires_grad=False)
