"""What the propagator answers for a movement op that touches a sharded dim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from cute_sharding.dtensor.bookkeeping import ledger
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.movement.copies import note_movement
from cute_sharding.dtensor.movement.dynamic import dynamic_of
from cute_sharding.dtensor.movement.running import Runner
from cute_sharding.dtensor.redistributing.groups import groups_at_hand
from cute_sharding.dtensor.redistributing.placements import cut_of, placement_of, text
from cute_sharding.dtensor.redistributing.reading import agree
from cute_sharding.dtensor.torch_private import (
    answers,
    dispatch_modes,
    op_schemas,
    process_groups,
    registry,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.movement import BY_OVERLOAD, Movement, chosen
from cute_sharding.movement.choose import Cuts

# Pending reductions that rows of results which are made of no row can be given a part in: what the
# first device of the mesh dim has there, and what the others have; True: all the fill.
_FILLED = {
    "sum": (True, 0),
    "product": (True, 1),
    **dict.fromkeys(("avg", "max", "min", "band", "bor"), (True, True)),
}


def movement_first(
    others: Callable[[OpSchema], Any], traced: Callable[[], None]
) -> Callable[[OpSchema], Any]:
    """The propagator's way from an op on specs to the placements that it needs and gives: that of a
    movement, and else that of ``others``. ``traced`` is called where it becomes part of a graph.
    """

    def decide(schema: OpSchema) -> Any:
        name = registry.name_of(schema.op)
        if name in BY_OVERLOAD:
            found = movement_of(name, schema, op_schemas.specs_of(schema))
            if found is not None:
                if dispatch_modes.is_tracing():
                    traced()
                return found
        return others(schema)

    return decide


def movement_of(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Any | None:
    """The op as a movement; None where it is none, touches no sharded dim, or has arguments or
    placements for which none is known: these are for others to answer.
    """
    row = BY_OVERLOAD.get(name)
    if row is None or not specs or not _is_known(specs):
        return None
    if symints.is_symbolic(*(tuple(s.shape) for s in specs), schema.args_schema[1:]):
        return dynamic_of(name, schema, specs)
    pending = _pending(specs)
    if pending is None:
        count(name, "stock")
        return None
    shapes = [tuple(spec.shape) for spec in specs]
    args, kwargs = op_schemas.with_shapes(schema, shapes)
    try:
        move = row.move(*args, **kwargs)
    except (ValueError, IndexError, TypeError):
        return None  # torch says what is wrong
    if move is None or (pending and move.fill != 0 and not move.adds and _is_foreign(pending)):
        return None
    mesh = specs[0].mesh
    wanted = [_without_windows(spec, len(x)) for spec, x in zip(specs, move.inputs)]
    cuts = tuple([tuple([cut_of(p) for p in placements]) for placements in wanted])
    # Also what torch has no rule for, or refuses, as splits of nothing; or gathers wherever a dim
    # has fewer rows than devices.
    anyway = (
        registry.is_derived(schema.op)
        or (move.triangle is not None and any(cut for some in cuts for cut in some))
        or wanted != _given(specs)
        or any(_has_few_rows(spec, shape) for spec, shape in zip(specs, shapes))
    )
    choice = chosen(move, cuts, tuple(mesh.shape), anyway=anyway)
    if choice is None:
        return None
    dims = _group(mesh, choice.movement)
    metas = registry.output_metas(schema)
    if dims is None or metas is None:
        count(name, "stock")
        return None
    outputs = [_placements(some, specs[0], pending) for some in choice.cuts]
    _note(name, schema, choice.movement, specs, outputs)
    runner = Runner(
        choice.movement,
        mesh,
        dims,
        tuple(specs),
        tuple(map(tuple, wanted)),
        tuple(pending.items()),
        registry.name_of(schema.op),
        note_movement if schema.op._schema._is_view_op() else None,
    )
    return answers.by_function(schema, runner, mesh, outputs, metas)


def _is_known(specs: Sequence[DTensorSpec]) -> bool:
    """Whether all are on one mesh of several devices, in placements whose rows are known."""
    mesh = specs[0].mesh
    return (
        mesh.size() > 1
        and all(spec.mesh == mesh for spec in specs)
        and all(
            type(p) in (Shard, StridedShard, Replicate, Partial)
            for spec in specs
            for p in spec.placements
        )
        and not any(symints.is_symbolic(tensor_specs.split_factors(spec)) for spec in specs)
        and all(
            spec.use_strided_shard_as_shard_order
            or spec.shard_order is None
            or DTensorSpec.is_default_device_order(spec.shard_order)
            for spec in specs
        )
        and all(
            not spec.use_strided_shard_as_shard_order
            or agree(tuple(spec.shape), spec, tuple(spec.placements))
            for spec in specs
        )
    )


def _pending(specs: Sequence[DTensorSpec]) -> dict[int, str] | None:
    """By mesh dim the reduction that is pending of all operands; None where it is not of all."""
    found: dict[int, str] = {}
    for m, of in enumerate(zip(*(spec.placements for spec in specs))):
        if any(isinstance(p, Partial) for p in of):
            if len({*of}) > 1:
                return None
            found[m] = of[0].reduce_op
    return found


def _has_few_rows(spec: DTensorSpec, shape: Sequence[int]) -> bool:
    """Whether there are more devices than rows to cut; or no elements."""
    parts = [1] * len(shape)
    for p, n in zip(spec.placements, spec.mesh.shape):
        if isinstance(p, (Shard, StridedShard)):
            parts[p.dim] *= n
    return 0 in shape or any(n < k for n, k in zip(shape, parts))


def _is_foreign(pending: dict[int, str]) -> bool:
    return any(op not in _FILLED for op in pending.values())


def _given(specs: Sequence[DTensorSpec]) -> list[tuple[Placement, ...]]:
    return [tuple(spec.placements) for spec in specs]


def _without_windows(spec: DTensorSpec, ndim: int) -> tuple[Placement, ...]:
    """The placements without cuts of dims from ``ndim`` on: the rows within a window stay
    together.
    """
    return tuple(
        [
            Replicate() if isinstance(p, (Shard, StridedShard)) and p.dim >= ndim else p
            for p in spec.placements
        ]
    )


def _placements(cuts: Cuts, given: DTensorSpec, pending: dict[int, str]) -> tuple[Placement, ...]:
    return tuple(
        [given.placements[m] if m in pending else placement_of(cut) for m, cut in enumerate(cuts)]
    )


def _group(mesh: Any, movement: Movement) -> tuple[int, ...] | None:
    """The mesh dims whose ranks exchange, those that take part and no more than it takes for them
    to have a process group; None where they have none.
    """
    dims = movement.mesh_dims
    if len(dims) < 2:
        return dims
    if not process_groups.has_groups(mesh):
        return None
    groups, others = groups_at_hand(mesh), [m for m in range(mesh.ndim) if m not in dims]
    for more in range(len(others) + 1):
        for some in combinations(others, more):
            among = tuple(sorted((*dims, *some)))
            if among in groups or tuple([m for m in among if mesh.size(m) > 1]) in groups:
                return tuple([m for m in among if mesh.size(m) > 1])
    return None


def _note(
    name: str,
    schema: OpSchema,
    movement: Movement,
    specs: Sequence[DTensorSpec],
    outputs: Sequence[tuple[Placement, ...]],
) -> None:
    """In the counts, the log, and the ledger of meshes on which torch would have other
    placements.
    """
    if any(isinstance(p, (Shard, StridedShard)) for some in outputs for p in some):
        ledger.note(specs[0].mesh, lambda: True)
    count(name, "exchanged" if movement.communicates else "free")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s of %s: %s -> %s, %s",
            name,
            ", ".join(str(tuple(spec.shape)) for spec in specs),
            ", ".join(text(spec.placements) for spec in specs),
            ", ".join(dict.fromkeys(map(text, outputs))),
            f"{movement.received_elements} elements received on mesh dims {movement.mesh_dims}"
            if movement.communicates
            else "free",
        )
