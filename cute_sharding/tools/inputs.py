"""What tools take, from what a caller has: DTensors, placements of torch or as text, meshes, views;
and the plans between two shardings. No torch is imported for the names of its classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from cute_sharding._settings import network_in_force
from cute_sharding.exchange import Mesh, Network, Placed, RedistributionPlan
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.layout import Layout
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import View
from cute_sharding.sharding import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    parse_placements,
)
from cute_sharding.sharding.rows import Chains, chains_of

REDUCTIONS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


@runtime_checkable
class DeviceMeshLike(Protocol):
    """What tools read of a DeviceMesh."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    @property
    def mesh(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...


@runtime_checkable
class DTensorLike(Protocol):
    """What tools read of a DTensor."""

    @property
    def device_mesh(self) -> Any: ...
    @property
    def placements(self) -> Sequence[Any]: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def ndim(self) -> int: ...
    def to_local(self) -> Any: ...


PlacementsLike: TypeAlias = "str | Sequence[object] | Sharding"
"""Placements as text (``"S(1), R"``), as objects (torch's or ours), or as a sharding.

>>> placements: PlacementsLike = "S(1), R"
>>> sharding_of((4, 4), (2, 2), placements).placements
(Shard(dim=1, split_factor=1), Replicate())
"""
MeshLike: TypeAlias = "DeviceMeshLike | Mesh | Sequence[int]"
"""A mesh: torch's, ours, or its sizes, of ranks from 0 on.

>>> mesh: MeshLike = (2, 2)
>>> mesh_of(mesh).ranks
range(0, 4)
"""


def names_of(names: Sequence[str] | None, mesh: Sequence[int]) -> tuple[str, ...]:
    """A name for each mesh dim."""
    if names is None:
        return tuple(f"mesh{m}" for m in range(len(mesh)))
    if len(names) != len(mesh) or len(set(names)) < len(mesh):
        raise ValueError(
            f"the names of the dims of mesh {tuple(mesh)} are {tuple(names)}: give each mesh dim a "
            "different name"
        )
    return tuple(names)


def sharding_of(shape: Sequence[int], mesh: Sequence[int], placements: PlacementsLike) -> Sharding:
    """The sharding of a tensor, from placements or, as text, from a layout (devices, local)."""
    if isinstance(placements, Sharding):
        return placements
    shape, mesh = tuple(map(int, shape)), tuple(map(int, mesh))
    if isinstance(placements, str) and ":" in placements:
        found = Sharding.read(Layout.parse(placements), shape)
        if found.mesh != mesh:
            raise ValueError(
                f"the layout {placements} needs a mesh of sizes {found.mesh}, but the given mesh "
                f"has sizes {mesh}"
            )
        return found
    if isinstance(placements, str):
        given: tuple[Placement, ...] = parse_placements(placements, len(shape))
    else:
        given = tuple(map(_placement_of, placements))
    for p in given:
        if isinstance(placements, str) and isinstance(p, Partial) and p.reduce_op not in REDUCTIONS:
            raise ValueError(f"the reduction of {p} is unknown: use one of {', '.join(REDUCTIONS)}")
    return Sharding(shape, mesh, given)


def _placement_of(p: Any) -> Placement:
    if isinstance(p, (Shard, Replicate, Partial)):
        return p
    kinds = {base.__name__ for base in type(p).__mro__}
    # In torch a _StridedShard is no Shard in some releases, and one in others.
    if "_StridedShard" in kinds:
        return Shard(p.dim, int(p.split_factor))
    if "Shard" in kinds:
        return Shard(p.dim)
    if "Replicate" in kinds:
        return Replicate()
    if "Partial" in kinds:
        return Partial(str(p.reduce_op))
    raise TypeError(
        f"{p!r} is not a placement that can be drawn: use Shard, _StridedShard, Replicate or "
        "Partial"
    )


def sharding_of_dtensor(tensor: DTensorLike) -> Sharding:
    """What a DTensor's placements say, read left to right."""
    return sharding_of(tensor.shape, tensor.device_mesh.shape, tensor.placements)


def mesh_of(mesh: MeshLike | int) -> Mesh:
    """A mesh with its ranks, from a DeviceMesh, from ours, or from sizes: then of ranks from 0 on.

    >>> mesh_of((2, 2)).text()
    'mesh (2, 2) of ranks 0 to 3'
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMeshLike):
        return Mesh(tuple(map(int, mesh.shape)), tuple(mesh.mesh.flatten().tolist()))
    return Mesh.numbered((mesh,) if isinstance(mesh, int) else tuple(map(int, mesh)))


# The ops that are views, with their rows of the table.
VIEWS = {
    "view": "Tensor.view",
    "permute": "torch.permute",
    "expand": "Tensor.expand",
    "repeat": "Tensor.repeat",
}


def view_of(name: str, numbers: Any, shape: Sequence[int]) -> tuple[str, View]:
    """A view, and what to call it: a View, or an op of ``VIEWS`` with its numbers."""
    if isinstance(numbers, View):
        return f"a view to {numbers.output_shape}", numbers
    sizes = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    made = BY_OP[VIEWS[name]].view(tuple(shape), sizes)
    return f"{name}{made.output_shape if name == 'view' else sizes}", made


def planned(
    source: Sharding, mesh: Mesh, target: Sharding, other: Mesh
) -> RedistributionPlan | ExchangePlan:
    """The plan from a sharding on one mesh to a sharding on this or another mesh: on layouts alone,
    for meshes that have all process groups.

    Raises:
        ValueError: the shardings do not belong to one tensor, a mesh has another size than its
            sharding, or a reduction would have to be made pending.
    """
    for sharding, of in ((source, mesh), (target, other)):
        if sharding.mesh != of.sizes:
            raise ValueError(
                f"{sharding} does not fit the {of}: give a mesh with the sizes {sharding.mesh}"
            )
    if source.shape != target.shape:
        raise ValueError(f"{source} and {target} must have the same shape")
    ops = {p.reduce_op for p in source.placements if isinstance(p, Partial)}
    if len(ops) > 1:
        raise ValueError(
            f"{source} has Partial placements with the reductions {sorted(ops)}: use one reduction "
            "for all Partial placements"
        )
    start, goal = placed_of(source, mesh), placed_of(target, other)
    if any(each not in start.pending or other != mesh for each in goal.pending):
        raise ValueError(
            f"no plan to {target} on the {other}: a plan cannot create a Partial. Use Shard or "
            "Replicate"
        )
    network = network_in_force()
    by = Network.of_programs(mesh.sizes, network)
    if other != mesh:
        return plan_exchange(start, goal, by)
    return RedistributionPlan(
        start, goal, plan_steps(start, goal, by), Network.of(mesh.sizes, network)
    )


def placed_of(sharding: Sharding, mesh: Mesh, chains: Chains | None = None) -> Placed:
    """How a tensor lies by a sharding; ``chains``: the cuts, if they are not those of its
    placements from left to right.
    """
    pending = [
        (m, p.reduce_op)
        for m, p in enumerate(sharding.placements)
        if isinstance(p, Partial) and sharding.mesh[m] > 1
    ]
    if chains is None:
        chains = chains_of(sharding.cuts, len(sharding.shape), sharding.mesh)
    return Placed(sharding.shape, mesh, chains, tuple(pending))
