"""Redistribution (torch/distributed/tensor/_redistribute.py): the functions in place of torch's.

torch's function gets other code, because torch's modules and programs have imported it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import Placement

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.communication import wait_for
from cute_sharding.dtensor.replaced.patch import Installed, calling, copy_of

__all__ = [
    "install_redistribution",
    "partition_value",
    "reduce_shard_value",
    "reduce_value",
    "stock_redistribute",
]


# torch's own function, also while it has our code; if a program has put another in its place, that
# one: its code stays (:class:`.patch.Name`).
_torchs = patches.REDISTRIBUTE.owner()
stock_redistribute = (
    _redistribute.redistribute_local_tensor if _torchs is None else copy_of(_torchs)
)


def install_redistribution(
    installed: Installed,
    local_tensor: Callable[..., torch.Tensor],
    local_args: Callable[[Callable[..., Any]], Callable[..., None]],
) -> None:
    """Have ``local_tensor`` redistribute local tensors (it calls :func:`stock_redistribute` for
    what torch has to do), and ``local_args(torch's)`` the arguments of ops.

    Raises:
        RuntimeError: this torch redistributes elsewhere, where it would not be noticed.
    """
    installed.replace(patches.REDISTRIBUTE, calling(lambda _: local_tensor, patches.REDISTRIBUTE))
    installed.replace(patches.REDISTRIBUTE_ARGUMENTS, local_args)


def reduce_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """Finish a pending reduction by the placement's own method."""
    return wait_for(placement._reduce_value(tensor, mesh, mesh_dim))  # type: ignore[attr-defined]


def reduce_shard_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard: Placement
) -> torch.Tensor:
    """Finish a pending reduction by the placement's own method, and keep this rank's share of the
    result.
    """
    of_its_own: Any = placement
    return wait_for(of_its_own._reduce_shard_value(tensor, mesh, mesh_dim, shard))


def partition_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """This rank's contribution to a pending reduction whose result is ``tensor``."""
    return placement._partition_value(tensor, mesh, mesh_dim)  # type: ignore[attr-defined]
