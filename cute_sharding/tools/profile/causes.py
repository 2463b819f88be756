"""From the records of a recorder to the lines of a profile. A decision depends only on the op, the
specs of its operands, the settings and the release of torch: so the rule in force gives the word
for the rule, and the results, once more for a recorded op. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding._words import mesh_text
from cute_sharding.dtensor.bookkeeping import stats
from cute_sharding.dtensor.bookkeeping.settings import network_in_force
from cute_sharding.dtensor.decide import propagation
from cute_sharding.dtensor.replaced import communication, dispatch_modes, op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, MaskPartial, Placement
from cute_sharding.dtensor.run.op_plan import of_torch, plan_of
from cute_sharding.exchange.network import Chosen
from cute_sharding.tools.profile.recorder import PLAIN, Recorder, Seen, Source
from cute_sharding.tools.profile.values import Cause, Collective, Line, MovedTensor, seconds_of


def recorded(recorder: Recorder, network: Chosen) -> dict[str, Any]:
    """The attributes of a profile. ``network`` gives the modeled seconds; None: that of the
    settings.
    """
    if network is None:
        network = network_in_force()
    by_source: dict[Source, list[Seen]] = {}
    for seen in recorder.seen:
        by_source.setdefault(recorder.source_of(seen), []).append(seen)
    meshes = list(dict.fromkeys(mesh for source in by_source for mesh in meshes_of(source)))
    whole = _whole(meshes)
    names: dict[tuple[int, ...], tuple[str, ...]] = {}
    lines = []
    for source, every in by_source.items():
        timed = []
        for one in map(recorder.collective_of, every):
            if one.ranks not in names:
                names[one.ranks] = _mesh_dims(whole, one.ranks)
            model = modelled(one, meshes, network)
            timed.append(one._replace(model=model, mesh_dims=names[one.ranks]))
        lines.append(Line(cause_of(source, every), tuple(timed)))
    # The settings while the collectives ran; if they changed, the last of them.
    settings = [recorder.settings, *(source.settings for source in by_source)]
    last = next((each for each in reversed(settings) if each is not None), None)
    flags = ("views", "ops", "redistribution", "movement")
    rank, world = recorder.member or (0, 1)  # the program may have ended its groups since
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "lines": tuple(sorted(lines, key=lambda line: -line.received)),
        "rank": rank,
        "world": world,
        "meshes": tuple(dict.fromkeys(map(_mesh_text, whole))),
        "settings": ", ".join(name for name in flags if getattr(last, name, False)),
        "network": "default" if network is None else str(network),
        "torch_version": torch.__version__,
        "seconds": recorder.ended - recorder.started,
    }


def _whole(meshes: Sequence[Any]) -> list[Any]:
    """The meshes without those that are a part of another, such as ``mesh["tp"]``."""
    dims = [{*zip(_names(mesh), mesh.shape)} for mesh in meshes]
    # Of all slices, since which is this rank's is unknown once the program has ended its groups.
    ranks = [{rank for on in communication.slices(mesh) for rank in on.ranks} for mesh in meshes]
    every = list(zip(meshes, dims, ranks))
    return [
        mesh
        for mesh, own, held in every
        if not any(own < others and held <= more for _, others, more in every)
    ]


def _mesh_text(mesh: Any) -> str:
    return mesh_text(tuple(mesh.shape), mesh.mesh_dim_names).strip("()")


def _names(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple([f"mesh dim {m}" for m in range(mesh.ndim)])


def meshes_of(source: Source) -> list[Any]:
    """The meshes of the DTensors of a source."""
    specs = [x for x in _leaves((source.args, source.kwargs)) if isinstance(x, DTensorSpec)]
    return [spec.mesh for spec in (*specs, *(source.moved or ()))]


def modelled(one: Collective, meshes: Sequence[Any], network: Chosen) -> float:
    """The seconds by the network's model. A group that belongs to no mesh has as many ranks in a
    host as the default network.
    """
    if len(one.ranks) < 2:
        return 0.0
    mesh, group = _group_among(meshes, one.ranks)
    if mesh is None:
        sizes, group = [max(one.ranks) - min(one.ranks) + 1], [(0, len(one.ranks))]
    else:
        sizes = list(mesh.shape)
    return seconds_of(one.op, group, one.most, one.itemsize, sizes, network)


def _mesh_dims(meshes: Sequence[Any], ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the mesh dims of a group; none if it belongs to no mesh."""
    mesh, group = _group_among(meshes, ranks)
    return tuple([_names(mesh)[m] for m, _ in group])


def _group_among(
    meshes: Sequence[Any], ranks: tuple[int, ...]
) -> tuple[Any, list[tuple[int, int]]]:
    """The first mesh of which this is a group, and the mesh dims that the group has; None and
    none if there is no such mesh.
    """
    for mesh in meshes:
        group = _group_on(mesh, ranks)
        if group:
            return mesh, group
    return None, []


def _group_on(mesh: Any, ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """The mesh dims that a group has, and the number of ranks on each; none if it is no group of
    the mesh.
    """
    for on in communication.slices(mesh):
        if all(on.coordinates(rank) is not None for rank in ranks):
            places = [len({*of}) for of in zip(*map(on.device, ranks))]
            return [(m, parts) for m, parts in enumerate(places) if parts > 1]
    return []


def cause_of(source: Source, every: Sequence[Seen]) -> Cause:
    """The cause of the collectives of one source."""
    asked = (moved_of(*source.moved),) if source.moved else ()
    cause = Cause(source.place, source.backward, name_of(source), source.kind, moved=asked)
    if source.kind not in ("op", "planned"):
        rule = "" if source.kind == "compiled" else "program"
        return cause._replace(rule=rule, asker=source.asker)
    pairs = dict.fromkeys(seen.found.moved for seen in every)
    moved = tuple([moved_of(*pair) for pair in pairs if pair is not None and None not in pair])
    cause = cause._replace(moved=moved or asked)
    if source.kind == "planned":
        return cause._replace(rule="plan")
    if any(seen.is_torchs for seen in every):
        cause = cause._replace(rule="PyTorch")
    schema = schema_of(source)
    if schema is None:
        return cause
    cause = cause._replace(operands=tuple(map(_spec_text, op_schemas.specs_of(schema))))
    if cause.rule:
        return cause
    try:
        rule, by_operand, results = decided(schema, source)
    except Exception:  # the op ran in a context that has ended, such as loss_parallel
        return cause
    # Of operands that lie alike, the records do not say how many are redistributed.
    return cause._replace(
        rule=rule,
        moved=by_operand if {*by_operand} >= {*moved} else moved,
        results=tuple(map(_spec_text, results)),
    )


def name_of(source: Source) -> str:
    """The name of an op without its overload, or of the function that the program calls."""
    if isinstance(source.op, str):
        return source.op
    return op_schemas.name_of(source.op).removesuffix(".default").partition(".")[0]


def moved_of(before: DTensorSpec, after: DTensorSpec) -> MovedTensor:
    """A redistribution as plain values."""
    mesh: Any = before.mesh
    sizes = tuple(map(int, mesh.shape))
    placements = [tuple(map(_text, spec.placements)) for spec in (before, after)]
    return MovedTensor(tuple(map(int, before.shape)), sizes, _names(mesh), *placements)


def _spec_text(spec: DTensorSpec) -> str:
    """The shape and the placements."""
    return f"{tuple(spec.shape)} [{', '.join(map(_text, spec.placements))}]"


def _text(placement: Placement) -> str:
    """A placement as DTensor prints it; for a masked embedding, without the size of the table."""
    return "MaskP(sum)" if isinstance(placement, MaskPartial) else str(placement)


# By what stats() counts, the word for the rule (:data:`.values.RULES`).
_RULES = {
    **dict.fromkeys(("algebra", "tracing", "redistribution"), "view"),
    **dict.fromkeys(("free", "exchanged"), "movement"),
    "signature": "signature",
    "gate": "fallback",
    "stock": "PyTorch",
}


def schema_of(source: Source) -> OpSchema | None:
    """The op on its specs; None if this is no op, or if an argument was a plain tensor, or could
    not be recorded.
    """
    if isinstance(source.op, str) or PLAIN in _leaves((source.args, source.kwargs)):
        return None
    args = tuple([_listed(value) for value in source.args])
    kwargs = {name: _listed(value) for name, value in source.kwargs}
    return OpSchema(source.op, args, kwargs, op_schemas.schema_info(source.op))


def decided(
    schema: OpSchema, source: Source
) -> tuple[str, tuple[MovedTensor, ...], list[DTensorSpec]]:
    """The word for the rule that decides the op, the operands that are redistributed, and the specs
    of the results. Raises what the rule raises.
    """
    stock, settings = op_schemas.stock_propagation(), source.settings
    is_ours = settings is not None and settings.views
    rule = propagation(stock, settings) if settings is not None and is_ours else stock
    with dispatch_modes.no_modes(), stats.count_apart() as outcomes:
        found = rule(schema)
    word = _RULES[outcomes[-1]] if outcomes else "PyTorch"
    if op_schemas.is_of_the_program(schema.op):
        word = "program"
    wanted = found.redistribute_schema
    plan = (wanted and plan_of(wanted)) or of_torch(found, schema)
    specs, to = (op_schemas.specs_of(each) for each in (schema, plan.wanted))
    pairs = zip(specs, to) if len(specs) == len(to) and not plan.takes_all else ()
    moved = [moved_of(a, b) for a, b in pairs if tuple(a.placements) != tuple(b.placements)]
    return word, tuple(moved), [x for x in plan.specs if isinstance(x, DTensorSpec)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not isinstance(value, DTensorSpec):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value
