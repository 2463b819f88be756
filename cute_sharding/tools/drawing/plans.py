"""The plans that pictures show, from one sharding to another: on layouts alone, for meshes that
have all process groups.
"""

from __future__ import annotations

from cute_sharding._settings import network_in_force
from cute_sharding.exchange import Mesh, Network, Placed, RedistributionPlan
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.rows import chains_of


def planned_between(source: Sharding, ranks: Mesh, target: Sharding, other: Mesh) -> ExchangePlan:
    """The plan from a sharding on one mesh to a sharding on another, for meshes that have all
    process groups.

    Raises:
        ValueError: the shardings do not belong to one tensor, a mesh has another size than its
            sharding, or the target has a Partial.
    """
    for sharding, mesh in ((source, ranks), (target, other)):
        if sharding.mesh != mesh.sizes:
            raise ValueError(
                f"{sharding} does not fit the {mesh}: give a mesh with the sizes {sharding.mesh}"
            )
    if source.shape != target.shape:
        raise ValueError(f"{source} and {target} must have the same shape")
    if any(isinstance(p, Partial) for p in target.placements):
        raise ValueError(
            f"no plan to {target}, because a target on another mesh must not have a Partial: use "
            "Shard or Replicate"
        )
    ops = {p.reduce_op for p in source.placements if isinstance(p, Partial)}
    if len(ops) > 1:
        raise ValueError(
            f"{source} has Partial placements with the reductions {sorted(ops)}: use one reduction "
            "for all Partial placements"
        )
    pending = [
        (m, p.reduce_op)
        for m, p in enumerate(source.placements)
        if isinstance(p, Partial) and source.mesh[m] > 1
    ]
    ndim = len(source.shape)
    before, after = (
        Placed(x.shape, mesh, chains_of(x.cuts, ndim, x.mesh), pending)
        for x, mesh, pending in ((source, ranks, tuple(pending)), (target, other, ()))
    )
    network = Network.of_programs(source.mesh, network_in_force())
    return plan_exchange(before, after, network)


def planned(source: Sharding, target: Sharding) -> RedistributionPlan:
    """The plan between two shardings, on layouts alone, for a mesh that has all process groups.

    Raises:
        ValueError: they do not belong to one tensor, or a reduction would have to be made pending.
    """
    if (source.shape, source.mesh) != (target.shape, target.mesh):
        raise ValueError(f"{source} and {target} must have the same shape and the same mesh")
    mesh, ndim = source.mesh, len(source.shape)
    pairs = list(zip(source.placements, target.placements))
    for m, (before, after) in enumerate(pairs):
        if before != after and isinstance(after, Partial):
            raise ValueError(
                f"no plan from {before} to {after} on mesh dim {m}: a plan cannot create a Partial"
            )
    ops = {p.reduce_op for p in source.placements if isinstance(p, Partial)}
    if len(ops) > 1:
        raise ValueError(
            f"{source} has Partial placements with the reductions {sorted(ops)}: use one reduction "
            "for all Partial placements"
        )
    ends = (
        Placed.numbered(
            side.shape,
            mesh,
            chains_of(side.cuts, ndim, mesh),
            tuple(
                (m, p.reduce_op)
                for m, p in enumerate(side.placements)
                if isinstance(p, Partial) and mesh[m] > 1
            ),
        )
        for side in (source, target)
    )
    by = network_in_force()
    start, goal = ends
    steps = plan_steps(start, goal, Network.of_programs(mesh, by))
    return RedistributionPlan(start, goal, steps, Network.of(mesh, by))
