"""In-place ops on views of a DTensor, where the view could not be had without communication: they reach the tensor that was viewed.

A slice of a sharded dim, or a view that redistributes, gives a DTensor that is a view by what autograd says and a copy by where its elements lie: what is written to it would be lost. So after such a
write each device takes, of the rows that it holds of the tensor that was viewed, those that the view has. Which these are, autograd's own function of the view says, replayed on positions.
(torch/csrc/autograd/variable.h describes views and their functions; a functionalized program, as compilers make them, has no such writes.)
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.compat import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.placements import text
from cute_sharding.dtensor.reading import agree
from cute_sharding.dtensor.redistribute import redistribute_local_tensor


def reach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``op`` has written to views that are copies, also in what these view."""
    first = args[0] if args else None
    outputs = [kwargs.get(argument.name) for argument in op._schema.arguments if argument.is_out]
    for tensor in outputs or (first if isinstance(first, (list, tuple)) else [first]):
        base = getattr(tensor, "_base", None)
        if compat.is_dtensor(tensor) and compat.is_dtensor(base):
            _write_through(op, tensor, base)


def take_back(tensor: Any, wrote: torch.Tensor, spec: DTensorSpec | None) -> None:
    """What an op wrote to a copy of ``tensor``, a local tensor under ``spec``, in ``tensor`` itself; None: the tensor was pending, and is that copy from now on.

    Raises:
        RuntimeError: such a tensor is a view of another, which would stay pending.
    """
    if spec is not None:
        tensor._local_tensor.copy_(redistribute_local_tensor(wrote, spec, tensor._spec, counted=False))
    elif getattr(tensor, "_base", None) is not None:
        raise RuntimeError(
            f"what is pending in a view of shape {tuple(tensor.shape)} and placements {text(tensor.placements)} has to be finished to write to it, and what it views would stay pending. "
            f"Redistribute that first, to {[Replicate()] * tensor.device_mesh.ndim!r}, or take the op that gives a new tensor"
        )
    else:
        tensor._local_tensor = wrote


def _write_through(op: Any, tensor: Any, base: Any) -> None:
    """
    Raises:
        RuntimeError: what was written cannot be said of the elements of ``base``: a reduction is pending, or the elements are of another kind.
    """
    spec, of = base._spec, tensor._spec
    if compat.is_tracing() or compat.is_imagined(tensor._local_tensor) or not spec.mesh._is_current_rank_part_of_mesh() or compat.share_memory(tensor._local_tensor, base._local_tensor):
        return
    pending = any(isinstance(p, Partial) for p in (*spec.placements, *of.placements))
    unclear = spec.use_strided_shard_as_shard_order and not agree(spec.shape, spec, spec.placements)
    if pending or unclear or tensor.dtype != base.dtype or spec.mesh != of.mesh:
        raise RuntimeError(
            f"{compat.name_of(op)} writes to a view of shape {tuple(of.shape)} and placements {text(of.placements)} that is a copy of what it views, a DTensor of shape {tuple(spec.shape)} and placements "
            f"{text(spec.placements)}: the write would be lost. Redistribute that one first, to placements under which the view moves nothing, such as {[Replicate()] * spec.mesh.ndim!r}"
        )
    whole = redistribute_local_tensor(tensor._local_tensor, of, _replicated(of), counted=False)
    elements = prod(spec.shape)
    index = torch.arange(elements, device=base._local_tensor.device).reshape(tuple(spec.shape))
    mine = redistribute_local_tensor(index, _replicated(spec), spec, counted=False)
    viewed = compat.replayed(tensor, index).reshape(-1)
    place = torch.full((elements,), -1, dtype=torch.int64, device=index.device)
    place[viewed] = torch.arange(viewed.numel(), device=index.device)
    at = place[mine]
    if viewed.numel():
        base._local_tensor.copy_(torch.where(at >= 0, whole.reshape(-1)[at.clamp(min=0)], base._local_tensor))


def _replicated(spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.tensor_meta)
