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
            f"{name_of(schema.op)} of {given}: the shape of the result depends on the values of "
            "the tensor, and each device has only some of these values, so the result has no "
            "placements. Keep the shape: "
            "torch.where(mask, "
            "x, 0), masked_fill, or mask.sum() for a count. Or take it of the whole, "
            ".full_tensor(), on each rank."
        )
    elif isinstance(error, DataDependentOutputException):
        told = (
            f"{name_of(schema.op)} of {given}: the result is a value of Python, of values of which "
            "each device has some. Take .full_tensor() of it first, on each rank; or .item() of an "
            "op that gives a tensor, as (x - y).abs().max() does."
        )
    else:
        told = (
            f"{error} It was given {given}. Take it of the whole, .full_tensor(), on each rank; or "
            "of .to_local() of a replica, .redistribute(placements=[Replicate(), ...]), and "
            "DTensor.from_local the result; or register a rule: "
            "torch.distributed.tensor.experimental.register_sharding."
        )
    found = type(error)(told)
    vars(found).update(vars(error))
    return found
