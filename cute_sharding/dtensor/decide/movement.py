"""The plan for a movement op that touches a sharded dim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cute_sharding.dtensor.bookkeeping.stats import Received, count, count_received, logger
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.door.cuts import some_device_is_empty
from cute_sharding.dtensor.door.understood import are_read_as_order, are_understood
from cute_sharding.dtensor.replaced import op_schemas, registry, symints, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    StridedShard,
)
from cute_sharding.dtensor.run import in_graphs
from cute_sharding.dtensor.run.moved_views import note_views
from cute_sharding.dtensor.run.moving import Movement, comes_back
from cute_sharding.dtensor.run.op_plan import OpPlan, by_function, with_metas
from cute_sharding.dtensor.run.ops import LocalView, Runner
from cute_sharding.dtensor.run.order import lying_apart
from cute_sharding.dtensor.run.placements import cut_of, placement_of, replaced, text
from cute_sharding.dtensor.run.reading import agree
from cute_sharding.dtensor.run.redistribute import received_to
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.slices import is_view
from cute_sharding.propagation.choose import Choice, ShardedMove, chosen
from cute_sharding.propagation.free import Cuts
from cute_sharding.propagation.steps import Way, place_steps
from cute_sharding.relations import Move
from cute_sharding.relations.moves import Shape
from cute_sharding.relations.table import MOVEMENTS, STEPS, ByRows, BySteps

# Pending reduction -> the values of rows that are filled in, so that they reduce to the fill: on
# the first device of the mesh dim, and on the others. True: the fill itself.
_FILLED = {
    "sum": (True, 0),
    "product": (True, 1),
    **dict.fromkeys(("avg", "max", "min", "band", "bor"), (True, True)),
}


def by_movement(question: Question) -> OpPlan | None:
    """The plan for the op by its map of rows, or by several, one after the other. None if it is
    no movement, touches no sharded dim, or its arguments or placements have no known movement:
    others then answer.

    Without the setting ``movement`` only for ops that consist of several views, if these are free:
    torch derives its rule from the decomposition.
    """
    name, schema, specs = question.name, question.schema, question.specs
    row = STEPS.get(name) or (MOVEMENTS.get(name) if question.settings.movement else None)
    if row is None or not specs or not _is_known(specs):
        return None
    if symints.is_symbolic(*(tuple(s.shape) for s in specs), schema.args_schema[1:]):
        if not isinstance(row, ByRows):
            return None
        # Only compiled programs have symbolic sizes: eager programs do not import this.
        from cute_sharding.dtensor.decide.any_sizes import way_for_any_size

        anew = way_for_any_size(name, schema, specs)
        given = [tuple(spec.placements) for spec in specs]
        return anew and _carried_out(question, anew[0], given, _Kept((anew[1],)), anew[2])
    pending, mesh = _pending(specs[: row.reads]), specs[0].mesh
    if pending is None:
        count(name, "stock")
        return None
    own = tuple([tuple([cut_of(p) for p in spec.placements]) for spec in specs])
    find: Any = _at_once if isinstance(row, ByRows) else _in_steps
    way: Way | None = find(question, row, own)
    if way is None or any(_is_wrong_for(pending, each.move) for each in way.exchanges):
        return None
    steps = [
        Movement.on(step, mesh, tuple(pending.items()))
        if isinstance(step, Exchange)
        else LocalView(step, mesh)
        for step in way.steps
    ]
    metas = registry.output_metas(schema)
    if None in steps or metas is None:
        count(name, "stock")
        return None
    if not all(map(is_view, way.exchanges)):
        metas = with_metas(metas, lying_apart)
    given = [
        tuple(spec.placements) if cuts == before else replaced(spec.placements, cuts)
        for spec, before, cuts in zip(specs, own, way.given)
    ]
    _count_received(question, way, given)
    is_one = isinstance(row, ByRows)
    made: Steps = _Anew.of(question, way, steps[0]) if is_one else _Kept(tuple(steps))
    return _carried_out(question, way, given, made, metas)


# Makes the steps of a runner.
Steps: TypeAlias = Callable[[], "tuple[Any, ...]"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Keeps the steps."""

    steps: tuple[Any, ...]

    def __call__(self) -> tuple[Any, ...]:
        return self.steps


@dataclass(frozen=True, slots=True)
class _Anew:
    """One movement, which is made of the op's arguments each time that it is asked for.

    Attributes:
        given, results: the cuts of operands and results.
        dims, pending: the movement's. Groups that are prepared later do not count.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Any
    mesh: Any
    given: tuple[Cuts, ...]
    results: tuple[Cuts, ...]
    dims: tuple[int, ...]
    pending: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, question: Question, way: Way, movement: Any) -> _Anew:
        schema, mesh = question.schema, question.specs[0].mesh
        op, args, kwargs = schema.op, tuple(schema.args_schema), schema.kwargs_schema
        return cls(op, args, kwargs, mesh, way.given, way.results, movement.dims, movement.pending)

    def __call__(self) -> tuple[Any, ...]:
        move = _move_of(OpSchema(self.op, self.args, self.kwargs))
        assert move is not None, "there was one when the op was decided"
        found = ShardedMove(move, self.given, tuple(self.mesh.shape)).to(self.results)
        return (Movement(found.exchange, self.mesh, self.dims, self.pending),)


def _carried_out(
    question: Question,
    way: Way,
    given: Sequence[tuple[Placement, ...]],
    steps: Steps,
    metas: Any,
) -> OpPlan:
    """The plan by which the steps of ``steps`` run in place of the op, on operands that are first
    redistributed to the placements ``given``.
    """
    name, schema, specs = question.name, question.schema, question.specs
    outputs = [replaced(specs[0].placements, cuts) for cuts in way.results]
    brought = given != [tuple(spec.placements) for spec in specs]
    _note(name, way.exchanges, specs, outputs, brought=brought)
    note = note_views if schema.op._schema._is_view_op() else None
    runner = Runner(name, specs, given, steps, metas, note)
    return by_function(schema, runner, specs[0].mesh, outputs, metas)


def _at_once(question: Question, row: ByRows, cuts: tuple[Cuts, ...]) -> Way | None:
    """The way of an op that is one map of rows; None if it just runs on each device's local
    tensors, or has no map for its arguments.
    """
    schema, specs = question.schema, question.specs
    move = _move_of(schema)
    if move is None:
        return None
    choice = _choice(row, schema.op, move, specs, cuts)
    return choice and Way(cuts, move.outputs, choice.cuts, (choice.exchange,))


def _move_of(schema: OpSchema) -> Move | None:
    """The op's map of rows; None if it has none for its arguments."""
    shapes = [tuple(spec.shape) for spec in op_schemas.specs_of(schema)]
    args, kwargs = op_schemas.arguments_with(schema, shapes)
    return in_graphs.move_of(registry.name_of(schema.op), args, kwargs)


def _choice(
    row: ByRows, op: Any, move: Move, specs: Sequence[DTensorSpec], cuts: tuple[Cuts, ...]
) -> Choice | None:
    """The results' placements; None if the op just runs on each device's local tensors."""
    # An exchange also for ops that have no rule in torch; that torch refuses, as splits of empty
    # shards, or gathers if devices are without rows; and for strided shards beside a Partial, which
    # a signature would reduce.
    anyway = (
        registry.is_derived(op)
        or (row.gathers and any(cut for some in cuts for cut in some))
        or any(map(some_device_is_empty, specs))
        or {Partial, StridedShard} <= {type(p) for spec in specs for p in spec.placements}
    )
    mesh = tuple(specs[0].mesh.shape)

    def choose(spare: tuple[int, ...]) -> Choice | None:
        choice = chosen(move, cuts, mesh, anyway=anyway, spare=spare)
        if choice is None:
            return None
        results = [_left_to_right(x, some, specs[0]) for x, some in zip(move.outputs, choice.cuts)]
        return choice if results == [*choice.cuts] else ShardedMove(move, cuts, mesh).to(results)

    spare = _spare(specs)
    choice = choose(spare)
    if spare and choice is not None and op._schema._is_view_op():
        # A write to a part of a replica has to reach the other replicas.
        return choice if comes_back(choice.exchange, specs[0].mesh) else choose(())
    return choice


def _left_to_right(shape: Shape, cuts: Cuts, spec: DTensorSpec) -> Cuts:
    """The cuts of a result. If a dim's strided cuts, at this size, are not left to right
    (run/reading.py), torch would read them as an order of shards: the dim then gets plain cuts.
    """
    if agree(shape, spec, [placement_of(cut) for cut in cuts]):
        return cuts
    strided = {cut[0] for cut in cuts if cut and cut[1] != 1}
    return tuple([(cut[0], 1) if cut and cut[0] in strided else cut for cut in cuts])


def _in_steps(question: Question, row: BySteps, cuts: tuple[Cuts, ...]) -> Way | None:
    """The way of an op of several steps, each a view or a movement. Without the setting
    ``movement`` only if no step exchanges rows.
    """
    schema, (spec,) = question.schema, question.specs
    shape = tuple(spec.shape)
    steps = row.steps(shape, *schema.args_schema[1:])
    way = steps and place_steps(
        steps, shape, cuts[0], tuple(spec.mesh.shape), spare=_spare(question.specs)
    )
    if not way or _left_to_right(way.shapes[0], way.results[0], spec) != way.results[0]:
        return None
    if not question.settings.movement and (
        (way.given != cuts and not row.is_wrong_in_torch) or not any(*cuts) or way.exchanges
    ):
        return None
    return way


def _is_known(specs: Sequence[DTensorSpec]) -> bool:
    """Whether all are on one mesh of several devices, with placements whose rows are known."""
    return (
        specs[0].mesh.size() > 1
        and are_understood(specs)
        and not any(symints.is_symbolic(tensor_specs.split_factors(spec)) for spec in specs)
        and not are_read_as_order(specs)
    )


def _pending(specs: Sequence[DTensorSpec]) -> dict[int, str] | None:
    """Mesh dim -> pending reduction, if all operands have the same ones; None if they differ."""
    found: dict[int, str] = {}
    for m, of in enumerate(zip(*(spec.placements for spec in specs))):
        if any(isinstance(p, Partial) for p in of):
            if len({*of}) > 1:
                return None
            found[m] = of[0].reduce_op
    return found


def _spare(specs: Sequence[DTensorSpec]) -> tuple[int, ...]:
    """Mesh dims that may shard the results though all operands are replicated on them."""
    of_dims = zip(*(spec.placements for spec in specs))
    return tuple([m for m, of in enumerate(of_dims) if all(type(p) is Replicate for p in of)])


def _is_wrong_for(pending: dict[int, str], move: Move) -> bool:
    """Whether the results cannot stay pending: if rows are added up, for other reductions than
    sums; if rows are filled in, for reductions without an entry in ``_FILLED``.
    """
    if move.adds:
        return any(op not in ("sum", "avg") for op in pending.values())
    return move.fill != 0 and any(op not in _FILLED for op in pending.values())


def _note(
    name: str,
    movements: Sequence[Exchange],
    specs: Sequence[DTensorSpec],
    outputs: Sequence[tuple[Placement, ...]],
    *,
    brought: bool,
) -> None:
    """Count and log the op. ``brought``: the operand is redistributed first."""
    exchanges = [movement for movement in movements if movement.communicates]
    count(name, "exchanged" if exchanges or brought else "free")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s of %s: %s -> %s, %s",
            name,
            ", ".join(str(tuple(spec.shape)) for spec in specs),
            ", ".join(text(spec.placements) for spec in specs),
            ", ".join(dict.fromkeys(map(text, outputs))),
            ", ".join(
                f"{each.received_elements} elements received on mesh dims {each.mesh_dims}"
                for each in exchanges
            )
            or ("redistributed first" if brought else "free"),
        )


def _count_received(question: Question, way: Way, given: Sequence[tuple[Placement, ...]]) -> None:
    """Count what the op's exchanges receive, and the redistributions of its operands."""
    moves = [
        received_to(spec, wanted)
        for spec, wanted in zip(question.specs, given)
        if wanted != tuple(spec.placements)
    ]

    def received() -> Received:
        total = Received()
        for each in way.exchanges:
            total = total.plus(Received(each.received_elements, each.received_by_all))
        for move in moves:
            total = total.plus(move())
        return total

    count_received(question.name, received)
