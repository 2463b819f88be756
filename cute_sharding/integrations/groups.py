"""One process group over a trainer and its engines, which are worlds of their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced.worlds import joined_group

TIMEOUT = timedelta(minutes=10)
NAME = "cute_sharding.name"  # of the group, in its store


def meeting_place(address: str, port: int = 0, *, timeout: timedelta = TIMEOUT) -> Any:
    """A store at which the processes of a group can meet; ``store.port`` is its port, a free one
    by default. One process makes it, and keeps it as long as the group.
    """
    return _store(address, port, is_master=True, timeout=timeout)


def join(
    address: Any,
    port: int = 0,
    *,
    rank: int,
    size: int,
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
) -> Any:
    """A process group over processes that do not share one ``init_process_group``: call it in all
    of them. It does not change the default group of any.

    Args:
        address, port: of a process that all can reach; rank 0 listens there. Or a store from
            :func:`meeting_place`, in the process that has made it.
        rank: of this process in the group. A trainer comes first, in the order of its own ranks:
            so the ranks of its meshes are those of the group.
        size: how many processes the group has.
        backend: by default ``nccl`` where there are GPUs, and else ``gloo``.
    """
    if not 0 <= rank < size:
        raise ValueError(
            f"rank {rank} is not a rank of a group of {size} processes: give each process a rank "
            f"from 0 to {size - 1} of its own"
        )
    if isinstance(address, str):
        store = _store(address, port, is_master=rank == 0, timeout=timeout)
    else:
        store = address
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if rank == 0:
        store.set(NAME, f"cute_sharding.{uuid4().hex}")
    name = store.get(NAME).decode()  # the others wait for it
    return joined_group(store, rank, size, backend=backend, name=name, timeout=timeout)


def _store(address: str, port: int, *, is_master: bool, timeout: timedelta) -> Any:
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(address, port, is_master=is_master, wait_for_workers=False, timeout=timeout)
