"""Slices of a sharded dim in a compiled program whose sizes are symbolic: one op that the compiler
does not look into, and that runs what an eager program runs, on the sizes of each call.

The result keeps the operand's placements, so nothing is decided by sizes. What the op is to do is
written in a string, for graphs are kept on disk (see redistributing/dynamic.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.compiled.library import library
from cute_sharding.dtensor.compiled.local_sizes import local_size_of
from cute_sharding.dtensor.compiled.symbols import has_values
from cute_sharding.dtensor.movement.running import Runner
from cute_sharding.dtensor.redistributing.dynamic import mesh_named, name_of, parsed
from cute_sharding.dtensor.redistributing.placements import text
from cute_sharding.dtensor.torch_private import (
    answers,
    collective_ops,
    dispatch,
    dispatch_modes,
    registry,
    symints,
)
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec, Replicate, Shard
from cute_sharding.movement import BY_OVERLOAD, Movement
from cute_sharding.ops.rules.parts import is_whole
from cute_sharding.redistribution.chains import Chains

# Ops of one operand that keep its dims, and where the dim stands among their arguments; after it
# come start, end and step.
SLICES = {"slice.Tensor": 1, "slice_backward.default": 2}


def dynamic_of(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Any | None:
    """The op as a movement for any sizes; None where it is no slice of a dim that one mesh dim cuts
    into plain shards.
    """
    place = SLICES.get(name)
    (spec, *others) = specs
    if place is None or others or not all(type(p) in (Shard, Replicate) for p in spec.placements):
        return None
    shape, arguments = tuple(spec.shape), schema.args_schema
    if not (symints.has_shape_env(shape, arguments[1:]) and has_values(shape)):
        return None
    d = int(arguments[place]) if len(arguments) > place else 0  # type: ignore[call-overload]
    d %= len(shape)
    cutting = [m for m, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim == d]
    if len(cutting) != 1 or spec.mesh.size(cutting[0]) == 1 or is_whole(*arguments[place + 1 :]):
        return None
    metas = registry.output_metas(schema)
    count(name, "exchanged")
    logger.debug(
        "%s: %s as it is, for any sizes: one exchange, planned in each call",
        name,
        text(spec.placements),
    )
    runner = _Runner(name, spec, tuple(metas.shape))
    return answers.by_function(schema, runner, spec.mesh, [tuple(spec.placements)], metas)


class _Runner:
    """Called with the op's arguments, the local tensor first."""

    def __init__(self, name: str, spec: DTensorSpec, onto: tuple[Any, ...]) -> None:
        self._name, self._spec, self._onto = name, spec, onto

    def __call__(self, local: torch.Tensor, *arguments: Any) -> torch.Tensor:
        mesh, spec = self._spec.mesh, self._spec
        whole = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, spec.tensor_meta)
        dispatch.observe(spec, whole, self._name)
        numbers = self._numbers(arguments)
        chains: Chains = tuple(
            [
                tuple(
                    [
                        (m, 1)
                        for m, p in enumerate(spec.placements)
                        if isinstance(p, Shard) and p.dim == d and mesh.size(m) > 1
                    ]
                )
                for d in range(len(self._onto))
            ]
        )
        how = repr((name_of(mesh), self._name, chains, [n is None for n in numbers]))
        with dispatch_modes.of_this_rank():  # another's may be for sizes that are numbers
            moved = torch.ops.cute_sharding.move(
                local,
                list(spec.shape),
                list(self._onto),
                [0 if n is None else n for n in numbers],
                how,
            )
        # Other ranks wait, also where this one gets nothing.
        return collective_ops.waited_in_graph(moved)

    def _numbers(self, arguments: Sequence[Any]) -> list[Any]:
        """dim, start, end and step"""
        given = list(arguments[SLICES[self._name] - 1 :])
        return given + [0, None, None, 1][len(given) :]


def _movement(
    shape: Sequence[int], onto: Sequence[int], numbers: Sequence[int], how: str
) -> tuple[Movement, Any, str]:
    key, name, chains, missing = parsed(how)
    mesh = mesh_named(key, how)
    given = [None if gone else n for n, gone in zip(numbers, missing)]
    sizes = [tuple(onto)] if name == "slice_backward.default" else []
    move = BY_OVERLOAD[name].move(tuple(shape), *sizes, *given)
    assert move is not None
    return Movement(move, tuple(mesh.shape), (chains,), (chains,)), mesh, name


def _move(
    local: torch.Tensor, shape: list[int], onto: list[int], numbers: list[int], how: str
) -> torch.Tensor:
    movement, mesh, name = _movement(shape, onto, numbers, how)
    runner = Runner(movement, mesh, movement.mesh_dims, (), (), (), name)
    return runner.copies([local])[0].contiguous()


def _shape_of(
    local: torch.Tensor, shape: list[Any], onto: list[Any], numbers: list[Any], how: str
) -> torch.Tensor:
    key, _, chains, _ = parsed(how)
    mesh = mesh_named(key, how)
    device = mesh.get_coordinate()
    rows = [
        local_size_of(n, *((factor, mesh.size(m), device[m]) for m, factor in chain))
        for n, chain in zip(onto, chains)
    ]
    return local.new_empty(rows)


library.define(
    "move(Tensor local, SymInt[] shape, SymInt[] onto, SymInt[] numbers, str how) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.impl("move", _move, "CompositeExplicitAutograd")
torch.library.register_fake("cute_sharding::move", _shape_of, lib=library)
