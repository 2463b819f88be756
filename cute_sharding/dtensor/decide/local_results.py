"""Results of ops whose operands are moved first lie in the order of their strides.

An op lays out its result as its operands lie. Where all lie as the strides of the whole say, so
does the result. An operand that is moved does so, but where it is expanded: then it has memory for
every row on each device, and the op may go by its order and not by that of the others. And of
images with one channel on a device a convolution cannot tell the order of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.order import laid_out


def in_order(found: Any, schema: OpSchema) -> Any:
    """The answer for an op that is no view, with local results laid out as their strides say, where
    it redistributes operands.
    """
    wanted = found.redistribute_schema
    answer = wanted and answers.answer_of(wanted)
    if wanted is None or schema.op._schema.is_mutable or (answer and answer.takes_all):
        return found
    run = laying_out(answers.kernel_of(found, schema), found)
    return found if run is None else answers.instead(found, schema, run)


def laying_out(run: Callable[..., Any], found: Any) -> Callable[..., Any] | None:
    """``run``, a function of local arguments, with its results laid out as the strides say that
    the answer ``found`` has for them; None where none has several dims.
    """
    metas = [
        spec.tensor_meta if isinstance(spec, DTensorSpec) else None
        for spec in answers.specs_of_results(found)
    ]
    if not any(meta is not None and len(meta.shape) > 1 for meta in metas):
        return None

    def function(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        if not isinstance(results, (tuple, list)):
            return laid_out(results, metas[0])
        laid = [
            result if result is None else laid_out(result, meta)
            for result, meta in zip(results, metas)
        ]
        return tuple(laid) if isinstance(results, tuple) else laid

    return function
