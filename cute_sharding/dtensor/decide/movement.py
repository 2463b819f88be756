"""The plan for a movement op that touches a sharded dim: eager, and with symbolic sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import Received, count, count_received, logger
from cute_sharding.dtensor.compiled.symbols import local_shape_of
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.door.cuts import are_read_as_order, are_understood, some_device_is_empty
from cute_sharding.dtensor.replaced import op_schemas, symints, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    StridedShard,
)
from cute_sharding.dtensor.run import in_graphs
from cute_sharding.dtensor.run.groups import dims_of_group
from cute_sharding.dtensor.run.in_graphs import MovementOfAnySize, move_of
from cute_sharding.dtensor.run.moving import Movement, comes_back
from cute_sharding.dtensor.run.op_plan import (
    OpPlan,
    by_function,
    made_of,
    plan_for,
    shapes_of_results,
    with_metas,
)
from cute_sharding.dtensor.run.ops import LocalView, Runner, note_views
from cute_sharding.dtensor.run.packing import lying_apart
from cute_sharding.dtensor.run.placements import agree, cut_of, placement_of, replaced, text
from cute_sharding.dtensor.run.redistribute import received_to
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.exchange import is_view
from cute_sharding.layout import Undecided
from cute_sharding.propagation.movements import Choice, Cuts, ShardedMove, Way, chosen, place_steps
from cute_sharding.relations import Move
from cute_sharding.relations.moves import Shape
from cute_sharding.relations.table import BY_OP, MOVEMENTS, STEPS, ByRows, BySteps
from cute_sharding.relations.view import normalize_dim

# -- movement --------------------------------------------------------------------------------------
# The plan for a movement op that touches a sharded dim.

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
    metas = op_schemas.output_metas(schema)
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
    return in_graphs.move_of(op_schemas.name_of(schema.op), args, kwargs)


def _choice(
    row: ByRows, op: Any, move: Move, specs: Sequence[DTensorSpec], cuts: tuple[Cuts, ...]
) -> Choice | None:
    """The results' placements; None if the op just runs on each device's local tensors."""
    # An exchange also for ops that have no rule in torch; that torch refuses, as splits of empty
    # shards, or gathers if devices are without rows; and for strided shards beside a Partial, which
    # a signature would reduce.
    anyway = (
        op_schemas.is_derived(op)
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
    (run/placements.py), torch would read them as an order of shards: the dim then gets plain cuts.
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


# -- any sizes -------------------------------------------------------------------------------------
# Movement ops in a compiled program whose sizes are symbolic.
#
# If only dims that the op does not touch are symbolic, the map of rows is known in numbers. The op
# is then decided as in an eager program, and is a slice of the local tensor where it is free.
# Otherwise the result keeps the operand's placements, because any other decision would depend on
# sizes that another call does not have; and the exchange is planned in each call
# (run/in_graphs.py).


def way_for_any_size(
    name: str, schema: OpSchema, specs: Sequence[DTensorSpec]
) -> tuple[Way, Movement | MovementOfAnySize, Any] | None:
    """The op as a movement for any sizes: the way for the sizes at hand, its step, and the results'
    TensorMetas. None if no such movement is known.
    """
    given = op_schemas.arguments_with(schema, [tuple(spec.shape) for spec in specs])
    mesh, row = specs[0].mesh, MOVEMENTS[name]
    if any(isinstance(p, Partial) for spec in specs for p in spec.placements):
        return None
    now = symints.numbers_at_hand(given)
    move = None if now is None else move_of(name, *now)
    if move is None or not any(map(move.bound, range(len(specs)))):
        return None
    cuts = tuple([tuple([cut_of(p) for p in spec.placements]) for spec in specs])
    sizes = tuple(mesh.shape)
    # Also ops without any other rule, and ops for which torch gathers whatever is sharded.
    anyway = not row.is_signed or (row.gathers and any(map(any, cuts)))
    sharded = ShardedMove(move, cuts, sizes)
    if not sharded.open and not anyway:
        return None
    metas = op_schemas.output_metas(schema)
    if _goes_by_numbers(move, schema, specs):
        choice = chosen(move, cuts, sizes, anyway=True)
        assert choice is not None
        if not all(
            agree(shape, specs[0], [placement_of(cut) for cut in some])
            for shape, some in zip(move.outputs, choice.cuts)
        ):
            return None  # torch would read these placements as an order of shards
        is_free = is_view(choice.exchange) and schema.op._schema._is_view_op()
    elif all(cut is None or cut[1] == 1 for some in cuts for cut in some):
        choice, is_free = sharded.to(sharded.own), False
    else:
        return None
    step: Movement | MovementOfAnySize
    if is_free:
        step = Movement(choice.exchange, mesh, ())
    else:
        onto = [shape for shape in shapes_of_results(metas) if shape is not None]
        if not (_have_groups(sharded.open, mesh) and _are_known(onto, choice.exchange, mesh)):
            return None
        step = MovementOfAnySize(name, given, choice.exchange, onto, mesh)
    return Way(cuts, move.outputs, choice.cuts, (choice.exchange,)), step, metas


def _goes_by_numbers(move: Move, schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether the op does the same to the dims that it touches whatever values the symbols have.

    Symbolic sizes among its arguments are allowed if they are sizes of dims that it does not touch.
    """
    others: set[str] = set()
    for i, spec in enumerate(specs):
        touched = move.touched(i)
        if move.triangle is not None:
            touched |= {len(spec.shape) - 2, len(spec.shape) - 1}
        if symints.is_symbolic(*(spec.shape[d] for d in touched)):
            return False
        others.update(symints.size_text(n) for d, n in enumerate(spec.shape) if d not in touched)
    for given in (*schema.args_schema, *schema.kwargs_schema.values()):
        if isinstance(given, torch.SymInt):
            return False
        some = given if isinstance(given, (list, tuple)) else ()
        if any(isinstance(n, torch.SymInt) and symints.size_text(n) not in others for n in some):
            return False
    return True


def _have_groups(dims: Sequence[int], mesh: Any) -> bool:
    """Whether every set of ranks that differ on some of ``dims``, and for some sizes have to
    exchange rows, has a group.
    """
    return all(
        dims_of_group(mesh, some) is not None
        for count in range(2, len(dims) + 1)
        for some in combinations(dims, count)
    )


def _are_known(onto: Sequence[tuple[Any, ...]], exchange: Exchange, mesh: Any) -> bool:
    """Whether the local shapes of this rank's results can be computed."""
    try:
        for shape, placed in zip(onto, exchange.targets):
            local_shape_of(shape, placed.chains, mesh)
    except Undecided:
        return False
    return True


# -- splits ----------------------------------------------------------------------------------------
# ``tensor_split``, with its parts in one exchange.
#
# torch decomposes ``tensor_split`` (and hsplit, vsplit, dsplit) into slices before DTensor sees it.
# They stay slices: to autograd and to writes each part is a view of the tensor, with the placements
# of any slice. But slices that lack rows on some devices become one movement with several results.
# It runs with the first of these slices, and the others take their results from it.

_SLICE = BY_OP["Tensor.__getitem__"].overloads[0]


def slices_together(args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A function that answers the slices of a ``tensor_split`` one after the other; those that lack
    rows share one exchange. None if fewer than two do.
    """
    slices = _slices(*args)
    lacking = [each.runner.movement for each in slices if each]
    if len(lacking) < 2:
        return None
    exchange = _joined_exchange(tuple([movement.exchange for movement in lacking]))
    joined = Movement.on(exchange, lacking[0].mesh, lacking[0].pending)
    if joined is None:  # the ranks have no common process group
        return None
    (x, *_), remaining, results = args, iter(slices), list[torch.Tensor]()

    def take(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The next result, as a list of one; the first call moves all of them."""
        results[:] = results or joined(operands)
        return [results.pop(0)]

    def answer(op: Any, *given: Any) -> Any:
        each = next(remaining) if given[0] is x else None
        if each is None:
            return op(*given)
        return made_of(each.runner.run([x._local_tensor], take), each.spec)

    return answer


class _Slice(NamedTuple):
    """A slice that lacks rows: the function that would run it alone, and the spec of its result."""

    runner: Runner
    spec: Any


def _slices(x: Any, parts: int | Sequence[int], dim: int = 0) -> list[_Slice | None]:
    """One entry for each part; None for a slice that lacks no rows."""
    spec = x._spec
    shape = tuple(spec.shape)
    if symints.is_symbolic(shape, parts) or not spec.mesh._is_current_rank_part_of_mesh():
        return []
    try:
        d = normalize_dim(dim, len(shape))
        bounds = _bounds(shape[d], parts)
    except IndexError:
        return []  # torch raises the error
    if all(cut is None or cut[0] != d for cut in map(tensor_specs.cut_of, spec.placements)):
        return []
    plans = [plan_for(op_schemas.overload(_SLICE), x, d, *b) for b in bounds]
    return [
        _Slice(plan.kernel, plan.results)
        if plan and isinstance(plan.kernel, Runner) and plan.kernel.movement.dims
        else None
        for plan in plans
    ]


@remembered
def _joined_exchange(exchanges: tuple[Exchange, ...]) -> Exchange:
    """One exchange to all results, from exchanges of the same operand to one result each."""
    moves = [exchange.move for exchange in exchanges]
    links = [link._replace(target=k) for k, move in enumerate(moves) for link in move.links]
    outputs = tuple([move.outputs[0] for move in moves])
    targets = tuple([exchange.targets[0] for exchange in exchanges])
    move = moves[0]._replace(outputs=outputs, links=tuple(links))
    return replace(exchanges[0], relation=move, targets=targets)


def _bounds(n: int, parts: int | Sequence[int]) -> list[tuple[int, int | None]]:
    """The slices that ``torch.tensor_split`` takes of a dim of ``n`` rows: ``parts`` of them, some
    of the first a row longer; or one up to each index, and one after the last.
    """
    if not isinstance(parts, int):
        return [*zip([0, *parts], [*parts, None])]
    size, more = divmod(n, max(parts, 1))
    firsts = [k * size + min(k, more) for k in range(parts + 1)]
    return [*pairwise(firsts)]
