"""The ways in which a recorded op can run. What an op does on placements is asked of the rules, and
what it then receives is counted while it runs on tensors without elements: so a plan knows of an op
what will happen, and nothing is worked out twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, product
from math import inf
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from cute_sharding.dtensor.bookkeeping.settings import in_force, network_in_force
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.decide.signatures import placements_allowed
from cute_sharding.dtensor.decide.views import is_free
from cute_sharding.dtensor.door.cuts import are_understood, parts_of
from cute_sharding.dtensor.door.held import local_shape
from cute_sharding.dtensor.programs.recording import Counting, OpKind, dtensors_in
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.asked import Ask
from cute_sharding.dtensor.replaced.dispatch_modes import below_autograd
from cute_sharding.dtensor.replaced.local_tensors import tree_map
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    MaskPartial,
    NormPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    TensorMeta,
    are_known,
    cut_of,
    placed_as,
)
from cute_sharding.dtensor.run.lists import Ends, plans_that_join, turns_of
from cute_sharding.dtensor.run.op_plan import of_torch, plan_of
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.placed import local_elements
from cute_sharding.programs.program import OpWay, Price, ValueMove
from cute_sharding.propagation.signatures import Operand, moved_for, seconds_for

Placements = tuple[Placement, ...]


def standard(spec: DTensorSpec) -> list[Placements]:
    """The placements of a tensor as replicas and plain shards; a mesh dim of one device has no use
    for shards.
    """
    dims = [Shard(d) for d, n in enumerate(spec.shape) if n > 1]
    options = [[Replicate(), *dims] if n > 1 else [Replicate()] for n in spec.mesh.shape]
    return [tuple(found) for found in product(*options)]


def ways_of(
    kind: OpKind,
    candidates: Sequence[Sequence[Placements]],
    counting: Counting,
    written: OpWay | None = None,
) -> list[OpWay]:
    """The ways of an op; the first is what it does without a plan, if that does not multiply more
    than as written.

    Args:
        candidates: for each operand the placements in which it may lie.
        counting: counts what is received.
        written: what it does in the program as it is written; None: what it does here.
    """
    if isinstance(kind.func, Ask):
        return _ways_of_ask(kind, candidates[0], counting)
    found: dict[tuple[Placements, ...], OpWay] = {}
    for given in _operands(kind, candidates):
        way = _way(kind, given, counting)
        if way is not None:
            results = (*way.results, *[way.operands[i] for i in kind.written])
            way = way._replace(results=results)
            found.setdefault(way.operands, way)  # type: ignore[arg-type]
    ways = [*found.values()]
    if not ways:
        return []
    # What is not sent must not be computed several times instead.
    most = multiplications(kind, written or ways[0])
    return [way for way in ways if multiplications(kind, way) <= most] or ways[:1]


def _ways_of_ask(kind: OpKind, candidates: Sequence[Placements], counting: Counting) -> list[OpWay]:
    """The ways in which a program gets what it asks for: it lies as without a plan."""
    (spec,), made = kind.specs, tuple([tuple(spec.placements) for spec in kind.made])
    own = tuple(spec.placements)
    if not kind.func.redistributes:
        return [OpWay((own,), made)]
    placements = dict.fromkeys([own, *(candidates if kind.func.is_free else ())])
    first, *others = [_way(kind, [each], counting) for each in placements]
    if first is None:
        return []
    return [first, *[way for way in others if way is not None and way.results == made]]


def multiplications(kind: OpKind, way: OpWay) -> float:
    """Those of the fullest device, of a product, a convolution or attention (torch's formulas)."""
    count = None if isinstance(kind.func, Ask) else flop_registry.get(kind.func.overloadpacket)
    if count is None:
        return 0

    def local(spec: Any, placements: Any) -> torch.Tensor:
        return torch.empty(local_shape(placed_as(spec, placements)), device="meta")

    tensors = chain(map(local, kind.specs, way.operands), map(local, kind.made, way.results))
    args, kwargs, returned = tree_map(
        lambda leaf: next(tensors) if isinstance(leaf, DTensorSpec) else leaf,
        (kind.args, kind.kwargs, kind.returned),
    )
    try:
        return float(count(*args, **kwargs, out_val=returned))
    except (AssertionError, ValueError):  # operands that the op itself redistributes
        return inf


def _operands(
    kind: OpKind, candidates: Sequence[Sequence[Placements]]
) -> Iterator[tuple[Placements, ...]]:
    """The placements of operands that are tried, those that it has without a plan first."""
    own = tuple([tuple(spec.placements) for spec in kind.specs])
    yield own
    allowed = False
    # Which placements an op allows does not depend on where its operands lie.
    question = _question(kind, [_understood(spec) for spec in kind.specs])
    if question.row is not None:
        for found in placements_allowed(question.row, question.schema, question.specs, candidates):
            allowed = True
            if all(found[i] in candidates[i] for i in kind.as_lies):
                yield tuple(found)
    if allowed:
        return
    if len({len(spec.shape) for spec in kind.specs}) == 1 and len(kind.specs) > 1:
        for placements in candidates[0]:  # all alike
            if all(_fits(placements, spec) for spec in kind.specs):
                yield (placements,) * len(kind.specs)
    for i in sorted(kind.as_lies) or range(len(kind.specs))[:1]:
        for placements in candidates[i]:
            given = (*own[:i], placements, *own[i + 1 :])
            # A view that is not free has readers that want other placements.
            if not question.is_view or is_free(
                _question(kind, [placed_as(kind.specs[i], placements)])
            ):
                yield given


def _understood(spec: DTensorSpec) -> DTensorSpec:
    """The spec; a replica's, if rules do not know what its placements mean, as of a masked sum."""
    whole = (Replicate(),) * spec.mesh.ndim
    return spec if are_understood([spec]) else placed_as(spec, whole)


def _fits(placements: Placements, spec: DTensorSpec) -> bool:
    return all(cut is None or spec.shape[cut[0]] > 1 for cut in [cut_of(p) for p in placements])


def _question(kind: OpKind, specs: Sequence[DTensorSpec]) -> Question:
    settings = in_force()
    assert settings is not None, "a plan is made with the package switched on"
    given = iter(specs)

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):  # a scalar, such as a count of steps: whole everywhere
            mesh = specs[0].mesh
            meta = TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
            return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
        return next(given) if isinstance(leaf, DTensorSpec) else leaf

    args, kwargs = tree_map(spec, (kind.args, kind.kwargs))
    schema = OpSchema(kind.func, args, kwargs, op_schemas.schema_info(kind.func))
    return Question(schema, tuple(specs), op_schemas.stock_propagation(), settings)


def _way(kind: OpKind, given: Sequence[Placements], counting: Counting) -> OpWay | None:
    """The op on operands in these placements; if it would redistribute some, on those that it
    wants. None if it cannot run.
    """
    specs = [placed_as(spec, placements) for spec, placements in zip(kind.specs, given)]
    try:
        if isinstance(kind.func, Ask):
            return _measured(kind, specs, counting)
        if _question(kind, specs).is_composite:  # its parts ask for themselves
            return _measured(kind, specs, counting)
        for _ in range(2):
            schema = _question(kind, specs).schema
            answer = op_schemas.propagation()(schema)
            wanted = answer.redistribute_schema
            plan = (wanted and plan_of(wanted)) or of_torch(answer, schema)
            to = op_schemas.specs_of(plan.wanted)
            if plan.takes_all or len(to) != len(specs):
                break
            if any(tuple(to[i].placements) != tuple(specs[i].placements) for i in kind.as_lies):
                break
            if all(tuple(a.placements) == tuple(b.placements) for a, b in zip(to, specs)):
                if plan.is_local:
                    return _local(specs, plan.specs)
                break
            specs = [placed_as(a, tuple(b.placements)) for a, b in zip(specs, to)]
        return _measured(kind, specs, counting)
    except Exception:
        return None


def _local(specs: Sequence[DTensorSpec], made: Sequence[Any]) -> OpWay:
    """The way of an op that runs as it is, on local tensors that are not redistributed."""
    return OpWay(
        tuple([tuple(spec.placements) for spec in specs]),
        tuple([tuple(spec.placements) for spec in made if isinstance(spec, DTensorSpec)]),
    )


def _measured(kind: OpKind, specs: Sequence[DTensorSpec], counting: Counting) -> OpWay:
    given = iter(map(stand_in, specs))
    args, kwargs = tree_map(
        lambda leaf: next(given) if isinstance(leaf, DTensorSpec) else leaf,
        (kind.args, kind.kwargs),
    )
    # Below autograd, as the program ran it: with autograd an op such as linear runs as others.
    with below_autograd(), counting() as price:
        result = kind.func(*args, **kwargs)
    made = tuple([tuple(x._spec.placements) for x in dtensors_in(result)])
    return OpWay(tuple([tuple(spec.placements) for spec in specs]), made, price())


def stand_in(spec: DTensorSpec) -> DTensor:
    """A DTensor without elements."""
    meta: Any = spec.tensor_meta
    local = torch.empty(local_shape(spec), dtype=meta.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec, requires_grad=False)


def move_price(spec: DTensorSpec, before: Placements, after: Placements) -> Price | None:
    """What a redistribution of a tensor receives, and how long it takes by the network, if one is
    set; None if it cannot be had.
    """
    both = (*before, *after)
    if any(isinstance(p, MaskPartial) for p in after) or not all(
        are_known((p,)) or isinstance(p, MaskPartial) for p in both
    ):
        return None
    for a, b in zip(before, after):
        # A replica becomes a summand for nothing, also one of a norm, and a shard becomes one by
        # way of a replica; nothing else becomes pending.
        if isinstance(b, Partial) and a != b:
            if isinstance(a, Partial) or b.reduce_op != "sum":
                return None
            if isinstance(b, NormPartial) and not isinstance(a, Replicate):
                return None
    meta: Any = spec.tensor_meta
    shape, mesh = tuple(spec.shape), tuple(spec.mesh.shape)
    operand = Operand(shape, parts_of(before), meta.dtype.itemsize)
    chosen = network_in_force()
    received, steps = moved_for(operand, parts_of(after), mesh, chosen)
    seconds = 0.0 if chosen is None else seconds_for(operand, parts_of(after), mesh, chosen)
    return Price(received * operand.itemsize, steps, seconds)


def price_shared(specs: Mapping[Hashable, DTensorSpec], moves: Sequence[ValueMove]) -> Price:
    """What redistributions of tensors of these kinds save if they run at once: collectives that
    they share, and the latency of these.
    """
    ends: list[Ends] = []
    for move in moves:
        spec, meta = specs[move.kind], specs[move.kind].tensor_meta
        placings: Any = move[1:]
        before, after = (placed_as(spec, placements) for placements in placings)
        ends.append((before, after, meta.dtype))  # type: ignore[union-attr]
    price, chosen = Price(), network_in_force()
    for mesh, found in plans_that_join(ends).items():
        dtypes = [ends[i][2] for i in found]
        for members, steps in turns_of([*found.values()], dtypes):
            alone = sum(step.collectives for step in steps)
            fewer = alone - 1 if len(steps) > 1 else 0
            latencies = [
                0.0
                if chosen is None
                else step.latency(
                    Network.of_elements(tuple(mesh.shape), chosen, dtypes[i].itemsize)
                )
                for i, step in zip(members, steps)
            ]
            price = price.plus(Price(0, fewer, sum(latencies) - max(latencies)))
    return price


def held(spec: DTensorSpec, placements: Placements) -> int:
    """The bytes that the fullest device holds of a tensor."""
    meta: Any = spec.tensor_meta
    cuts = [None if isinstance(p, Partial) else cut_of(p) for p in placements]
    return local_elements(tuple(spec.shape), cuts, tuple(spec.mesh.shape)) * meta.dtype.itemsize
