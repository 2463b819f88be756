"""Local tensors: plain ones, those of all ranks in one process (torch/distributed/_local_tensor),
fakes and wrappers; and their memory.

They are told apart and taken apart here; their data is not written to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._local_tensor import LocalIntNode, LocalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.replaced.communication import in_flight

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "LocalTensor",
    "is_functional",
    "is_imagined",
    "is_shared",
    "is_wrapper",
    "leaves",
    "local_int",
    "local_of",
    "local_tensor",
    "memory_of",
    "parts_of",
    "share_memory",
    "storage_of",
    "tree_map",
]


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a subclass that wraps other tensors (such as a float8 tensor with its
    scale), which has its own ways to be split and gathered.
    """
    return (
        type(tensor) is not torch.Tensor
        and is_traceable_wrapper_subclass(tensor)
        and not isinstance(tensor, (LocalTensor, funcol.AsyncCollectiveTensor))
    )


def is_imagined(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data: it is on meta, or a fake tensor."""
    if type(tensor) is torch.Tensor:  # almost always
        return tensor.is_meta
    return tensor.is_meta or isinstance(in_flight(tensor), FakeTensor)


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one that AOTAutograd traces: writes to it, also through a view, become
    part of the graph.
    """
    return isinstance(tensor, FunctionalTensor)


def local_of(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's tensor of a LocalTensor; another tensor itself."""
    return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor


def parts_of(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Rank -> local tensor, for a LocalTensor; for another tensor the tensor itself, as rank -1."""
    return dict(tensor._local_tensors) if isinstance(tensor, LocalTensor) else {-1: tensor}


def local_tensor(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`parts_of`."""
    return parts[-1] if -1 in parts else LocalTensor(parts)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a local tensor; for a LocalTensor that of its first rank. torch keeps the
    storage object, with its attributes, as long as the memory exists.
    """
    if isinstance(tensor, LocalTensor):
        tensor = next(iter(tensor._local_tensors.values()))
    return tensor.untyped_storage()


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a strided local tensor; None on meta, or if it is sparse or a wrapper."""
    if type(tensor) is torch.Tensor:  # almost always
        is_plain = not tensor.is_meta and tensor.layout is torch.strided
        return tensor.untyped_storage() if is_plain else None
    if is_imagined(tensor) or is_wrapper(tensor) or tensor.layout is not torch.strided:
        return None
    return storage_of(tensor)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors share the memory of a local tensor, or may. (The tensor and its storage
    object each hold one reference.)
    """
    return any(
        torch._C._storage_Use_Count(part.untyped_storage()._cdata) > 2
        for part in parts_of(tensor).values()
    )


def local_int(values: dict[int, int]) -> Any:
    """An int that may differ from rank to rank."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return torch.SymInt(LocalIntNode(values))


def int_on(n: Any, rank: int) -> Any:
    """An int of :func:`local_int` on one rank; any other value unchanged."""
    node = getattr(n, "node", None)
    return node._local_ints[rank] if isinstance(node, LocalIntNode) else n


def leaves(*values: Any) -> list[Any]:
    return tree_leaves(values)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two local tensors share one storage."""
    return storage_of(one) is storage_of(other)
