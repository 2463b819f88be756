"""A process group over processes of several worlds (torch/distributed/distributed_c10d.py): torch
makes groups of one world's ranks alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

__all__ = ["joined_group"]


def joined_group(
    store: Any, rank: int, size: int, *, backend: str, name: str, timeout: timedelta
) -> Any:
    """A group of ``size`` processes that meet in a store, each with its own rank in the group,
    whatever its rank in its own world is. Where torch asks for ranks of the world, those of the
    group are meant.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], backend, store, group_name=distributed_c10d.GroupName(name), timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group
