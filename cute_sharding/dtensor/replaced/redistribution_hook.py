"""Redistribution (torch/distributed/tensor/_redistribute.py): torch's own steps, and the functions
in place of them.

torch's function gets other code, because torch's modules and programs have imported it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.communication import wait_for
from cute_sharding.dtensor.replaced.patch import Installed, calling, copy_of, require
from cute_sharding.dtensor.replaced.used import PLANNER

__all__ = [
    "install_redistribution",
    "partition_value",
    "reduce_shard_value",
    "reduce_value",
    "require_planner",
    "stock_redistribute",
    "stock_transforms",
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


def require_planner() -> None:
    """
    Raises:
        RuntimeError: this torch cannot list its steps.
    """
    require(PLANNER)


def stock_transforms(source: DTensorSpec, target: DTensorSpec) -> list[Any]:
    """torch's own steps from one spec to another: each has ``mesh_dim``, ``src_dst_placements`` and
    ``logical_shape``.

    torch keeps planners, and they keep results of earlier plans. So this uses a fresh planner, and
    leaves the program's planners alone. Raises what torch raises for such a redistribution;
    :func:`require_planner` checks beforehand that torch can list its steps.
    """
    kept, _redistribute._planner_cache = _redistribute._planner_cache, {}
    try:
        with maybe_disable_local_tensor_mode():
            return list(_redistribute._gen_transform_infos_non_cached(source, target))
    finally:
        _redistribute._planner_cache = kept


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
