"""``squeeze_`` of DTensors, for which torch's dispatcher has no right function
(torch/distributed/tensor/_dispatch.py).

The DTensor that the op is called on gets the spec and the local tensor of the out-of-place view.
Its old local tensor stays as it is, for other holders.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_sharding.dtensor.replaced.dispatch import return_and_correct_aliasing
from cute_sharding.dtensor.replaced.registry import name_of, overload
from cute_sharding.dtensor.replaced.tensor_specs import Shard, StridedShard, mesh_dim_text

__all__ = ["squeezes_in_place"]


def squeezes_in_place() -> dict[Any, Any]:
    """Functions for these ops."""
    ops = (overload(f"squeeze_.{which}") for which in ("default", "dim", "dims"))
    return {op: _squeeze_in_place for op in ops if op is not None}


def _squeeze_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``squeeze_`` of a DTensor. torch changes the local tensor, but the spec only if placements
    change too: otherwise the DTensor keeps its old shape.

    Raises:
        RuntimeError: a squeezed dim is sharded. In place nothing can be moved, whatever the
            settings allow other views.
    """
    tensor, *dims = args
    ndim, spec = tensor.ndim, tensor._spec
    asked = (
        range(ndim)
        if not dims
        else [d % ndim for d in ([dims[0]] if isinstance(dims[0], int) else dims[0])]
        if ndim
        else []
    )
    gone = {d for d in asked if tensor.shape[d] == 1}
    for m, placement in enumerate(spec.placements):
        if (
            isinstance(placement, (Shard, StridedShard))
            and placement.dim in gone
            and spec.mesh.size(m) > 1
        ):
            raise RuntimeError(
                f"{name_of(op)} cannot squeeze dim {placement.dim} of a DTensor of shape "
                f"{tuple(tensor.shape)} with placements {spec.placements}. The dim is sharded on "
                f"{mesh_dim_text(m, spec.mesh.mesh_dim_names)}, and an in-place op cannot "
                "communicate. Use squeeze instead of squeeze_, or first redistribute the tensor."
            )
    squeezed = getattr(torch.ops.aten.squeeze, op._overloadname)(tensor, *dims, **kwargs)
    tensor._local_tensor, tensor._spec = squeezed._local_tensor, squeezed._spec
    return return_and_correct_aliasing(op, args, kwargs, tensor)
