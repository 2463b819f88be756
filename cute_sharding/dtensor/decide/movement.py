"""The propagator's answer for a movement op that touches a sharded dim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.bookkeeping.stats import Place, Received, count, count_place, logger
from cute_sharding.dtensor.decide.places import move_of, redistributions_of_rule
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.door.cuts import some_device_is_empty
from cute_sharding.dtensor.door.understood import are_read_as_order, are_understood
from cute_sharding.dtensor.extras.copies import note_copies
from cute_sharding.dtensor.replaced import op_schemas, registry, symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    StridedShard,
)
from cute_sharding.dtensor.run import dynamic
from cute_sharding.dtensor.run.moving import Movement, comes_back
from cute_sharding.dtensor.run.ops import LocalView, Runner, Step
from cute_sharding.dtensor.run.order import lying_apart
from cute_sharding.dtensor.run.placements import cut_of, placement_of, replaced, text
from cute_sharding.dtensor.run.reading import agree
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.slices import is_view
from cute_sharding.propagation.choose import Choice, chosen, moved_to
from cute_sharding.propagation.free import Cuts
from cute_sharding.propagation.steps import place_steps
from cute_sharding.relations import Move
from cute_sharding.relations.moves import Shape
from cute_sharding.relations.table import MOVEMENTS, STEPS, ByRows, Row

# Pending reduction -> the values of rows that are filled in, so that they reduce to the fill: on
# the first device of the mesh dim, and on the others. True: the fill itself.
_FILLED = {
    "sum": (True, 0),
    "product": (True, 1),
    **dict.fromkeys(("avg", "max", "min", "band", "bor"), (True, True)),
}


def moved(question: Question) -> Any | None:
    """The answer for the op by its map of rows. None if it is no movement, touches no sharded dim,
    or its arguments or placements have no known movement: others then answer.

    Without the setting ``movement`` only for ops that consist of several views, if these are free:
    torch derives its rule from the decomposition.
    """
    if question.name in STEPS:
        return _moved_in_steps(question)
    return _moved_at_once(question) if question.settings.movement else None


def _moved_at_once(question: Question) -> Any | None:
    name, schema, specs = question.name, question.schema, question.specs
    row = MOVEMENTS.get(name)
    if row is None or not specs or not _is_known(specs):
        return None
    if symints.is_symbolic(*(tuple(s.shape) for s in specs), schema.args_schema[1:]):
        # Only compiled programs have symbolic sizes: eager programs do not import this.
        from cute_sharding.dtensor.decide.any_sizes import dynamic_of

        anew = dynamic_of(name, schema, specs)
        if anew is None:
            return None
        runner, now = anew
        outputs = [replaced(specs[0].placements, some) for some in now.cuts]
        _note(name, [now.exchange], specs, outputs)
        return answers.by_function(schema, runner, specs[0].mesh, outputs, runner.metas)
    pending = _pending(specs[: row.reads])
    if pending is None:
        count(name, "stock")
        return None
    shapes = [tuple(spec.shape) for spec in specs]
    args, kwargs = op_schemas.arguments_with(schema, shapes)
    move = dynamic.move_of(name, args, kwargs)
    if move is None or _is_wrong_for(pending, move):
        return None
    mesh = specs[0].mesh
    choice = _choice(row, schema.op, move, specs)
    if choice is None:
        return None
    movement = Movement.on(choice.exchange, mesh, tuple(pending.items()))
    metas = registry.output_metas(schema)
    if movement is None or metas is None:
        count(name, "stock")
        return None
    if not is_view(choice.exchange):
        metas = answers.with_metas(metas, lying_apart)
    outputs = [replaced(specs[0].placements, some) for some in choice.cuts]
    _note(name, [choice.exchange], specs, outputs)
    _note_place(question, [choice.exchange], [])
    given = [tuple(spec.placements) for spec in specs]
    note = note_copies if schema.op._schema._is_view_op() else None
    runner = Runner(name, specs, given, (movement,), metas, note)
    return answers.by_function(schema, runner, mesh, outputs, metas)


def _choice(row: ByRows, op: Any, move: Move, specs: Sequence[DTensorSpec]) -> Choice | None:
    """The results' placements; None if the op just runs on each device's local tensors."""
    cuts = tuple([tuple([cut_of(p) for p in spec.placements]) for spec in specs])
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
        return choice if results == [*choice.cuts] else moved_to(move, cuts, mesh, results)

    spare = _spare(row, specs)
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


def _moved_in_steps(question: Question) -> Any | None:
    """The answer for an op of several steps, each a view or a movement. Without the setting
    ``movement`` only if no step exchanges rows.
    """
    name, schema, specs = question.name, question.schema, question.specs
    if len(specs) != 1 or not _is_known(specs):
        return None
    (spec,), mesh = specs, specs[0].mesh
    shape, sizes = tuple(spec.shape), tuple(mesh.shape)
    if symints.is_symbolic(shape, schema.args_schema[1:]):
        return None
    pending = _pending(specs) or {}
    cuts = tuple([cut_of(p) for p in spec.placements])
    metas = registry.output_metas(schema)
    row = STEPS[name]
    steps = row.steps(shape, *schema.args_schema[1:])
    spare = () if schema.op._schema._is_view_op() else _spare(row, specs)
    way = steps and place_steps(steps, shape, cuts, sizes, spare=spare)
    if not way or metas is None:
        return None
    first, found = way
    if _left_to_right(found[-1].shape, found[-1].cuts, spec) != found[-1].cuts:
        return None
    if not question.settings.movement and (
        (first != cuts and not row.is_wrong_in_torch)
        or not any(cuts)
        or any(step.exchange for step in found)
    ):
        return None
    run: list[Step] = []
    for step in found:
        if step.exchange is None:
            run.append(LocalView(step, mesh))
            continue
        movement = Movement.on(step.exchange, mesh, tuple(pending.items()))
        if movement is None or _is_wrong_for(pending, step.exchange.move):
            return None
        run.append(movement)
    outputs = [replaced(spec.placements, found[-1].cuts)]
    movements = [step.exchange for step in found if step.exchange]
    _note(name, movements, specs, outputs, brought=first != cuts)
    brought = replaced(spec.placements, first)
    moves = [move_of(spec, brought)] if first != cuts else []
    _note_place(question, movements, moves)
    runner = Runner(name, specs, [brought], tuple(run), metas)
    return answers.by_function(schema, runner, mesh, outputs, metas)


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


def _spare(row: Row, specs: Sequence[DTensorSpec]) -> tuple[int, ...]:
    """Mesh dims that may shard the results though all operands are replicated on them: those of ops
    for which torch considers all placements.
    """
    if not registry.weighs_all(row.made_of or row.overloads[0]):
        return ()
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
    brought: bool = False,
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


def _note_place(
    question: Question, movements: Sequence[Exchange], moves: Sequence[Callable[[], Received]]
) -> None:
    """Count what the op receives beside what torch's rule would. If torch has no rule, it would
    derive one by trying placements, which takes long; then nothing is counted.
    """
    if registry.is_derived(question.schema.op):
        return

    def received() -> Received:
        total = Received()
        for movement in movements:
            total = total.plus(Received(movement.received_elements, movement.received_by_all))
        for move in moves:
            total = total.plus(move())
        return total

    theirs = partial(redistributions_of_rule, question.schema, question.stock)
    count_place(question.name, Place(received, theirs))
