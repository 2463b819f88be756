"""Memory for messages that stays with a plan: for its next buckets, and its next runs.

What the C library frees of large pieces goes back to the system, which clears every page of the
next ones as it is first written: that takes longer than to pack a message, or to send it within a
machine. Accelerators' allocators keep what is freed by themselves.
"""

from __future__ import annotations

import torch

# Where pieces begin, in bytes: at multiples of it.
_ALIGNED = 64


def room_for(size: int) -> int:
    """How many bytes a piece of ``size`` bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED


class KeptMemory:
    """The memory of a plan that no bucket has now.

    Args:
        size: how many bytes a bucket needs at the most.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """As much as any bucket needs."""
        try:
            return self._free.pop()
        except IndexError:
            return torch.empty(self._size, dtype=torch.uint8)

    def put_back(self, memory: torch.Tensor) -> None:
        """What nothing is sent from, or received into, any more."""
        self._free.append(memory)

    def let_go(self) -> None:
        """Free it."""
        self._free.clear()


class Buffers:
    """Memory for the messages of one bucket, given out piece by piece: of what is kept, or fresh
    pieces where nothing is.
    """

    def __init__(self, kept: KeptMemory | None) -> None:
        self._kept, self._at = kept, 0
        self._memory = None if kept is None else kept.take()

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """So many bytes, with anything in them."""
        first, self._at = self._at, self._at + room_for(size)
        if self._memory is None or self._at > self._memory.numel():
            return torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory.narrow(0, first, size)

    def put_back(self) -> None:
        """All messages have arrived, and nobody looks at them any more."""
        if self._kept is not None and self._memory is not None:
            self._kept.put_back(self._memory)
            self._memory = None
