"""Moves a local tensor from one mesh to another.

What is pending is reduced on its own mesh first, and left in parts as small as possible. Then every
element that a rank needs and does not hold reaches it once (:mod:`cute_sharding.exchange`): in one
all-to-all of the ranks of both meshes or, if they have no common process group, in one batch of
point-to-point messages. Which of both depends only on the meshes, the groups that
``prepare_groups`` made and the exchange, so all ranks of both agree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, Received, count_moves
from cute_sharding.dtensor.replaced import (
    communication,
    dispatch_modes,
    observing,
    redistribution_hook,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial
from cute_sharding.dtensor.run.bundles import Shipment
from cute_sharding.dtensor.run.executor import run
from cute_sharding.dtensor.run.groups import (
    Means,
    group_of_ranks,
    is_native,
    means,
    on_each_rank,
    slice_with,
)
from cute_sharding.dtensor.run.packing import in_shape, lay_out
from cute_sharding.dtensor.run.placements import chains_of_spec, text
from cute_sharding.dtensor.run.specs import dtype_of, name_of, on_all, placed_of
from cute_sharding.exchange import Bundle, Exchange, Item, Mesh, Network, Placed
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.plan import received_by_all
from cute_sharding.models import PlacedTensor
from cute_sharding.sharding.rows import Chains

# The backend's all-to-all may also visit ranks that get nothing. In groups of at least MANY ranks,
# a rank with FEW times fewer peers sends to each peer by itself.
MANY, FEW = 16, 4


class PreparedExchange(NamedTuple):
    """A plan from one mesh to another, what it counts as, and its exchange."""

    plan: ExchangePlan
    kind: Kind
    shipment: Shipment


def move_across(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, memory_limit: int | None = None
) -> torch.Tensor:
    """The local tensor of this rank on the mesh of ``target``, which is not that of ``current``; an
    empty tensor on a rank outside of it. A moved tensor is laid out by its global strides.

    Raises:
        NotImplementedError: a compiler traces.
        ValueError: the meshes are slices that do not belong together, or no plan keeps every rank
            within ``memory_limit`` elements.
        OtherShape: this rank's local tensor does not have the shape that its spec gives.
    """
    if dispatch_modes.is_tracing():
        raise NotImplementedError(
            f"cannot redistribute from mesh {current.mesh} to mesh {target.mesh} in a compiled "
            "program: call cute_sharding.redistribute(tensor, mesh, placements) outside of "
            "compiled programs, on real tensors"
        )
    plan, kind, shipment = planned_across(current, target, memory_limit)
    local = as_sent(local, current, plan)
    exchange, rounds, (dtype,) = plan.exchange, plan.crossing.rounds, shipment.dtypes
    is_mine = communication.this_rank() in exchange
    if not is_mine and dispatch_modes.local_tensor_mode() is None:
        return local.new_empty(0)  # this rank is on neither mesh
    if is_mine:
        count_moves(kind)
    group = None if exchange.is_free else on_which_group(exchange, current.mesh, target.mesh)
    with observing.exchange(lambda: -(-exchange.received_elements // rounds) * dtype.itemsize):
        (moved,) = shipment.run([local], group, rounds, alias=True)
    return lay_out(moved, target.tensor_meta)


def planned_across(
    current: DTensorSpec, target: DTensorSpec, memory_limit: int | None
) -> PreparedExchange:
    """The plan that :func:`move_across` runs.

    Raises:
        ValueError: as that.
    """
    by = means(current.mesh)._replace(memory_limit=memory_limit)
    return _planned(current, target, by, communication.this_rank())


@remembered
def _planned(current: DTensorSpec, target: DTensorSpec, by: Means, rank: int) -> PreparedExchange:
    source, goal = placed_ends(current, target, rank)
    plan = plan_between(current.mesh, source, goal, by)
    bundle = Bundle((Item(plan.exchange, source.itemsize),))
    refuse = partial(_refuse, current)
    shipment = Shipment(lambda _: bundle, (dtype_of(source.dtype),), refuse=refuse)
    return PreparedExchange(plan, Kind(partial(_moved_by, plan)), shipment)


def placed_ends(
    current: DTensorSpec, target: DTensorSpec, rank: int, *, replicas: bool = False
) -> tuple[PlacedTensor, PlacedTensor]:
    """How a tensor lies before and after, in words of the algebra: on the slices of meshes that
    belong together for ``rank``. What is pending stays so if it lies alike. ``replicas``: slices of
    a mesh have replicas of one tensor, as of a weight, and not a tensor each.

    Raises:
        RuntimeError: pending reductions do not commute.
        ValueError: as :func:`meshes_of`.
    """
    (first, *others), onto = map(communication.slices, (current.mesh, target.mesh))
    if replicas and others and len(onto) == 1:
        before = on_all(placed_of(current, first), others)
        meta, after = target.tensor_meta, replace(before.placed, mesh=onto[0])
        after = replace(after, chains=chains_of_spec(target))
        return before, PlacedTensor(after, before.dtype if meta is None else name_of(meta.dtype))
    meshes = meshes_of(current.mesh, target.mesh, rank)
    before = placed_of(current, meshes.source)
    if current == target:
        placed = before.placed
        return (replace(before, placed=placed.cut_as(placed.chains)),) * 2
    tensor_specs.check_no_mixed_partials(tuple(current.placements))
    chains = meshes.chains(chains_of_spec(target))
    after = Placed(before.placed.shape, meshes.target, chains)
    meta = target.tensor_meta
    return before, PlacedTensor(after, before.dtype if meta is None else name_of(meta.dtype))


def plan_between(mesh: Any, source: PlacedTensor, target: PlacedTensor, by: Means) -> ExchangePlan:
    """The plan from ``mesh``, by its process groups."""
    network = Network.of_programs(tuple(mesh.shape), by.network)
    how = network, by.memory_limit, by.groups, by.native
    return plan_exchange(source.placed, target.placed, *how)


def _moved_by(plan: ExchangePlan) -> Moved:
    received = Received(plan.received_elements, received_by_all(plan.stages))
    return Moved(plan=1, collectives=plan.collectives, received=received)


def as_sent(local: torch.Tensor, spec: DTensorSpec, plan: ExchangePlan) -> torch.Tensor:
    """What this rank sends of a tensor: its local tensor with nothing pending; without elements on
    a rank that is not on the mesh.

    Raises:
        OtherShape: the local tensor does not have the shape that its spec gives.
    """
    mesh = spec.mesh
    if mesh._is_current_rank_part_of_mesh():
        for m, placement in enumerate(spec.placements):
            # By their own methods: a norm's, a masked embedding's.
            if isinstance(placement, Partial) and type(placement) is not Partial:
                local = redistribution_hook.reduce_value(placement, local, mesh, m)
        local = run(plan.steps, local, mesh)
    assert spec.tensor_meta is not None, "it has a shape"
    source, dtype = plan.source, spec.tensor_meta.dtype
    return on_each_rank(
        lambda rank, x: _checked(x, source.local_shape(rank), dtype), communication.wait_for(local)
    )


def _checked(
    local: torch.Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> torch.Tensor:
    if shape is None:
        return torch.empty(0, dtype=dtype, device=local.device)
    return in_shape(local, shape).resolve_conj().resolve_neg()


def _refuse(current: DTensorSpec) -> NoReturn:
    raise RuntimeError(
        f"a tensor of shape {tuple(current.shape)} on mesh {current.mesh} has placements "
        f"{text(current.placements)} on this rank, but different placements on the ranks of the "
        "mesh. Ranks outside of a mesh may compute different placements for the result of an op. "
        "First redistribute the result to explicit placements on its own mesh"
    )


# -- two meshes ------------------------------------------------------------------------------------


class Meshes(NamedTuple):
    """The ranks of the mesh that a tensor is on, and of the mesh that it goes to.

    Attributes:
        slices: whether the target has one more mesh dim in front: the slices of a larger mesh, each
            of which gets the tensor.
    """

    source: Mesh
    target: Mesh
    slices: bool = False

    def chains(self, of_target: Chains) -> Chains:
        """The chains of cuts on the target, from those of the placements on its mesh."""
        more = int(self.slices)
        return tuple([tuple([(m + more, factor) for m, factor in chain]) for chain in of_target])


@remembered
def meshes_of(mesh: Any, other: Any, rank: int) -> Meshes:
    """The ranks of both meshes, where they are slices of larger ones: of the slices that belong
    together for ``rank``. Where ``other`` is a slice, and ranks of ``mesh`` are on several such,
    each of these gets the tensor.

    Raises:
        ValueError: it is not known which slice goes to which, or a rank of the one sees another
            slice of the other.
    """
    mine, others = communication.slices(mesh), communication.slices(other)
    source = mine[0] if len(mine) == 1 else slice_with(mesh, rank)
    meeting = [on for on in others if not {*on.ranks}.isdisjoint(source.ranks)]
    if len(mine) == 1 and len(meeting) > 1:
        every = [r for on in others for r in on.ranks]
        return Meshes(source, Mesh((len(others), *other.shape), every), slices=True)
    target = others[0] if len(others) == 1 else slice_with(other, rank)
    for one, theirs, some in ((source, target, others), (target, source, mine)):
        for seen in some:
            if seen != theirs and not {*one.ranks}.isdisjoint(seen.ranks):
                raise ValueError(
                    f"cannot redistribute from {mesh} to {other}: some of the ranks "
                    f"{[*one.ranks]} are on the mesh slice of ranks {[*seen.ranks]} instead of the "
                    f"mesh slice of ranks {[*theirs.ranks]}. Redistribute on a whole mesh instead "
                    "of a slice"
                )
    return Meshes(source, target)


def on_which_group(exchange: Exchange | Bundle, mesh: Any, other: Any) -> Any | None:
    """The process group for one collective; None for point-to-point messages: the ranks of both
    meshes have no common group, or each has few peers and the backend's all-to-all visits all
    ranks.
    """
    ranks = exchange.ranks
    group = group_of_ranks(ranks, mesh, other)
    if group is None or is_native(communication.backend_name(group, mesh.device_type)):
        return group
    return None if len(ranks) >= MANY and exchange.most_peers * FEW <= len(ranks) else group
