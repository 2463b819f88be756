"""Which elements of a DTensor a rank holds: ``local_boxes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import (
    communication,
    dispatch_modes,
    local_tensors,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import chains_of_spec
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.sharding import Box
from cute_sharding.sharding.boxes import boxes
from cute_sharding.sharding.rows import Device


def local_boxes(tensor: DTensor | DTensorSpec, rank: int | None = None) -> tuple[Box, ...]:
    """The boxes that a rank holds of a DTensor, for any placements: global offset, size and local
    offset of each dim, as strided runs. Each element of the rank's local tensor is in one box.

    An even strided shard is one box with loops (:class:`cute_sharding.Box`), and an uneven one is a
    few boxes. A rank without elements, or outside of the mesh, has no box. If the mesh is a slice
    of a larger mesh, the boxes are those of the slice that has this process. A tensor without dims
    is one box without dims. For a ``Partial``, ``box.pending`` names the reduction.

    Nothing is communicated.

    Args:
        tensor: a DTensor, or its spec.
        rank: a global rank; by default this process's.

    Raises:
        TypeError: ``tensor`` is neither a DTensor nor a spec.
        ValueError: a placement is of an unknown kind; sizes are symbols, while a program is
            compiled; the local tensor has other sizes than its placements give; or all ranks run in
            this process and ``rank`` is None.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import DTensor, Shard
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of two, of which the other is made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    >>> mesh = init_device_mesh("cpu", (2,))
    >>> x = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)], shape=(7, 3), stride=(3, 1))
    >>> for rank in range(2):
    ...     for box in local_boxes(x, rank):
    ...         print(rank, box.global_offset, box.size, box.local_offset)
    0 (0, 0) (4, 3) (0, 0)
    1 (4, 0) (3, 3) (0, 0)
    >>> torch.distributed.destroy_process_group()
    """
    if not isinstance(tensor, (DTensor, DTensorSpec)):
        raise TypeError(
            f"local_boxes takes a DTensor or a DTensorSpec, not a {type(tensor).__name__}: "
            "without PyTorch, use Sharding.boxes"
        )
    spec = tensor._spec if isinstance(tensor, DTensor) else tensor
    _check_understood(spec)
    device = _place(spec.mesh, rank)
    if device is None:
        return ()
    if isinstance(tensor, DTensor) and spec.mesh.get_coordinate() is not None:
        check_sizes(spec, tensor._local_tensor, rank, device)
    return held_at(spec, device)


def held_at(spec: DTensorSpec, device: Sequence[int]) -> tuple[Box, ...]:
    """The boxes of the device at these coordinates of the mesh."""
    pending = [
        p.reduce_op if type(p) is Partial else str(p)
        for p, n in zip(spec.placements, spec.mesh.shape)
        if isinstance(p, Partial) and n > 1
    ]
    return boxes(tuple(spec.shape), _placed(spec).held_on(tuple(device)), pending)


def local_shape(spec: DTensorSpec) -> tuple[int, ...]:
    """The shape of this rank's local tensor, by the placements; the rank is on the mesh."""
    here = spec.mesh.get_coordinate()
    assert here is not None
    return _placed(spec).shape_of(tuple(here))


def _placed(spec: DTensorSpec) -> Placed:
    """The tensor on the numbers of its mesh's places."""
    return Placed(tuple(spec.shape), Mesh.numbered(tuple(spec.mesh.shape)), chains_of_spec(spec))


def _check_understood(spec: DTensorSpec) -> None:
    if symints.is_symbolic(tuple(spec.shape)):
        raise ValueError(
            f"local_boxes cannot read the shape {tuple(spec.shape)}, because its sizes are symbols "
            "while a program is compiled: call local_boxes outside of the compiled program"
        )
    for placement in spec.placements:
        if type(placement) not in (Shard, StridedShard, Replicate) and not isinstance(
            placement, Partial
        ):
            raise ValueError(
                f"local_boxes does not know which rows each rank holds for the placement "
                f"{placement!r} of class {type(placement).__name__}: redistribute the tensor to "
                "Shard or Replicate first"
            )


def _place(mesh: Any, rank: int | None) -> Device | None:
    """The rank's coordinates on the mesh; of a slice, on the slice with this process. None if it is
    not on it.
    """
    if rank is None:
        if dispatch_modes.local_tensor_mode() is not None:
            raise ValueError(
                "local_boxes needs a rank, because all ranks run in this process: give a rank, "
                "such as rank=0"
            )
        found = mesh.get_coordinate()
        return None if found is None else tuple(found)
    here = _this_rank()
    every = communication.slices(mesh)
    some = [on for on in every if here is not None and on.coordinates(here) is not None]
    places = [on.coordinates(rank) for on in some or every]
    return next((place for place in places if place is not None), None)


def _this_rank() -> int | None:
    """This process's rank; None without process groups."""
    return communication.this_rank() if dist.is_initialized() else None


def check_sizes(spec: DTensorSpec, local: torch.Tensor, rank: int | None, device: Device) -> None:
    """Check that the local tensor at hand, if it is that rank's, has the sizes of its boxes: a
    program may have made a DTensor of a local tensor of other sizes.
    """
    if dispatch_modes.is_tracing():
        return
    if dispatch_modes.local_tensor_mode() is not None:
        assert rank is not None
        local = local_tensors.local_of(communication.wait_for(local), rank)
    elif rank not in (None, _this_rank()):
        return
    mesh, sizes = tuple(spec.mesh.shape), _placed(spec).shape_of(device)
    if tuple(local.shape) != sizes:
        raise ValueError(
            f"local_boxes: the local tensor on {'this rank' if rank is None else f'rank {rank}'} "
            f"has shape {tuple(local.shape)}, but must have shape {sizes}. The DTensor has shape "
            f"{tuple(spec.shape)} and placements {spec.placements} on mesh "
            f"{tensor_specs.mesh_text(mesh, spec.mesh.mesh_dim_names)}. Create the DTensor with "
            "distribute_tensor. Or call DTensor.from_local with shape=, stride= and local tensors "
            "of the sizes that distribute_tensor makes"
        )
