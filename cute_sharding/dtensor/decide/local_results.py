"""Results of ops lie in the order of their strides, on every rank.

A kernel lays out its result like its operands. If all local operands have the memory order of the
global strides, so has the result, with two exceptions. A redistributed operand was expanded: now it
has memory for every row on each device, and the kernel may follow its order instead of another
operand's. Or torch predicts other strides than the kernel makes, since it predicts them with other
code, on a device that computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, TensorMeta
from cute_sharding.dtensor.run.order import is_order_of_all, lay_out, lies_row_by_row
from cute_sharding.relations.table import ROWS
from cute_sharding.relations.table.along import pointwise


def in_order(found: Any, schema: OpSchema) -> Any:
    """The answer with local results laid out in the order of their global strides, if the op makes
    new results and redistributes operands or has a kernel that may use another order.
    """
    wanted = found.redistribute_schema
    if (wanted and answers.answer_of(wanted).takes_all) or any(
        each.alias_info is not None for each in schema.op._schema.returns
    ):
        return found
    metas = [
        spec.tensor_meta if isinstance(spec, DTensorSpec) else None
        for spec in answers.specs_of_results(found)
    ]
    several = [meta for meta in metas if meta is not None and len(meta.shape) > 1]
    if not several or (wanted is None and not _may_lie_otherwise(schema, several)):
        return found
    run = answers.kernel_of(found, schema)

    def function(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        if not isinstance(results, (tuple, list)):
            return lay_out(results, metas[0])
        laid = [
            result if result is None else lay_out(result, meta)
            for result, meta in zip(results, metas)
        ]
        return tuple(laid) if isinstance(results, tuple) else laid

    return answers.with_fields(found, schema, runs=function)


def _may_lie_otherwise(schema: OpSchema, results: Sequence[TensorMeta]) -> bool:
    """Whether the op's kernel may lay out its results otherwise than torch predicts. No kernel does
    if all operands are row-major, or if the call gives a memory format. Otherwise a pointwise op
    follows the strides of its operands, the first operand first; for other ops the table says which
    kernels do; for ops without a row it is unknown, so they may.

    (Compilers lay out their results as torch predicts.)
    """
    op, specs = schema.op, op_schemas.specs_of(schema)
    operands = [spec.tensor_meta for spec in specs if spec.tensor_meta is not None]
    if (
        is_tracing()
        or len(operands) < len(specs)
        or all(map(lies_row_by_row, operands))
        or op_schemas.place_of(op, "memory_format") is not None
    ):
        return False
    row = ROWS.get(registry.name_of(op))
    if torch.Tag.pointwise not in op.tags and (row is None or row.rule is not pointwise):
        return row is None or row.own_order
    if row is not None and row.own_order:
        return True
    return not all(is_order_of_all(meta, operands) for meta in results)
