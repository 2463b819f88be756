"""Streams of accelerators (torch/accelerator, torch/cuda/graphs.py): what one has computed, another
must wait for; and what a captured graph computes is there only when it is replayed.

Asked and waited for here; what runs on which stream is the program's.
"""

from __future__ import annotations

import torch

from cute_sharding.dtensor.torch_private.collective_ops import waited
from cute_sharding.dtensor.torch_private.local_tensors import parts_of

__all__ = ["current", "is_capturing", "ready"]


def current(device: torch.device) -> torch.Stream | None:
    """The stream that ops on the device are now put on; None on devices that have none (as meta and
    MPS), and on CPUs, where torch has a stand-in for one.
    """
    if device.type == "cpu" or not hasattr(getattr(torch, device.type, None), "current_stream"):
        return None
    stream: torch.Stream = torch.accelerator.current_stream(device)
    return stream


def is_capturing(device: torch.device) -> bool:
    """Whether ops on the device do not run now, but become part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def ready(tensor: torch.Tensor, made_on: torch.Stream | None) -> torch.Tensor:
    """The local tensor, for ops that are put on the current stream: it was made on another, maybe.
    Its memory is not given away before they are done.
    """
    now = current(tensor.device)
    if now is None or made_on is None or now == made_on:
        return tensor
    with made_on:
        tensor = waited(tensor)
    now.wait_stream(made_on)
    for part in parts_of(tensor).values():
        part.record_stream(now)
    return tensor
