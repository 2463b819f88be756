"""Slices that take a whole dim: they leave its placements alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cute_sharding.dtensor import compat

# Slices that a compiler writes for the `:` of `x[:, :, None]`, which eager programs never run:
# (overload, where its arguments dim, start, end, step begin).
WHOLE_SLICES = {"slice.Tensor": 1, "slice_backward.default": 2}


def slice_strategy(
    first: int, stock: compat.Registration
) -> Callable[[compat.OpSchema], compat.OpStrategy]:
    """The strategy of a slice: one that takes a whole dim leaves its placements alone; torch
    gathers the dim where its size is symbolic. All others are torch's.
    """

    def strategy(schema: compat.OpSchema) -> compat.OpStrategy:
        given: Any = schema.args_schema[0]
        arguments: list[Any] = list(schema.args_schema[first:])
        _, start, end, step = arguments + [0, None, None, 1][len(arguments) :]
        whole = (
            (start is None or (type(start) is int and start == 0))
            and (end is None or (type(end) is int and end >= sys.maxsize))
            and type(step) is int
            and step == 1
        )
        if not whole:
            return stock.strategy(schema)  # type: ignore[misc]
        result = compat.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            result.strategies.append(
                compat.op_spec(
                    given, spec, spec.mesh, tuple(spec.placements), tuple(spec.placements)
                )
            )
        return result

    return strategy
