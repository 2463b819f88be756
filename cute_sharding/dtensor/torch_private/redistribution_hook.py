"""Redistribution (torch/distributed/tensor/_redistribute.py): torch's own steps, and what stands in
for them.

The function is replaced in every module that has taken it by name, or in none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.tensor import _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from cute_sharding.dtensor.torch_private.collective_ops import waited

__all__ = [
    "REDISTRIBUTION_USERS",
    "Redistribution",
    "install_redistribution",
    "partition_value",
    "redistribution",
    "reduce_shard_value",
    "reduce_value",
    "restore_redistribution",
    "stock_transforms",
]


@dataclass(frozen=True)
class Redistribution:
    """torch's own redistribution: of a local tensor, and of the arguments of an op."""

    local_tensor: Callable[..., torch.Tensor]
    local_args: Callable[..., None]


# The modules that have taken redistribute_local_tensor by name.
REDISTRIBUTION_USERS = (_redistribute, _dispatch, _api)


def redistribution() -> Redistribution:
    """torch's own, as it is now.

    Raises:
        RuntimeError: this torch redistributes elsewhere, and nothing would come by here.
    """
    needed: list[tuple[Any, str]] = [
        *((module, "redistribute_local_tensor") for module in REDISTRIBUTION_USERS),
        (_dispatch.OpDispatcher, "redistribute_local_args"),
    ]
    for owner, name in needed:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}: cute_sharding cannot "
                "redistribute there"
            )
    return Redistribution(
        _redistribute.redistribute_local_tensor, _dispatch.OpDispatcher.redistribute_local_args
    )


def install_redistribution(
    local_tensor: Callable[..., torch.Tensor], local_args: Callable[..., None]
) -> None:
    for module in REDISTRIBUTION_USERS:
        module.redistribute_local_tensor = local_tensor  # type: ignore[attr-defined]
    dispatcher: Any = _dispatch.OpDispatcher
    dispatcher.redistribute_local_args = staticmethod(local_args)


def restore_redistribution(saved: Redistribution) -> None:
    install_redistribution(saved.local_tensor, saved.local_args)


def stock_transforms(source: DTensorSpec, target: DTensorSpec) -> list[Any]:
    """torch's own steps from one spec to another: each has ``mesh_dim``, ``src_dst_placements`` and
    ``logical_shape``.

    torch keeps planners, and they keep what earlier plans led to; so this one starts afresh, and
    leaves those of the program alone.
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
    """Finish a pending reduction as the placement itself does."""
    return waited(placement._reduce_value(tensor, mesh, mesh_dim))  # type: ignore[attr-defined]


def reduce_shard_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard: Placement
) -> torch.Tensor:
    """Finish a pending reduction as the placement itself does, and keep this rank's share of the
    result.
    """
    of_its_own: Any = placement
    return waited(of_its_own._reduce_shard_value(tensor, mesh, mesh_dim, shard))


def partition_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """This rank's contribution to a pending reduction that is to give ``tensor``."""
    return placement._partition_value(tensor, mesh, mesh_dim)  # type: ignore[attr-defined]
