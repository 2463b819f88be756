"""Checkpoints, state dicts and pictures (torch/distributed/checkpoint,
torch/distributed/_state_dict_utils.py, torch/distributed/tensor/debug).

Methods of DTensor that describe what a rank holds may be replaced, and functions of modules
once the program imports them; all are put back.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.stats import logger

__all__ = [
    "StateRules",
    "chunk",
    "has_module",
    "install_state",
    "restore_state",
    "write_item",
]


@dataclass(frozen=True)
class StateRules:
    """What of torch's is replaced: what to put back."""

    methods: tuple[tuple[Any, str, Any], ...]
    functions: list[tuple[Any, str, Any]]
    waiting: tuple[Callable[[], None], ...]


def install_state(
    methods: dict[tuple[Any, str], Callable[[Any], Any]],
    distribute: Callable[[Any], Any],
    visualization: Callable[..., Any],
) -> StateRules:
    """Have each method be ``methods[class, name](torch's)``, and so the functions that hand out
    state dicts and draw pictures, once a program imports these.
    """
    found = tuple([(owner, name, vars(owner)[name]) for owner, name in methods])
    functions: list[tuple[Any, str, Any]] = []
    when_imported: Callable[..., Callable[[], None]] = importlib.import_module(
        "cute_sharding._autoload"
    ).when_imported  # what runs before all else, and imports nothing

    def replace(
        module: str, name: str, wrap: Callable[[Any, Any], Any], also: Sequence[str] = ()
    ) -> Callable[[], None]:
        def action() -> None:
            try:
                made = wrap(sys.modules[module], getattr(sys.modules[module], name))
                for owner in (sys.modules[m] for m in (module, *also) if m in sys.modules):
                    functions.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, made)
            except (
                Exception
            ) as error:  # it runs where the program imports something, and that must not fail
                logger.warning(
                    "%s.%s is torch's own: %s: %s", module, name, type(error).__name__, error
                )

        return when_imported(module, action)

    for owner, name, stock in found:
        setattr(owner, name, methods[owner, name](stock))
    waiting = (
        replace(
            "torch.distributed._state_dict_utils",
            "_distribute_tensors",
            lambda module, stock: distribute(stock),
        ),
        replace(
            "torch.distributed.tensor.debug._visualize_sharding",
            "visualize_sharding",
            lambda module, stock: visualization(
                stock, module._create_table, module._create_rich_table
            ),
            ("torch.distributed.tensor.debug",),
        ),
    )
    return StateRules(found, functions, waiting)


def restore_state(saved: StateRules) -> None:
    for give_up in saved.waiting:
        give_up()
    for owner, name, stock in saved.methods:
        setattr(owner, name, stock)
    for owner, name, stock in saved.functions:
        setattr(owner, name, stock)
    saved.functions.clear()


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
