"""Ops whose results have sizes that depend on values, such as ``nonzero``, or are Python values.

No shape of the operands tells the sizes, so the propagator has no specs of the results. Each device
runs the op on whole operands, and has the same results as every other: replicas. torch raises, also
if the operands are replicas.

``x[mask]`` is two ops: the numbers of the masked rows, which depend on the whole mask, and these
rows of ``x``, of which other dims stay sharded. That is how torch runs it on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import count
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.replaced import dispatch, op_schemas
from cute_sharding.dtensor.replaced.local_tensors import tree_map
from cute_sharding.dtensor.replaced.tensor_specs import Replicate, as_replica, is_dtensor
from cute_sharding.dtensor.run.op_plan import OpPlan
from cute_sharding.relations.table.indexing import READ_BY_MASK


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
