"""Lists in an index of a DTensor (``x[[0, 2]]``), of which Python's binding of torch makes plain
tensors (torch/csrc/autograd/python_variable_indexing.cpp).

DTensor refuses ops on plain tensors, because it cannot know what a program means by one. A list is
made of numbers, as a slice is: each rank has the same. So it becomes a replica before torch sees
it. Other indices are torch's, at torch's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.tensor_specs import as_replica

__all__ = ["install_indices"]

# From so many entries on, torch takes a list of lists or slices for numbers, not for an index.
_MOST = 32
_ONE = frozenset((int, bool, slice, NoneType, EllipsisType))


def install_indices(installed: Installed) -> None:
    """Have DTensors take lists and arrays of numbers in an index as replicas."""
    installed.replace(patches.READ_BY_INDEX, _reading)
    installed.replace(patches.WRITTEN_BY_INDEX, _writing)


def _reading(stock: Callable[..., Any]) -> Callable[..., Any]:
    def __getitem__(self: Any, index: Any) -> Any:
        return stock(self, index if type(index) in _ONE else _with_replicas(self, index))

    return __getitem__


def _writing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def __setitem__(self: Any, index: Any, value: Any) -> None:
        stock(self, index if type(index) in _ONE else _with_replicas(self, index), value)

    return __setitem__


def _with_replicas(x: Any, index: Any) -> Any:
    if type(index) is tuple:
        if not any(map(_is_numbers, index)):
            return index
    elif not _is_numbers(index):
        return index
    elif isinstance(index, list) and len(index) < _MOST and any(map(_is_no_number, index)):
        index = tuple(index)
    else:
        index = (index,)
    return tuple([_replica(x, each) if _is_numbers(each) else each for each in index])


def _is_numbers(index: Any) -> bool:
    """Whether torch makes a tensor of this part of an index."""
    if type(index) in _ONE or isinstance(index, torch.Tensor):
        return False
    return isinstance(index, Sequence) or (hasattr(index, "__array__") and hasattr(index, "ndim"))


def _is_no_number(entry: Any) -> bool:
    return isinstance(entry, (torch.Tensor, slice, NoneType, EllipsisType)) or _is_numbers(entry)


def _replica(x: Any, numbers: Any) -> Any:
    dtype = None if len(numbers) else torch.long
    if any(isinstance(each, torch.Tensor) for each in numbers):
        return numbers  # torch reads their values, or raises
    return as_replica(torch.tensor(numbers, dtype=dtype, device=x.device), x.device_mesh)
