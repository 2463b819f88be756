"""Functions of torch with fixed placements for their inputs, which raise for others: the losses of
loss_parallel (torch/distributed/tensor/parallel/loss.py), local_map
(torch/distributed/tensor/experimental/_func_map.py) and distribute_tensor (_api.py).

The losses' entries and the function behind local_map may be replaced here, once a program imports
them; distribute_tensor gets other code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import DTensor, _utils

from cute_sharding.dtensor.replaced import patches, tensor_specs
from cute_sharding.dtensor.replaced.patch import Installed, calling

__all__ = ["install_distribution", "install_given_placements"]


def install_distribution(
    installed: Installed,
    brought: Callable[[Any, Any, Any], Any],
    distributed: Callable[[Any, Any, Any, int | None], Any | None],
    check_locals: Callable[[torch.Tensor, Any, Any, Any, Any], None],
) -> None:
    """Have distribute_tensor continue with ``brought(tensor, mesh, placements)`` for a DTensor with
    other placements than requested; and return ``distributed(tensor, mesh, placements, source)``
    for a plain tensor, unless that is None. And have from_local(..., run_check=True) first call
    ``check_locals(local tensor, mesh, placements, shape, stride)``, if it is given a shape.
    """

    def checked(stock: Callable[..., Any]) -> Callable[..., Any]:
        def from_local(
            local_tensor: torch.Tensor,
            device_mesh: Any = None,
            placements: Any = None,
            *,
            run_check: bool = False,
            shape: Any = None,
            stride: Any = None,
            **others: Any,
        ) -> Any:
            if run_check and shape and stride and device_mesh is not None:
                check_locals(local_tensor, device_mesh, placements, tuple(shape), tuple(stride))
            how = {"run_check": run_check, "shape": shape, "stride": stride, **others}
            return stock(local_tensor, device_mesh, placements, **how)

        return from_local

    def distributing(stock: Callable[..., Any]) -> Callable[..., Any]:
        def distribute_tensor(
            tensor: torch.Tensor,
            device_mesh: Any = None,
            placements: Any = None,
            *,
            src_data_rank: int | None = 0,
        ) -> Any:
            if tensor.__class__ is DTensor:
                if placements is None or tensor.placements != (*placements,):
                    tensor = brought(tensor, device_mesh, placements)
            else:
                device_mesh = device_mesh or _mesh_resources.get_current_mesh()
                found = distributed(tensor, device_mesh, placements, src_data_rank)
                if found is not None:
                    return found
            return stock(tensor, device_mesh, placements, src_data_rank=src_data_rank)

        return distribute_tensor

    installed.replace(patches.DISTRIBUTE, calling(distributing, patches.DISTRIBUTE, is_traced=True))
    installed.replace(patches.LOCAL_ORDERS, _in_order)
    installed.replace(patches.FIRST_SHARD, _of_first)
    installed.replace(patches.FROM_LOCAL, checked)


def _in_order(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, which assumes that mesh dims shard from left to right; called with the mesh
    dims permuted into the order in which they shard.
    """

    def _compute_local_shape_and_global_offset(
        global_shape: Any,
        mesh_shape: Any,
        my_coordinate: Any,
        placements: Any,
        skip_offset: bool = False,
    ) -> Any:
        order = tensor_specs.decoded_order(tuple(placements), mesh_shape)
        if order is None or my_coordinate is None:
            return stock(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
        dims = [m for m, _ in order]
        at = my_coordinate if callable(my_coordinate) else my_coordinate.__getitem__
        return stock(
            global_shape,
            tuple([mesh_shape[m] for m in dims]),
            lambda i: at(dims[i]),
            [p for _, p in order],
            skip_offset,
        )

    return _compute_local_shape_and_global_offset


def _of_first(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function for the size of the first shard, which divides by each placement alone; for
    a mesh dim that shards last, the size of the first device's local tensor.
    """

    def _calc_first_shard_size(spec: Any) -> Any:
        if not any(map(tensor_specs.is_last, spec.placements)):
            return stock(spec)
        sizes = tuple(spec.mesh.shape)
        found, _ = _utils._compute_local_shape_and_global_offset(
            spec.shape, sizes, [0] * len(sizes), spec.placements, skip_offset=True
        )
        return list(found)

    return _calc_first_shard_size


def install_given_placements(
    installed: Installed,
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    local_map: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Have ``handler(torch's)`` compute losses, and local_map call ``local_map(torch's)``."""

    def losses() -> None:
        theirs = patches.LOSSES.found()
        installed.put(patches.LOSSES, {op: handler(stock) for op, stock in theirs.items()})

    installed.once_imported(patches.LOSSES, losses)
    installed.once_imported(
        patches.LOCAL_MAP, lambda: installed.replace(patches.LOCAL_MAP, local_map)
    )
