"""Modules under fully_shard, which manage their parameters themselves
(torch/distributed/fsdp/_fully_shard): a parameter's memory is part of a buffer that collectives
read, and the parameter is not read again. It may be written to, but not replaced.

Only the placements that torch gives to parameters are changed here, when it makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec

__all__ = ["install_composition", "kept_parameters", "put_back"]


def install_composition(
    installed: Installed,
    sharded_again: Callable[[DTensorSpec, DTensorSpec, int, int], DTensorSpec],
    local_shape: Callable[[DTensorSpec], tuple[int, ...]],
) -> None:
    """Have parameters that are DTensors before fully_shard get the spec ``sharded_again(before,
    torch's, the mesh dim of torch's that fully_shard shards, the tensor dim)``; and their local
    tensors ``local_shape(spec)``, where this rank has no elements before fully_shard.
    """

    def composed(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def _init_sharding_spec(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            local = stock(self, *args, **kwargs)
            before, names = self._unsharded_dtensor_spec, self._sharding_spec.mesh.mesh_dim_names
            on, m = self.mesh_info.mesh, self.mesh_info.shard_mesh_dim
            if before is not None and m is not None:
                m = names.index(on.mesh_dim_names[m])
                dim = self.fsdp_placement.dim
                self._sharding_spec = sharded_again(before, self._sharding_spec, m, dim)
            return local

        return _init_sharding_spec

    def in_shape(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
        def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> DTensor:
            if self.is_dtensor and not self.padded_sharded_param_size.numel():
                shape = torch.Size(local_shape(self._sharding_spec))
                self.sharded_size = self.padded_sharded_param_size = shape
                tensor = tensor.reshape(shape)
            return stock(self, tensor)

        return to_sharded_dtensor

    for row, wrap in (
        (patches.COMPOSED, composed),
        (patches.EMPTY, in_shape),
        (patches.GRADIENTS, _without_empty_ones),
    ):
        installed.once_imported(row, partial(installed.replace, row, wrap))


def _without_empty_ones(stock: Callable[..., None]) -> Callable[..., None]:
    """torch's function that copies gradients into the buffer of a reduce-scatter, for those that
    have elements on this rank: the kernel refuses others, which need no place in the buffer.
    """

    def foreach_reduce_scatter_copy_in(
        unsharded_grads: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        some = [grad for grad in unsharded_grads if grad.numel()]
        if some:
            stock(some, *args, **kwargs)

    return foreach_reduce_scatter_copy_in


def put_back(module: torch.nn.Module) -> None:
    """Have a module that is under fully_shard, or part of such a module, hold its sharded
    parameters, and not the ones that were gathered for a forward.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    parts = {*module.modules()}
    for each in list(_module_state_mapping):
        if isinstance(each, fsdp.FSDPModule) and not parts.isdisjoint(each.modules()):
            each.reshard()


def kept_parameters() -> frozenset[int]:
    """The ids of the parameters of all modules under fully_shard, sharded or gathered."""
    return frozenset(
        id(parameter)
        for state in list(_module_state_mapping.values())
        for group in getattr(state(), "_fsdp_param_groups", ())
        for each in group.fsdp_params
        for parameter in (each.sharded_param, getattr(each, "_unsharded_param", None))
    )
