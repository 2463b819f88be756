"""Computes the lines of a report from the records of a profiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding.dtensor.bookkeeping.settings import network_in_force
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.exchange.network import Network
from cute_sharding.tools.profile.causes import of_asked, of_call
from cute_sharding.tools.profile.profiler import Asked, Call, Profiler, Ran
from cute_sharding.tools.profile.report import Collective, Event, Line, Report


def report(profiler: Profiler, network: Network | str | None = None) -> Report:
    """The lines of the report. ``network`` gives the modeled seconds; by default, the network of
    the settings.
    """
    chosen = network_in_force() if network is None else network
    meshes = _meshes(profiler)
    by_source: dict[Call | Asked, list[tuple[Ran, Collective]]] = {}
    for ran in zip(profiler.notes, profiler.collectives):
        by_source.setdefault(ran[0].source, []).append(ran)
    lines = []
    for source, every in by_source.items():
        notes = [note for note, _ in every]
        events = tuple([_event(one, note, meshes, chosen) for note, one in every])
        if isinstance(source, Call):
            cause, calls = of_call(source, notes), profiler.calls[source]
        else:
            cause, calls = of_asked(source), _times(notes)
        lines.append(Line(cause, calls, events))
    return Report(
        tuple(sorted(lines, key=lambda line: -line.received)),
        dist.get_rank() if dist.is_initialized() else 0,
        dist.get_world_size() if dist.is_initialized() else 1,
        tuple(dict.fromkeys(map(_mesh_text, meshes))),
        _settings_text(profiler),
        "default" if chosen is None else str(chosen),
        torch.__version__,
        profiler.seconds,
    )


def _times(notes: Sequence[Ran]) -> int:
    """The number of calls. A redistribution has its own specs, and may take several collectives."""
    ends = {id(note.moved[1]) for note in notes if note.moved is not None}
    return len(ends) or len(notes)


def _specs(value: Any) -> list[DTensorSpec]:
    if isinstance(value, DTensorSpec):
        return [value]
    return [spec for each in value for spec in _specs(each)] if type(value) is tuple else []


def _meshes(profiler: Profiler) -> list[Any]:
    """The meshes of all DTensors, in order."""
    calls = [spec.mesh for call in profiler.calls for spec in _specs((call.args, call.kwargs))]
    moved = [n.moved[0].mesh for n in profiler.notes if n.moved and n.moved[0] is not None]
    return list(dict.fromkeys([*calls, *moved]))


def _mesh_text(mesh: Any) -> str:
    names = mesh.mesh_dim_names or tuple([f"mesh dim {m}" for m in range(mesh.ndim)])
    return ", ".join(f"{name}={n}" for name, n in zip(names, mesh.shape))


def _settings_text(profiler: Profiler) -> str:
    """The settings while the events ran; if the settings changed, the last of them."""
    ran = [*profiler.calls, *(note.source for note in profiler.notes)]
    every = [of.settings for of in ran] if ran else [profiler.settings]
    last = next((settings for settings in reversed(every) if settings is not None), None)
    flags = ("views", "ops", "redistribution", "movement")
    return ", ".join(name for name in flags if getattr(last, name, False))


def _event(one: Collective, note: Ran, meshes: Sequence[Any], network: Any) -> Event:
    received = one.received if one.busiest is None else one.busiest
    model = modelled(one, received, meshes, network)
    return Event(one, note.start, note.end - note.start, model)


def modelled(one: Collective, received: int, meshes: Sequence[Any], network: Any) -> float:
    """Seconds by the network's model (:mod:`cute_sharding.exchange.network`), over the slowest link
    of the mesh dims of the group. A group that belongs to no mesh has as many ranks in a host as
    the default network.
    """
    parts = len(one.ranks)
    if parts < 2:
        return 0.0
    for mesh in meshes:
        dims = _group_on(mesh, one.ranks)
        if dims:
            sizes = tuple(mesh.shape)
            break
    else:
        sizes, dims = (max(one.ranks) - min(one.ranks) + 1,), (0,)
    timed = Network.of_elements(sizes, network, one.itemsize)
    slowest = max(dims, key=lambda m: timed.link(m).beta)
    return timed.collective(
        slowest,
        parts if len(dims) > 1 else sizes[slowest],
        received,
        together=one.op not in ("all-to-all", "messages", "send", "receive"),
        times=2 if one.op == "all-reduce" else 1,
    )


def _group_on(mesh: Any, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh dims whose ranks a group has; None if it is no group of the mesh."""
    for on in communication.slices(mesh):
        if all(on.coordinates(rank) is not None for rank in ranks):
            places = zip(*map(on.device, ranks))
            return tuple([m for m, of in enumerate(places) if len({*of}) > 1])
    return None
