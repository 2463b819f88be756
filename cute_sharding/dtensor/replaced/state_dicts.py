"""Checkpoints, state dicts and pictures (torch/distributed/checkpoint,
torch/distributed/_state_dict_utils.py, torch/distributed/tensor/debug).

Methods of DTensor that describe what a rank holds may be replaced, and functions of modules
once the program imports them; all are put back.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed, Patch, calling

__all__ = [
    "chunk",
    "has_module",
    "install_state",
    "write_item",
]


def install_state(
    installed: Installed,
    methods: dict[Patch, Callable[[Any], Any]],
    distribute: Callable[[Any], Any],
    visualization: Callable[..., Any],
) -> None:
    """Have each method be ``methods[row](torch's)``, and so the functions that hand out state dicts
    and draw pictures, once a program imports these.
    """

    def pictures() -> None:
        module: Any = sys.modules[patches.PICTURES.module]

        def ours(stock: Callable[..., Any]) -> Callable[..., Any]:
            return visualization(stock, module._create_table, module._create_rich_table)

        installed.replace(patches.PICTURES, calling(ours, patches.PICTURES))

    for row, wrap in methods.items():
        installed.replace(row, wrap)
    installed.once_imported(
        patches.STATE_DICTS, lambda: installed.replace(patches.STATE_DICTS, distribute)
    )
    installed.once_imported(patches.PICTURES, pictures)


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def write_item(fqn: str, tensor: DTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """What a checkpoint is told of one block of a tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    data = TensorWriteData(
        chunk=chunk(offsets, sizes),
        properties=TensorProperties.create_from_tensor(tensor.to_local()),
        size=tensor.size(),
    )
    return WriteItem(
        index=MetadataIndex(fqn, torch.Size(offsets)), type=WriteItemType.SHARD, tensor_data=data
    )


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
