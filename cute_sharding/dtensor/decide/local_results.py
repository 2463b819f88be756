"""What is done with an op's local results: pending numbers are reduced, and all lie in the order of
their strides, on every rank.

A kernel lays out its result like its operands. If all local operands have the memory order of the
global strides, so has the result, with two exceptions. A redistributed operand was expanded: now it
has memory for every row on each device, and the kernel may follow its order instead of another
operand's. Or operands are not row-major, and the kernel makes other strides than torch predicts,
since it predicts them with other code, on a device that computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, TensorMeta
from cute_sharding.dtensor.run.numbers import pending_of
from cute_sharding.dtensor.run.op_plan import OpPlan
from cute_sharding.dtensor.run.order import lies_row_by_row
from cute_sharding.dtensor.run.placements import without
from cute_sharding.relations.table.products import MADE_BY_ROWS


def with_numbers_finished(plan: OpPlan) -> OpPlan:
    """The plan, by which a result without dims is reduced together with the op if it is pending.

    Except tensors that are written to, and lists of results, such as the norms of all gradients,
    which programs reduce to one number.
    """
    op = plan.schema.op._schema
    if op.is_mutable or any(isinstance(result.type, torch.ListType) for result in op.returns):
        return plan
    pending = tuple(map(pending_of, plan.specs))
    if not any(pending):
        return plan
    finished = plan.placed(
        lambda spec: without((Partial,) if pending_of(spec) else (), spec.placements)
    )
    return replace(finished, pending=pending)


def in_order(plan: OpPlan) -> OpPlan:
    """The plan with local results laid out in the order of their global strides, if the op makes
    new results, and a kernel may lay them out otherwise.
    """
    schema, op = plan.schema, plan.schema.op
    if plan.takes_all or any(each.alias_info is not None for each in op._schema.returns):
        return plan
    metas = [spec.tensor_meta if isinstance(spec, DTensorSpec) else None for spec in plan.specs]
    if all(meta is None or len(meta.shape) < 2 for meta in metas):
        return plan
    is_as_asked = plan.needs is None and plan.function is op
    return (
        plan if is_as_asked and _lies_as_said(schema, metas) else replace(plan, lies=tuple(metas))
    )


def _lies_as_said(schema: OpSchema, results: Sequence[TensorMeta | None]) -> bool:
    """Whether every kernel lays out the results as torch predicts: in compiled programs, for
    row-major operands, and if the call gives a memory format; products of matrices, which are made
    row by row; and pointwise ops whose operands all lie as the results do.
    """
    op = schema.op
    metas = [spec.tensor_meta for spec in op_schemas.specs_of(schema)]
    if (
        is_tracing()
        or op_schemas.place_of(op, "memory_format") is not None
        or all(meta is None or lies_row_by_row(meta) for meta in metas)
    ):
        return True
    made = [meta for meta in results if meta is not None]
    if registry.name_of(op) in MADE_BY_ROWS:
        return all(map(lies_row_by_row, made))
    lying = {
        (tuple(meta.shape), tuple(meta.stride)) for meta in (*metas, *made) if meta is not None
    }
    return torch.Tag.pointwise in op.tags and len(lying - {((), ())}) == 1
