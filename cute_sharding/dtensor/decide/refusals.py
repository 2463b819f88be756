"""Errors for ops without a rule, which say what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.registry import name_of
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.placements import text


def in_words(error: Exception, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Exception:
    """torch's error for an op without a rule, or one that writes results whose shape depends on
    values; the message says what to do. The class stays the same: torch decomposes some ops on this
    error.
    """
    given = ", ".join(f"{tuple(spec.shape)} as {text(spec.placements)}" for spec in specs)
    if not isinstance(error, NotImplementedError):
        told = (
            f"{name_of(schema.op)} of {given} is not possible, because the op writes to a tensor, "
            "and what it writes has a shape that depends on values. Use the op that returns a new "
            "tensor. Or call the op on .full_tensor() on each rank."
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
