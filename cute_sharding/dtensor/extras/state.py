"""Checkpoints and state dicts of tensors with _StridedShard placements.

torch describes what a device holds as one box, an offset and sizes, and for a strided shard that is
the wrong box. Here there is a box for each run of rows, which torch.distributed.checkpoint treats
like a tensor of several shards: such a checkpoint loads on stock too, on any mesh, and the other
way round. Tensors without such placements are left to torch. (Planners and metadata:
torch/distributed/checkpoint/planner_helpers.py, metadata.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.door.held import check_sizes, held_at
from cute_sharding.dtensor.replaced import (
    patches,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.patch import Patch
from cute_sharding.sharding import Box


def blocks_of(tensor: Any) -> list[Box]:
    """The contiguous boxes that this rank holds of a DTensor.

    A tensor without elements has one empty box, so that a checkpoint knows the tensor.
    """
    spec = tensor._spec
    device = spec.mesh.get_coordinate()
    if device is None:
        return []
    check_sizes(spec, tensor._local_tensor, None, device)
    return _blocks(spec, device)


def _blocks(spec: Any, device: Sequence[int]) -> list[Box]:
    if prod(spec.shape) == 0:
        return [Box((0,) * len(spec.shape), tuple(spec.shape), (0,) * len(spec.shape))]
    found = [part for box in held_at(spec, device) for part in box.contiguous()]
    return sorted(found, key=lambda block: block.global_offset)


def _part(local: torch.Tensor, block: Box) -> torch.Tensor:
    """The box's part of the local tensor, as a view."""
    return local[block.local_slices] if block.elements else local.new_empty(block.size)


def _is_torchs(tensor: Any) -> bool:
    return not tensor_specs.split_factors(tensor._spec) or hasattr(
        tensor._local_tensor, "__create_chunk_list__"
    )


def write_items(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's method for the parts of a DTensor that this rank saves, with a part for each box."""

    def __create_write_items__(self: Any, fqn: str, object: Any) -> Any:
        if _is_torchs(self):
            return stock(self, fqn, object)
        self._raise_if_contains_partial_placements()
        return [
            _write_item(fqn, self, block.global_offset, block.size) for block in blocks_of(self)
        ]

    return __create_write_items__


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _write_item(fqn: str, tensor: Any, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """A checkpoint's description of one block of a tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    data = TensorWriteData(
        chunk=_chunk(offsets, sizes),
        properties=TensorProperties.create_from_tensor(tensor.to_local()),
        size=tensor.size(),
    )
    return WriteItem(
        index=MetadataIndex(fqn, torch.Size(offsets)), type=WriteItemType.SHARD, tensor_data=data
    )


def chunk_list(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's method for the parts of a DTensor that this rank loads, with a part for each box."""

    def __create_chunk_list__(self: Any) -> Any:
        if _is_torchs(self):
            return stock(self)
        self._raise_if_contains_partial_placements()
        return [_chunk(block.global_offset, block.size) for block in blocks_of(self)]

    return __create_chunk_list__


def tensor_shard(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's method for the part of the local tensor that is to be saved, or loaded into."""

    def __get_tensor_shard__(self: Any, index: Any) -> Any:
        if _is_torchs(self):
            return stock(self, index)
        self._raise_if_contains_partial_placements()
        found = [
            block
            for block in blocks_of(self)
            if index.offset is None or block.global_offset == tuple(index.offset)
        ]
        if len(found) != 1:
            raise ValueError(
                f"the shard index {index} matches {len(found)} shards on this rank, but must match "
                f"one shard. The DTensor has shape {tuple(self.shape)} and placements "
                f"{self.placements}. The shards on this rank start at "
                f"{[block.global_offset for block in blocks_of(self)]}"
            )
        return _part(self.to_local(), found[0])

    return __get_tensor_shard__


def distribute(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that keeps each rank's part of a state dict that all ranks were sent whole
    (torch/distributed/_state_dict_utils.py), for strided shards too.
    """

    def _distribute_tensors(
        local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        others = []
        for key in keys:
            state = local_state_dict.get(key)
            if state is None or torch.is_tensor(state) or _is_torchs(state[0]):
                others.append(key)
                continue
            local_state_dict[key] = _filled(*state)
        return stock(local_state_dict, others, *args, **kwargs) if others else None

    return _distribute_tensors


def _filled(tensor: Any, whole: torch.Tensor) -> Any:
    """The DTensor with this rank's part of ``whole``: filled in place, or a new one if it was on
    meta.
    """
    held = blocks_of(tensor)
    if tensor.is_meta:
        local = torch.empty(tensor._local_tensor.shape, dtype=whole.dtype, device=whole.device)
        tensor = tensor_specs.like(tensor, local)
    with torch.no_grad():
        for block in held:
            _part(tensor.to_local(), block).copy_(whole[block.global_slices])
    return tensor


METHODS: dict[Patch, Callable[[Any], Any]] = {
    patches.SAVED: write_items,
    patches.LOADED: chunk_list,
    patches.PARTS: tensor_shard,
}
