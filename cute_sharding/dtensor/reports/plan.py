"""``plan_redistribution``: a plan on torch's placement objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.bookkeeping.settings import network_in_force
from cute_sharding.dtensor.replaced import process_groups
from cute_sharding.dtensor.replaced.tensor_specs import (
    Partial,
    Placement,
    mesh_dim_text,
)
from cute_sharding.dtensor.run.groups import groups_at_hand
from cute_sharding.dtensor.run.placements import counted_from_0, cut_of, of_text, text
from cute_sharding.dtensor.run.redistribute import prepare
from cute_sharding.redistribution import Network, RedistributionPlan
from cute_sharding.redistribution.routes import Groups


def plan_redistribution(
    shape: Sequence[int],
    mesh: DeviceMesh | Sequence[int],
    src: Sequence[Placement] | str,
    dst: Sequence[Placement] | str,
    *,
    memory_limit: int | None = None,
    network: Network | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    itemsize: int = 4,
) -> RedistributionPlan:
    """How a tensor of global ``shape`` on ``mesh`` gets from the placements ``src`` to ``dst``;
    sizes need not divide.

    Nothing is communicated, and no process group is needed. It is what ``redistribute`` runs under
    ``enable(redistribution=True)``, which knows no memory limit; but a backend other than gloo also
    pads blocks of rows that are not of one size, for collectives of its own.

    Args:
        shape: the global shape.
        mesh: a DeviceMesh, or its sizes.
        src, dst: a placement for each mesh dim, applied left to right: Shard, _StridedShard,
            Replicate; Partial in ``src``, and in ``dst`` where ``src`` has the same. Or as text, as
            DTensor prints them: ``"S(0), R"``.
        memory_limit: the most elements that a device may hold at once: source, target and buffers.
            Exchanges are cut into rounds to keep within it.
        groups: the sets of two or more mesh dims whose ranks have a process group together; each
            mesh dim by itself has one. By default all sets, as after ``prepare_groups(mesh)``; and
            of a DeviceMesh with process groups those that it has.
        network: latency and time per element of each mesh dim. By default what programs choose
            their plans by (without its latency): that of ``enable(network=...)`` or
            ``USE_CUTE_NETWORK``, else NVLink within hosts of eight devices and InfiniBand between
            (:meth:`Network.default`); links that have a name are timed for elements of ``itemsize``
            bytes.
        itemsize: the bytes of an element, by which the plan is shown; all counts are of elements.

    Returns:
        The plan: ``.steps``, ``.received_elements`` (of the busiest device), ``.lower_bound``,
            ``.peak_elements``, ``.seconds``, ``.collectives``, ``str()``, ``.to_dict()``.

    Raises:
        ValueError: the arguments do not fit together, or no plan keeps within ``memory_limit``; the
            message names the least that would do.
        NotImplementedError, RuntimeError: a pending reduction that cannot be done so.

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
    sizes, names, at_hand = _groups_of(mesh, groups)
    shape = tuple(map(int, shape))
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative size")
    if itemsize < 1:
        raise ValueError(f"itemsize {itemsize}: an element has at least one byte")
    source, target = (
        _checked(placements, shape, sizes, name)
        for placements, name in ((src, "src"), (dst, "dst"))
    )
    for m, (before, after) in enumerate(zip(source, target)):
        if before != after and (
            isinstance(after, Partial)
            or (isinstance(before, Partial) and type(before) is not Partial)
        ):
            raise ValueError(
                f"no plan from {before} to {after} on {mesh_dim_text(m, names)}: only torch's own "
                "Partial can be reduced by plan, and nothing but itself made Partial"
            )
    chosen = network_in_force()
    plan = prepare(
        shape,
        sizes,
        source,
        target,
        network=chosen,
        timed=network,
        memory_limit=memory_limit,
        groups=at_hand,
        names=names,
    ).plan
    if network is None:
        plan = replace(plan, network=Network.of_elements(sizes, chosen, itemsize))
    return replace(plan.named(names), itemsize=itemsize)


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
            and process_groups.has_groups(mesh)
        ):
            found = groups_at_hand(mesh)
        names, mesh = mesh.mesh_dim_names, tuple(mesh.shape)
    sizes = tuple(map(int, mesh))
    if any(n < 1 for n in sizes):
        raise ValueError(f"mesh {sizes} has a dim without devices")
    if groups is not None:
        found = frozenset(tuple(sorted(dims)) for dims in groups if len(dims) > 1)
    for dims in found or ():
        if not all(0 <= m < len(sizes) for m in dims):
            raise ValueError(
                f"groups has {dims}, which are no mesh dims of {sizes}: give sets of numbers from "
                f"0 to {len(sizes) - 1}"
            )
    return sizes, names, found


def _checked(
    given: Sequence[Any] | str, shape: tuple[int, ...], sizes: tuple[int, ...], name: str
) -> tuple[Placement, ...]:
    """The placements with their dims counted from 0."""
    placements: Sequence[Any] = of_text(given, len(shape)) if isinstance(given, str) else given
    if len(placements) != len(sizes):
        raise ValueError(
            f"{name} has {len(placements)} placements {text(placements)} for a mesh of "
            f"{len(sizes)} dims {sizes}: give one for each"
        )
    result: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(
                f"{name} has {placement!r}, which is no placement: use Shard, _StridedShard, "
                "Replicate or Partial of torch.distributed.tensor"
            )
        cut = cut_of(placement)
        if cut is not None and not -len(shape) <= cut[0] < len(shape):
            raise ValueError(
                f"{name}: placement {placement} names dim {cut[0]}; the shape {shape} "
                f"has {len(shape)} dims"
            )
        result.append(counted_from_0(placement, len(shape)))
    return tuple(result)
