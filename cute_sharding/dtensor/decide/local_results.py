"""Lays out the results of ops whose operands are moved first, by their global strides.

An op lays out its result like its operands. If all local operands follow the strides of the whole
tensor, the result does too. A moved operand does so unless it is expanded: it then has memory for
every row on each device, and the op may follow its layout instead of the others'.
"""

from __future__ import annotations

from typing import Any

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.order import laid_out


def in_order(found: Any, schema: OpSchema) -> Any:
    """The answer for an op that is no view; if it redistributes operands, its local results are
    laid out by their global strides.
    """
    wanted = found.redistribute_schema
    answer = wanted and answers.answer_of(wanted)
    if wanted is None or schema.op._schema.is_mutable or (answer and answer.takes_all):
        return found
    metas = [
        spec.tensor_meta if isinstance(spec, DTensorSpec) else None
        for spec in answers.specs_of_results(found)
    ]
    if not any(meta is not None and len(meta.shape) > 1 for meta in metas):
        return found
    run = answers.kernel_of(found, schema)

    def function(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        if not isinstance(results, (tuple, list)):
            return laid_out(results, metas[0])
        laid = [
            result if result is None else laid_out(result, meta)
            for result, meta in zip(results, metas)
        ]
        return tuple(laid) if isinstance(results, tuple) else laid

    return answers.instead(found, schema, function)
