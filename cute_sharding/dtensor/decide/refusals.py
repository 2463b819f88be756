"""Errors for ops without a rule, which say what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.dtensor.replaced.op_schemas import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpSchema,
)
from cute_sharding.dtensor.replaced.registry import name_of
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.placements import text


def in_words(error: Exception, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Exception:
    """torch's error for an op without a rule, or with results whose shape depends on values; the
    message says what to do. The class stays the same: torch decomposes some ops on this error.
    """
    given = ", ".join(f"{tuple(spec.shape)} as {text(spec.placements)}" for spec in specs)
    if isinstance(error, DynamicOutputShapeException):
        told = (
            f"{name_of(schema.op)} of {given} is not possible, because the shape of the result "
            "depends on the values of the tensor, and each device has only some of the values. Use "
            "an op whose result has the shape of the tensor: torch.where(mask, x, 0), masked_fill, "
            "or mask.sum() for a count. Or call the op on .full_tensor() on each rank."
        )
    elif isinstance(error, DataDependentOutputException):
        told = (
            f"{name_of(schema.op)} of {given}: the result is a Python value that depends on the "
            "values of the whole tensor, and each device has only some of these values. Call "
            ".full_tensor() first, on each rank; or call .item() on the result of an op that "
            "returns a tensor, such as (x - y).abs().max()."
        )
    else:
        told = (
            f"{error} The operands are {given}. Call the op on the whole tensor, .full_tensor(), "
            "on each rank. Or redistribute to Replicate, call the op on .to_local(), and pass the "
            "result to DTensor.from_local. Or register a rule: "
            "torch.distributed.tensor.experimental.register_sharding."
        )
    found = type(error)(told)
    vars(found).update(vars(error))
    return found
