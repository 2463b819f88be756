"""The memory that local tensors lie in, and what is written to it."""

from __future__ import annotations

import torch

from cute_sharding.dtensor.replaced import dispatch_modes, local_tensors

_STRIDED = torch.strided


def count_of_writes(local: torch.Tensor) -> int | None:
    """How often a plain tensor was written to, or its views; None where torch does not count.
    (DTensor's own writes it does not count there.)
    """
    if type(local) is not torch.Tensor and (
        isinstance(local, local_tensors.LocalTensor) or local_tensors.is_functional(local)
    ):
        return None
    return None if local.is_inference() else local._version


def is_followed(local: torch.Tensor) -> bool:
    """Whether what is done with the local tensor is done now, or becomes part of a graph. (Before
    AOTAutograd does, dynamo traces a program, with tensors that have no data.)
    """
    return not dispatch_modes.is_tracing() or local_tensors.is_functional(local)


def memory_of(local: torch.Tensor) -> torch.UntypedStorage | None:
    """What the local tensor lies in as strides say; None on meta, sparse, or wrapped in another."""
    if type(local) is torch.Tensor:  # by far the most
        return None if local.is_meta or local.layout is not _STRIDED else local.untyped_storage()
    if (
        local_tensors.is_imagined(local)
        or local_tensors.is_wrapper(local)
        or local.layout is not _STRIDED
    ):
        return None
    return local_tensors.storage_of(local)
