"""A DTensor is a wrapper without memory of its own: its offset in memory, deep copies, and
``x.data = y``.

torch treats the wrapper as any tensor there, and goes by the offset at which a local tensor begins
in memory, or forgets the local tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import patches, tensor_specs
from cute_sharding.dtensor.replaced.patch import Patch
from cute_sharding.dtensor.run.placements import text


def offset(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor in place of torch's: each DTensor begins at offset 0, on each rank."""

    def __new__(cls: Any, local_tensor: torch.Tensor, spec: Any, *, requires_grad: bool) -> Any:
        if not local_tensor.storage_offset():
            return stock(cls, local_tensor, spec, requires_grad=requires_grad)
        made = stock(cls, _at_offset_0(local_tensor), spec, requires_grad=requires_grad)
        made._local_tensor = local_tensor
        return made

    return __new__


# By dtype and device, empty tensors. To make one costs a fifth of a slice.
_EMPTY: dict[Any, torch.Tensor] = {}


def _at_offset_0(local: torch.Tensor) -> torch.Tensor:
    """An empty tensor with what torch takes of a local tensor: its dtype, device and layout, and
    whether it is conjugated or negated.
    """
    if type(local) is not torch.Tensor or local.is_conj() or local.is_neg():
        empty = local.new_empty(0)
        empty = empty.conj() if local.is_conj() else empty
        return empty._neg_view() if local.is_neg() else empty
    key = local.dtype, local.device
    found = _EMPTY.get(key)
    if found is None:
        found = local.new_empty(0)
        if type(found) is torch.Tensor and found.layout is torch.strided:
            _EMPTY[key] = found
    return found


def deep_copy(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A method in place of torch's, which communicates nothing, and whose copy has the strides of
    the DTensor.
    """

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf or type(self) is not DTensor:
            return stock(self, memo)
        with torch.no_grad():
            copied = tensor_specs.like(self, copy.deepcopy(self._local_tensor, memo))
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
            copied.grad = copy.deepcopy(self.grad, memo)
            others = {name: x for name, x in vars(self).items() if name not in vars(copied)}
            vars(copied).update(copy.deepcopy(others, memo))
        return copied

    return __deepcopy__


def data(stock: Any) -> property:
    """A property in place of torch's: a DTensor that is set to another one has its placements and
    its local tensor too, as a tensor has the memory of the other.

    Raises (when it is set):
        TypeError: to a tensor that is no DTensor.
    """

    def get(self: Any) -> Any:
        return stock.__get__(self)

    def put(self: Any, other: Any) -> None:
        if not tensor_specs.is_dtensor(other):
            raise TypeError(
                f"cannot set the data of a DTensor of shape {tuple(self.shape)} with placements "
                f"{text(self.placements)} to a {type(other).__name__}, which does not say whether "
                "it is the whole tensor or this rank's part: use distribute_tensor(whole, mesh, "
                "placements) or DTensor.from_local(part, mesh, placements)"
            )
        stock.__set__(self, other)
        self._spec, self._local_tensor = other._spec, other._local_tensor

    return property(get, put)


METHODS: dict[Patch, Callable[[Any], Any]] = {
    patches.OFFSETS: offset,
    patches.DEEP_COPIES: deep_copy,
    patches.DATA: data,
}
