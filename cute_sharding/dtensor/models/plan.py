"""``plan_reshard``: plans for the DTensors of a state, which run as often as is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.models.moving import Specs
from cute_sharding.dtensor.models.nests import LeafPlace, Nest, State, memory_of
from cute_sharding.dtensor.models.running import RunnablePlan
from cute_sharding.dtensor.models.targets import Targets, WantedOfAll
from cute_sharding.dtensor.replaced import communication, compiler, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.across_meshes import pending_sums
from cute_sharding.dtensor.run.placements import chains_of_spec
from cute_sharding.dtensor.run.several_meshes import meshes_of
from cute_sharding.dtensor.run.specs import Spec
from cute_sharding.exchange import Network, Placed
from cute_sharding.models import PlacedTensor, ReshardPlan, plan_models


@compiler.outside_graphs
def plan_reshard(
    source: Nest | Mapping[str, Spec],
    target: WantedOfAll | Nest | Mapping[str, Spec],
    mesh: DeviceMesh | None = None,
    *,
    memory_limit: int | None = None,
    dtype: torch.dtype | None = None,
    network: Network | None = None,
) -> ReshardPlan:
    """Plan how the tensors of ``source`` move to the meshes and placements of ``target``: the
    exchanges, and the bytes that ranks receive and hold. A plan between DTensors can run any number
    of times.

    Args:
        source: a state, as for :func:`reshard`. Its DTensors may be on the meta device. Or a dict
            of :class:`cute_sharding.Spec` by name, whose meshes need not exist: such a plan cannot
            run.
        target: as ``placements`` of :func:`reshard`; or a state or dict of the same form, whose
            tensors give mesh, placements and dtype.
        mesh, memory_limit, dtype: as for :func:`reshard`.
        network: the links that give the times of the plan.

    Returns:
        The plan: ``.packed``, ``.collectives``, ``.received_bytes`` (of the busiest rank),
            ``.lower_bound``, ``.received_by_link``, ``.peak_bytes``, ``.coverage``, ``.seconds``,
            ``str()``, ``.to_dict()``. A plan between DTensors also has ``.run(state)``,
            ``.send(state)`` for ranks that only have the source, and ``.receive()`` for ranks that
            only need the target. These plan nothing, and send only elements. With ``into=`` they
            write to existing tensors, and with ``since=`` they send only changed elements. On the
            CPU, without a limit, the plan keeps its buffers until ``.free()``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`reshard`.

    The method is in docs/models.md.

    >>> from cute_sharding import Spec
    >>> weights = {f"layers.{i}.weight": Spec((1024, 512), (8,), "S(0)") for i in range(4)}
    >>> columns = {name: Spec((1024, 512), (2, 2), "S(1), R") for name in weights}
    >>> plan = plan_reshard(weights, columns)
    >>> plan.collectives, plan.received_bytes == plan.lower_bound, plan.coverage.is_whole
    (1, True, True)
    """
    if _are_specs(source):
        if not (_are_specs(target) and source.keys() == target.keys()):
            raise ValueError(
                "source is a dict of Specs, but target is not a dict of Specs with the same "
                "names: pass one Spec in target for each name in source"
            )
        pairs = [(name, spec.placed(), target[name].placed()) for name, spec in source.items()]
        return plan_models(pairs, memory_limit, network)
    return planned(State(source), Targets(target, mesh, dtype), memory_limit, network)


def _are_specs(state: Any) -> TypeGuard[Mapping[str, Spec]]:
    is_dict = isinstance(state, Mapping) and bool(state)
    return is_dict and all(isinstance(each, Spec) for each in state.values())


class Group(NamedTuple):
    """One tensor, in all the places where it stands."""

    places: list[LeafPlace]
    specs: Specs


def planned(
    state: State, targets: Targets, memory_limit: int | None, network: Network | None = None
) -> RunnablePlan:
    """The plan for the tensors of a state."""
    groups = _grouped(state.places, targets)
    targets.check_all_used()
    named = [
        (group.places[0].name, *_spec_pair(group.specs.current, group.specs.target))
        for group in groups
    ]
    # Of the same meaning, and yet another mesh or other placements.
    relabelled = {
        group.places[0].name for group in groups if group.specs.current != group.specs.target
    }
    plan = plan_models(named, memory_limit, network, relabelled)
    return RunnablePlan(
        plan.tensors,
        plan.packed,
        memory_limit,
        network,
        tuple([tuple([place.name for place in group.places]) for group in groups]),
        tuple([group.specs for group in groups]),
    )


def _grouped(places: Sequence[LeafPlace], targets: Targets) -> list[Group]:
    """Each tensor once: one that stands in several places, or that is all of the memory of another,
    where all ranks know that.

    Raises:
        ValueError: a tensor is to lie in two ways.
    """
    found: dict[Any, Group] = {}
    keys: dict[int, Any] = {}
    for place in places:
        current, target = place.tensor._spec, targets.of(place)
        is_known = {*_ranks(target)} <= {*_ranks(current)}
        mine = id(place.tensor)
        if mine not in keys:
            keys[mine] = (memory_of(place.tensor), target) if is_known else mine
        group = found.setdefault(keys[mine], Group([], Specs(current, target)))
        if group.specs.target != target:
            raise ValueError(
                f"{group.places[0].name} and {place.name} are the same tensor, but have different "
                "target placements: give the same placements for each name"
            )
        group.places.append(place)
    return list(found.values())


def _ranks(spec: DTensorSpec) -> list[int]:
    return [rank for ranks in communication.rank_lists(spec.mesh) for rank in ranks]


def _spec_pair(current: DTensorSpec, target: DTensorSpec) -> tuple[PlacedTensor, PlacedTensor]:
    """How a tensor lies before and after, in words of the algebra."""
    meshes = meshes_of(current.mesh, target.mesh, communication.this_rank())
    shape = tuple(current.shape)
    if current == target:  # what is pending stays so
        stays = PlacedTensor(Placed(shape, meshes.source, chains_of_spec(current)), _name(current))
        return stays, stays
    tensor_specs.check_no_mixed_partials(tuple(current.placements))
    before = Placed(shape, meshes.source, chains_of_spec(current), pending_sums(current))
    after = Placed(shape, meshes.target, meshes.chains(chains_of_spec(target)))
    return PlacedTensor(before, _name(current)), PlacedTensor(after, _name(target))


def _name(spec: DTensorSpec) -> str:
    meta: Any = spec.tensor_meta
    return str(meta.dtype).removeprefix("torch.")
