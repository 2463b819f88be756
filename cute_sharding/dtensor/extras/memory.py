"""The memory of local tensors, and writes to it."""

from __future__ import annotations

import torch

from cute_sharding.dtensor.replaced import dispatch_modes, local_tensors

_STRIDED = torch.strided


def count_of_writes(local: torch.Tensor) -> int | None:
    """The number of writes to a plain tensor and its views; None if torch does not count them. (It
    does not count DTensor's own writes there.)
    """
    if type(local) is not torch.Tensor and (
        isinstance(local, local_tensors.LocalTensor) or local_tensors.is_functional(local)
    ):
        return None
    return None if local.is_inference() else local._version


def is_followed(local: torch.Tensor) -> bool:
    """Whether operations on the local tensor run now, or become part of a graph. (Before
    AOTAutograd, dynamo traces a program with tensors without data.)
    """
    return not dispatch_modes.is_tracing() or local_tensors.is_functional(local)


def memory_of(local: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a strided local tensor; None on meta, or if it is sparse or a wrapper."""
    if type(local) is torch.Tensor:  # almost always
        return None if local.is_meta or local.layout is not _STRIDED else local.untyped_storage()
    if (
        local_tensors.is_imagined(local)
        or local_tensors.is_wrapper(local)
        or local.layout is not _STRIDED
    ):
        return None
    return local_tensors.storage_of(local)
