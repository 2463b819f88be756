"""``cute_sharding.redistribute``: from any mesh to any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import compiler, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    mesh_dim_text,
)
from cute_sharding.dtensor.run.placements import checked_placements, without
from cute_sharding.dtensor.run.redistribute import planned_for, redistribute_local_tensor


@compiler.outside_graphs
def redistribute(
    tensor: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | str | None = None,
    *,
    memory_limit: int | None = None,
) -> DTensor:
    """Redistribute a tensor to ``mesh``: its own mesh, the same ranks in another shape or order, or
    other ranks.

    Every rank receives exactly once each element that it needs and does not hold. Ranks that hold
    the same elements share the sending. A ``Partial`` is reduced. Gradients move back to the mesh
    of ``tensor``. If a rank keeps all its elements, the result shares memory with ``tensor``, as in
    PyTorch: clone it before you write into it.

    Call it on every rank of either mesh, also in the backward pass. A rank outside of both meshes
    gets a DTensor without data. One collective sends the elements if one process group has all
    ranks of both meshes (``prepare_groups(mesh, other)``), else one batch of point-to-point
    messages. (NCCL needs a collective of the default group before, or
    ``init_process_group(device_id=...)``.) A compiled program has a graph break here.

    Args:
        tensor: on any mesh, in any placements.
        mesh: a mesh of the same device type. If it is a slice (``mesh["tp"]``), and ranks of
            several slices have the tensor, each of these slices gets the tensor.
        placements: one for each dim of ``mesh``, no Partial; as text, ``"S(0), R"``; by default
            replicas.
        memory_limit: the most elements that a rank may hold of the tensor, the result and buffers.
            The exchanges of the tensor and of its gradient run in rounds. Give the same limit on
            every rank.

    Returns:
        A DTensor of the same global shape, strides and dtype.

    Raises:
        TypeError: ``tensor`` is not a DTensor, or ``placements`` are not placements.
        ValueError: the arguments, or slices of meshes, do not fit together, or ``memory_limit`` is
            too small; the message names the smallest limit that is enough.
        RuntimeError: this rank's local tensor does not have the shape that the placements give.

    The method is in docs/resharding.md ("One tensor, to another mesh").

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of four, of which the others are made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=4, store=store)
    >>> line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    >>> rows = distribute_tensor(torch.ones(8, 6), line, [Shard(0)])
    >>> redistribute(rows, square, [Shard(0), Shard(1)]).to_local().shape
    torch.Size([4, 3])
    >>> torch.distributed.destroy_process_group()
    """
    _check(tensor, mesh)
    wanted: Any = (Replicate(),) * mesh.ndim if placements is None else placements
    wanted = checked_placements(wanted, tuple(tensor.shape), tuple(mesh.shape), "placements")
    _check_reduced(wanted, mesh)
    target = DTensorSpec(mesh, wanted, tensor_meta=tensor._spec.tensor_meta)
    return cast(DTensor, _Redistribute.apply(tensor, target, memory_limit, True))


def _check_reduced(placements: Sequence[Placement], mesh: DeviceMesh) -> None:
    for m, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"cute_sharding.redistribute cannot create {placement} on "
                f"{mesh_dim_text(m, mesh.mesh_dim_names)}: give Shard or Replicate instead of a "
                "Partial"
            )


def _check(tensor: Any, mesh: DeviceMesh) -> None:
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"redistribute takes a DTensor, not {type(tensor).__name__}: create a DTensor with "
            "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"cannot redistribute to {mesh!r}, which is not a DeviceMesh: create a mesh with "
            "torch.distributed.device_mesh.init_device_mesh or DeviceMesh"
        )
    if tensor.device_mesh.device_type != mesh.device_type:
        raise ValueError(
            f"cannot redistribute from a mesh of {tensor.device_mesh.device_type} devices to a "
            f"mesh of {mesh.device_type} devices: first move the tensor to a mesh of "
            f"{mesh.device_type} devices"
        )


class _Redistribute(torch.autograd.Function):
    """Its own derivative: the gradient goes back to the placements of the tensor; for a Partial, to
    all ranks that contributed.

    Only the ranks of a mesh know the placements of a gradient there: torch does not tell other
    ranks which redistributions its ops do. So it is first redistributed to the result's placements.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        target: DTensorSpec,
        memory_limit: int | None,
        is_explicit: bool,
    ) -> DTensor:
        spec = tensor._spec
        finished = without((Partial,), spec.placements)
        # With the tensor's strides: on every rank, the gradient is said to have them.
        ctx.before, ctx.after = tensor_specs.with_placements(spec, finished), target
        ctx.memory_limit = memory_limit
        if memory_limit is not None and tensor.requires_grad:
            _check_limit(target, ctx.before, memory_limit)
        local = redistribute_local_tensor(
            tensor._local_tensor, spec, target, is_explicit=is_explicit, memory_limit=memory_limit
        )
        return tensor_specs.dtensor_of(local, target, requires_grad=tensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        if ctx.before.mesh != ctx.after.mesh:  # on one mesh, all ranks know its placements
            gradient = _Redistribute.apply(gradient, ctx.after, None, False)
        back = _Redistribute.apply(gradient, ctx.before, ctx.memory_limit, False)
        return back, None, None, None


def _check_limit(current: DTensorSpec, target: DTensorSpec, memory_limit: int) -> None:
    """Check, before anything is sent, that a gradient can go back within the limit.

    Raises:
        ValueError: it cannot.
    """
    if current.mesh != target.mesh:
        from cute_sharding.dtensor.run.across_meshes import planned_across

        planned_across(current, target, memory_limit)
    elif current.mesh._is_current_rank_part_of_mesh():
        planned_for(current, target, memory_limit)


# The function that autograd calls to redistribute, forward and backward.
BY_AUTOGRAD = ((_Redistribute, "forward"),)
