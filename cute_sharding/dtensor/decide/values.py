"""Ops whose results are values, or have sizes that depend on values; and losses with a sharded
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import count
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.replaced import dispatch, op_schemas
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.local_tensors import tree_map
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorMeta,
    as_replica,
    dtensor_of,
    is_dtensor,
)
from cute_sharding.dtensor.run.groups import on_each_rank
from cute_sharding.dtensor.run.op_plan import OpPlan
from cute_sharding.dtensor.run.placements import without
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.relations.table.indexing import READ_BY_MASK

# -- losses ----------------------------------------------------------------------------------------
# Placements that loss_parallel takes. With a sharded vocabulary, torch's losses need logits whose
# other dims have plain shards, and targets that are sharded like the logits; and no label
# smoothing.


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
            count(op_schemas.name_of(op), "gate")
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
        if torch.ops.aten.nll_loss_forward.default not in op_schemas.op_handlers():
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


# -- values ----------------------------------------------------------------------------------------
# Ops whose results have sizes that depend on values, such as ``nonzero``, or are Python values.
#
# No shape of the operands tells the sizes, so the propagator has no specs of the results. Each
# device runs the op on whole operands, and has the same results as every other: replicas. torch
# raises, also if the operands are replicas. ``bincount`` needs only the greatest number of all, and
# then counts what each device has.
#
# ``x[mask]`` is two ops: the numbers of the masked rows, which depend on the whole mask, and these
# rows of ``x``, of which other dims stay sharded. That is how torch runs it on one device.


def by_numbers(question: Question) -> OpPlan | None:
    """The plan for an op that reads rows by a mask; None for all other ops."""
    schema = question.schema
    if question.name not in READ_BY_MASK or not op_schemas.is_by_mask(schema):
        return None
    return OpPlan(schema, None, finishes=_by_numbers)


def of_values(question: Question) -> OpPlan | None:
    """The plan for an op of which torch says that its results depend on values; None if it also
    writes. (In a traced program the op is traced on local tensors: dynamo then has the sizes as
    unbacked symbols, or breaks the graph.)
    """
    schema = question.schema
    if schema.op._schema.is_mutable:
        return None
    if question.counts and not is_tracing() and question.specs[0].shape.numel():
        # The weights lie as what is counted.
        placements = without((Partial,), question.specs[0].placements)
        needs = op_schemas.replaced_specs(schema, lambda _: placements)
        count(question.name, "signature")
        return OpPlan(schema, None, needs, by_plan=True, finishes=_counted)
    count(question.name, "gate")
    whole = op_schemas.replaced_specs(schema, lambda spec: (Replicate(),) * spec.mesh.ndim)
    return OpPlan(schema, None, whole, by_plan=True, finishes=_on_whole_operands)


def _on_whole_operands(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, found: Any
) -> Any:
    info.output_sharding, mesh = found, info.compute_mesh
    if mesh._is_current_rank_part_of_mesh():
        results = dispatch.dispatcher()._dispatch_get_local_results_slow_path(op, args, info)
    else:  # a rank outside of the mesh has no values
        args, kwargs = tree_map(_without_values, (args, kwargs))
        results = op(*args, **kwargs)
    return tree_map(lambda leaf: as_replica(leaf, mesh) if _is_tensor(leaf) else leaf, results)


def _counted(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, found: Any) -> Any:
    """Counts of what each device has, of as many bins on all; their sum is pending."""
    x, mesh = args[0], info.compute_mesh
    if not mesh._is_current_rank_part_of_mesh():
        return _on_whole_operands(op, args, kwargs, info, found)
    placements = without((Partial,), x.placements)
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    bins = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    x = _redistribute(x, placements)
    least, most = map(int, x.aminmax())
    if least < 0:
        return op(torch.full((1,), least))  # which raises, on all ranks
    given = [x, *([] if weights is None else [_redistribute(weights, placements)])]
    is_short = weights is not None and weights.dtype is torch.float32
    dtype = torch.int64 if weights is None else torch.float32 if is_short else torch.float64

    count = max(bins, most + 1) if bins >= 0 else bins  # which raises, on all ranks

    def of_rank(_: int, *locals_: torch.Tensor) -> torch.Tensor:
        return op(*locals_, minlength=count).to(dtype)

    local = on_each_rank(of_rank, *[each._local_tensor for each in given])
    pending = tuple([Replicate() if isinstance(p, Replicate) else Partial() for p in placements])
    meta = TensorMeta(torch.Size((count,)), (1,), dtype)
    return dtensor_of(local, DTensorSpec(mesh, pending, meta), requires_grad=False)


def _without_values(leaf: Any) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if is_dtensor(leaf) else leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _by_numbers(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, found: Any
) -> Any:
    """``x[:, mask]``, by the numbers of rows of each dim that the mask stands for."""
    x, indices = args
    numbers: list[Any] = []
    for index in indices:
        numbers += _numbers(index) if _is_mask(index) else [index]
    return op(x, numbers, **kwargs)


def _is_mask(index: Any) -> bool:
    return _is_tensor(index) and index.dtype in (torch.bool, torch.uint8)


def _numbers(mask: torch.Tensor) -> Sequence[torch.Tensor]:
    return (mask != 0).nonzero().unbind(1)
