"""``plan_redistribution``: a plan on torch's placement objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.compat import Partial, Placement, Shard, StridedShard
from cute_sharding.dtensor.placements import text
from cute_sharding.dtensor.redistribute import prepare
from cute_sharding.redistribution import Network, RedistributionPlan


def plan_redistribution(
    shape: Sequence[int],
    mesh: DeviceMesh | Sequence[int],
    src: Sequence[Placement],
    dst: Sequence[Placement],
    *,
    memory_limit: int | None = None,
    network: Network | None = None,
) -> RedistributionPlan:
    """How a tensor of global ``shape`` on ``mesh`` gets from the placements ``src`` to ``dst``; sizes need not divide.

    Nothing is communicated, and no process group is needed. It is what ``redistribute`` runs under ``enable(redistribution=True)``, which knows no memory limit.

    Args:
        shape: the global shape.
        mesh: a DeviceMesh, or its sizes.
        src, dst: a placement for each mesh dim, applied left to right: Shard, _StridedShard, Replicate; Partial in ``src``, and in ``dst`` where ``src`` has the same.
        memory_limit: the most elements that a device may hold at once: source, target and buffers. Exchanges are cut into rounds to keep within it.
        network: latency and time per element of each mesh dim; by default NVLink within hosts of eight devices and InfiniBand between (:meth:`Network.default`).

    Returns:
        The plan: ``.steps``, ``.received_elements`` (of the busiest device), ``.lower_bound``, ``.peak_elements``, ``.seconds``, ``.collectives``, ``str()``, ``.to_dict()``.

    Raises:
        ValueError: the arguments do not fit together, or no plan keeps within ``memory_limit``; the message names the least that would do.
        NotImplementedError, RuntimeError: a pending reduction that cannot be done so.
    """
    names = None
    if isinstance(mesh, DeviceMesh):
        names, mesh = mesh.mesh_dim_names, tuple(mesh.shape)
    sizes, shape = tuple(map(int, mesh)), tuple(map(int, shape))
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative size")
    if any(n < 1 for n in sizes):
        raise ValueError(f"mesh {sizes} has a dim without devices")
    source, target = (_checked(placements, shape, sizes, name) for placements, name in ((src, "src"), (dst, "dst")))
    for m, (before, after) in enumerate(zip(source, target)):
        if before != after and (isinstance(after, Partial) or (isinstance(before, Partial) and type(before) is not Partial)):
            raise ValueError(f"no plan from {before} to {after} on mesh dim {m}: only torch's own Partial can be reduced by plan, and nothing but itself made Partial")
    plan = prepare(shape, sizes, source, target, network=network, memory_limit=memory_limit).plan
    return plan.named(names)


def _checked(placements: Sequence[Any], shape: tuple[int, ...], sizes: tuple[int, ...], name: str) -> tuple[Placement, ...]:
    """The placements with their dims counted from 0."""
    if len(placements) != len(sizes):
        raise ValueError(f"{name} has {len(placements)} placements {text(placements)} for a mesh of {len(sizes)} dims {sizes}: give one for each")
    result: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(f"{name} has {placement!r}, which is no placement: use Shard, _StridedShard, Replicate or Partial of torch.distributed.tensor")
        if isinstance(placement, (Shard, StridedShard)):
            if not -len(shape) <= placement.dim < len(shape):
                raise ValueError(f"{name}: placement {placement} names dim {placement.dim}; the shape {shape} has {len(shape)} dims")
            dim = placement.dim % len(shape)
            placement = StridedShard(dim, split_factor=placement.split_factor) if isinstance(placement, StridedShard) else Shard(dim)
        result.append(placement)
    return tuple(result)
