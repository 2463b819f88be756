"""Reads of a DTensor's local tensor (torch/distributed/tensor/_api.py) by any reader: C++ for an
op, autograd's functions for a redistribution, a compiled program.

The attribute alone is replaced, and only while :meth:`WatchedReads.watch` asks for it: every op
reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed

__all__ = ["WatchedReads"]

_lock = RLock()


class WatchedReads:
    """Calls ``check(local tensor)`` before a local tensor is read, until ``check`` returns False.
    In force from when it is made until ``installed`` is undone.
    """

    in_force: WatchedReads | None = None

    def __init__(
        self, installed: Installed, check: Callable[[torch.Tensor], bool], watches: bool
    ) -> None:
        self._installed, self._check, self._watches = installed, check, False
        WatchedReads.in_force = self
        installed.before_undo(self._end)
        if watches:
            WatchedReads.watch()

    def _end(self) -> None:
        WatchedReads.in_force = None

    @classmethod
    def watch(cls) -> None:
        """Start to call ``check`` at reads."""
        with _lock:
            reads = cls.in_force
            if reads is not None and not reads._watches:
                reads._watches = True
                reads._installed.replace(patches.LOCAL_TENSOR, reads._watched)

    def _rest(self) -> None:
        with _lock:
            if self._watches:
                self._watches = False
                self._installed.undo(patches.LOCAL_TENSOR)

    def _watched(self, stock: Any) -> property:
        def _local_tensor(tensor: DTensor) -> torch.Tensor:
            local: torch.Tensor = stock.__get__(tensor)
            if not self._check(local):
                self._rest()
            return local

        return property(_local_tensor, stock.__set__)
