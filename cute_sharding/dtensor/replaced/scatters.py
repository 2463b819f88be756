"""The scatter with which tensors are distributed (torch/distributed/tensor/_collective_utils.py).

It is called here, with the ranks' parts put in order; nothing of it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor._collective_utils import mesh_scatter
from torch.distributed.tensor.placement_types import Shard

from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.local_tensors import LocalTensor, local_of

__all__ = ["scatter_parts"]


def _in_order_of_groups(
    parts: Sequence[torch.Tensor], mesh: Any, mesh_dim: int
) -> list[torch.Tensor]:
    """For each place in a process group, the part of the coordinate of its rank."""
    orders = communication.coordinates_in_groups(mesh, mesh_dim)
    if not any(isinstance(part, LocalTensor) for part in parts):
        return [parts[coordinate] for coordinate in orders[communication.this_rank()]]
    return [
        LocalTensor({rank: local_of(parts[order[i]], rank) for rank, order in orders.items()})
        for i in range(len(parts))
    ]


def scatter_parts(
    parts: Sequence[torch.Tensor], dim: int, mesh: Any, mesh_dim: int, source: int
) -> torch.Tensor:
    """This rank's part, by its coordinate, of the parts on the rank ``source`` of its slice. (torch
    goes by the place in the process group, which differs if ranks do not ascend along the mesh.)
    All ranks know the shapes of the parts, which differ only along ``dim``.
    """
    longest = max(part.shape[dim] for part in parts)
    missing = [longest - part.shape[dim] for part in parts]
    padded = [
        torch.nn.functional.pad(part, [0, 0] * (part.ndim - 1 - dim) + [0, n]).contiguous()
        if n
        else part.contiguous()
        for part, n in zip(parts, missing)
    ]
    output = torch.empty_like(padded[0])
    if not communication.is_ascending(mesh):
        padded = _in_order_of_groups(padded, mesh, mesh_dim)
    mesh_scatter(output, padded, mesh, mesh_dim, group_src=source)
    return Shard._maybe_unpad_tensor_with_sizes(
        dim, output, missing, mesh.get_coordinate()[mesh_dim], True
    )
