"""``plan_redistribution``: a plan on torch's placement objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.bookkeeping.settings import network_in_force
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.tensor_specs import (
    Partial,
    Placement,
    mesh_dim_text,
)
from cute_sharding.dtensor.run.groups import Means, groups_at_hand
from cute_sharding.dtensor.run.placements import checked_placements
from cute_sharding.dtensor.run.redistribute import prepare
from cute_sharding.dtensor.run.specs import OnMesh, mesh_of, placed_on
from cute_sharding.exchange import Mesh, Network, RedistributionPlan
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.planner import Groups


def plan_redistribution(
    shape: Sequence[int],
    mesh: DeviceMesh | Mesh | Sequence[int],
    src: Sequence[Placement] | str,
    dst: Sequence[Placement] | str,
    *,
    target_mesh: DeviceMesh | Mesh | Sequence[int] | None = None,
    memory_limit: int | None = None,
    network: Network | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    itemsize: int = 4,
) -> RedistributionPlan | ExchangePlan:
    """Plan the redistribution of a tensor of global ``shape`` on ``mesh`` from the placements
    ``src`` to ``dst``. Shards may be uneven.

    Nothing is communicated, and no process group is needed. ``cute_sharding.redistribute`` runs
    this plan, with the same ``memory_limit``. With ``enable(redistribution=True)``,
    ``DTensor.redistribute`` also runs this plan, without a limit. On backends other than gloo,
    uneven blocks may be padded.

    Args:
        shape: the global shape.
        mesh: a DeviceMesh; or sizes, with ranks from 0 on; or a
            :class:`cute_sharding.exchange.Mesh`, which has ranks.
        src, dst: a placement for each mesh dim, from left to right: Shard, _StridedShard,
            Replicate, or Partial (in ``dst`` only if ``src`` has the same Partial). Or text as
            DTensor prints it: ``"S(0), R"``.
        target_mesh: the mesh of ``dst``, in the same forms as ``mesh``; by default ``mesh``.
        memory_limit: the most elements that a device may hold at once: source, target and buffers.
            Exchanges run in rounds to keep within the limit.
        groups: the sets of two or more mesh dims that have a common process group; each single mesh
            dim always has a group. By default all sets, as after ``prepare_groups(mesh)``, or the
            existing groups of a DeviceMesh.
        network: latency and time per element of each mesh dim. By default that of
            ``enable(network=...)`` or ``USE_CUTE_NETWORK``, or NVLink within hosts of eight devices
            and InfiniBand between (:meth:`Network.default`). A running program chooses its plans by
            the same network without its latency. Links with a name are timed for elements of
            ``itemsize`` bytes.
        itemsize: the bytes of an element, for the printed plan; all counts are of elements.

    Returns:
        The plan: ``.steps``, ``.received_elements`` (of the busiest device), ``.lower_bound``,
            ``.peak_elements``, ``.seconds``, ``.collectives``, ``str()``, ``.to_dict()``. Between
            two meshes, an ``ExchangePlan`` (``cute_sharding.exchange.meshes``) with the same.

    Raises:
        ValueError: the arguments do not fit together, or no plan keeps within ``memory_limit``; the
            message names the smallest limit that is enough.
        NotImplementedError, RuntimeError: a Partial cannot be reduced in this way.

    The method is in docs/redistribution.md.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> plan = plan_redistribution((1024, 64), (2, 4), [Shard(0), Shard(1)], [Shard(0), Shard(0)])
    >>> plan.collectives, plan.received_elements == plan.lower_bound
    (1, True)
    >>> print(plan_redistribution((1024, 64), (8,), "R", "S(-1)"))
    local slice: receives 0 elements, 0 s
      ((8,),(1024,64)):((0,),(64,1)) -> ((8,),(1024,8)):((8,),(64,1))
    in all: 0 collectives, 0 elements of 4 bytes received, at most 81,920 held, 0 s
    """
    shape = tuple(map(int, shape))
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative size")
    if itemsize < 1:
        raise ValueError(f"itemsize {itemsize}: an element has at least one byte")
    if target_mesh is not None and mesh_of(target_mesh) != mesh_of(mesh):
        ends = (mesh, src), (target_mesh, dst)
        return _between(shape, *ends, memory_limit, network, groups, itemsize)
    sizes, names, at_hand = _groups_of(mesh.sizes if isinstance(mesh, Mesh) else mesh, groups)
    source, target = (
        checked_placements(placements, shape, sizes, name)
        for placements, name in ((src, "src"), (dst, "dst"))
    )
    for m, (before, after) in enumerate(zip(source, target)):
        if before != after and (
            isinstance(after, Partial)
            or (isinstance(before, Partial) and type(before) is not Partial)
        ):
            raise ValueError(
                f"no plan from {before} to {after} on {mesh_dim_text(m, names)}: a plan cannot "
                "create a Partial, and cannot reduce a subclass of Partial"
            )
    chosen = network_in_force()
    by = Means(chosen, memory_limit, at_hand)
    plan = prepare(shape, sizes, source, target, by=by, timed=network, names=names).plan
    if network is None:
        plan = replace(plan, network=Network.of_elements(sizes, chosen, itemsize))
    return replace(plan.named(names), itemsize=itemsize)


def _between(
    shape: tuple[int, ...],
    source: OnMesh,
    target: OnMesh,
    memory_limit: int | None,
    network: Network | None,
    groups: Sequence[Sequence[int]] | None,
    itemsize: int,
) -> ExchangePlan:
    """The plan between two meshes."""
    (mesh, src), (other, dst) = source, target
    one, two = mesh_of(mesh), mesh_of(other)
    before = checked_placements(src, shape, one.sizes, "src")
    after = checked_placements(dst, shape, two.sizes, "dst")
    for name, placements in (("src", before), ("dst", after)):
        for m, p in enumerate(placements):
            if isinstance(p, Partial) and (name == "dst" or type(p) is not Partial):
                raise ValueError(
                    f"{name} has {p} on mesh dim {m}. Between meshes, a plan cannot create a "
                    "Partial, and cannot reduce a subclass of Partial. Give Shard or Replicate"
                )
    sizes, _, at_hand = _groups_of(one.sizes if isinstance(mesh, Mesh) else mesh, groups)
    network = network or Network.of_elements(sizes, network_in_force(), itemsize)
    start, goal = placed_on(shape, one, before), placed_on(shape, two, after)
    how = network.checked(sizes), memory_limit, at_hand
    plan = plan_exchange(start.placed, goal.placed, *how)
    names = (getattr(each, "mesh_dim_names", None) for each in (mesh, other))
    return replace(plan.named(*names), itemsize=itemsize)


def itemsize_of(dtype: str) -> int | None:
    """The bytes of an element of torch's dtype of that name; None where there is none."""
    found = getattr(torch, dtype.removeprefix("torch."), None)
    return found.itemsize if isinstance(found, torch.dtype) else None


def _groups_of(
    mesh: DeviceMesh | Sequence[int], groups: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], tuple[str, ...] | None, Groups]:
    """The mesh's sizes, the names of its dims, and which sets of them have a process group."""
    names, found = None, None
    if isinstance(mesh, DeviceMesh):
        if (
            groups is None
            and dist.is_initialized()
            and mesh._is_current_rank_part_of_mesh()
            and communication.has_groups(mesh)
        ):
            found = groups_at_hand(mesh)
        names, mesh = mesh.mesh_dim_names, tuple(mesh.shape)
    sizes = tuple(map(int, mesh))
    if any(n < 1 for n in sizes):
        raise ValueError(f"mesh {sizes}: each mesh dim must have at least one device")
    if groups is not None:
        found = frozenset(tuple(sorted(dims)) for dims in groups if len(dims) > 1)
    for dims in found or ():
        if not all(0 <= m < len(sizes) for m in dims):
            raise ValueError(
                f"groups has {dims}, but the dims of the mesh {sizes} are 0 to {len(sizes) - 1}: "
                "write each group as a tuple of mesh dims"
            )
    return sizes, names, found
