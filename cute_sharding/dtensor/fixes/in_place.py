"""In-place views of DTensors (``squeeze_``, ``t_``, ``transpose_``, ``unsqueeze_``), for which
torch's dispatcher has no right function (torch/distributed/tensor/_dispatch.py). torch's own
compositions run them: ``stft``, and the second gradient of a group norm.

The DTensor that the op is called on gets the spec and the local tensor of the out-of-place view.
Its old local tensor stays as it is, for other holders.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_sharding.dtensor.replaced.dispatch import return_and_correct_aliasing
from cute_sharding.dtensor.replaced.op_schemas import name_of, overload
from cute_sharding.dtensor.replaced.tensor_specs import Shard, StridedShard, mesh_dim_text

__all__ = ["views_in_place"]


def views_in_place() -> dict[Any, Any]:
    """Functions for these ops."""
    by_name = {
        **dict.fromkeys((f"squeeze_.{of}" for of in ("default", "dim", "dims")), _squeeze_in_place),
        **dict.fromkeys(_TURNS, _turn_in_place),
    }
    ops = ((overload(name), function) for name, function in by_name.items())
    return {op: function for op, function in ops if op is not None}


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


def _turn_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``t_``, ``transpose_`` and ``unsqueeze_`` of a DTensor, for which torch has no rule: the
    out-of-place view is free on any placements, so spec and local tensor change together.
    """
    tensor, *arguments = args
    turned = _TURNS[name_of(op)](tensor, *arguments, **kwargs)
    tensor._local_tensor, tensor._spec = turned._local_tensor, turned._spec
    return return_and_correct_aliasing(op, args, kwargs, tensor)


_TURNS = {
    "t_.default": torch.ops.aten.t.default,
    "transpose_.default": torch.ops.aten.transpose.int,
    "unsqueeze_.default": torch.ops.aten.unsqueeze.default,
}
