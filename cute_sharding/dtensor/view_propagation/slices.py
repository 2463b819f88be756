"""Slices that take a whole dim: they leave its placements alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_sharding.dtensor.torch_private import answers, op_schemas, registry
from cute_sharding.ops.rules.parts import is_whole

# Slices that a compiler writes for the `:` of `x[:, :, None]`, which eager programs never run:
# (overload, where its arguments dim, start, end, step begin).
WHOLE_SLICES = {"slice.Tensor": 1, "slice_backward.default": 2}


def slice_strategy(
    first: int, stock: registry.Registration
) -> Callable[[op_schemas.OpSchema], answers.OpStrategy]:
    """The strategy of a slice: one that takes a whole dim leaves its placements alone; torch
    gathers the dim where its size is symbolic. All others are torch's.
    """

    def strategy(schema: op_schemas.OpSchema) -> answers.OpStrategy:
        given: Any = schema.args_schema[0]
        if not is_whole(*schema.args_schema[first + 1 :]):
            return stock.strategy(schema)  # type: ignore[misc]
        result = answers.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            result.strategies.append(
                answers.op_spec(
                    given, spec, spec.mesh, tuple(spec.placements), tuple(spec.placements)
                )
            )
        return result

    return strategy
