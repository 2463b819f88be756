"""Ranks, their places on a mesh and their process groups; and every rank in turn, under LocalTensorMode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding.dtensor import compat
from cute_sharding.redistribution.chains import Device


def on_each_rank(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(rank, *local tensors)``: of this process's rank, or under LocalTensorMode of every rank."""
    mode = compat.local_tensor_mode()
    if mode is None:
        return function(dist.get_rank(), *tensors)
    tensors = tuple(map(compat.waited, tensors))
    return mode.rank_map(lambda rank: function(rank, *(compat.local_of(t, rank) for t in tensors)))


def ints_on_each_rank(function: Callable[[int], Sequence[int]]) -> list[Any]:
    """A list of ints that may differ from rank to rank."""
    mode = compat.local_tensor_mode()
    if mode is None:
        return list(function(dist.get_rank()))
    lists = {rank: function(rank) for rank in mode.ranks}
    return [compat.local_int({rank: ints[i] for rank, ints in lists.items()}) for i in range(len(next(iter(lists.values()))))]


def true_on_each_rank(function: Callable[[int], bool]) -> bool:
    mode = compat.local_tensor_mode()
    return function(dist.get_rank()) if mode is None else all(map(function, mode.ranks))


@lru_cache(maxsize=1 << 10)
def places(mesh: Any, rank: int) -> dict[int, Device]:
    """The coordinates of all ranks of the mesh, or of ``rank``'s slice if it is a slice of a larger one."""
    sizes = tuple(mesh.shape)
    for ranks in compat.rank_lists(mesh):
        if rank in ranks:
            return {r: _coordinate(i, sizes) for i, r in enumerate(ranks)}
    raise RuntimeError(f"rank {rank} is not on the mesh {mesh}")


def _coordinate(index: int, sizes: tuple[int, ...]) -> Device:
    result = []
    for n in reversed(sizes):
        index, k = divmod(index, n)
        result.append(k)
    return tuple(reversed(result))


def group_of(mesh: Any, dims: tuple[int, ...]) -> Any:
    """A process group of the ranks that differ on those mesh dims alone, or of more of them.

    In this order: the group of the one mesh dim; that of the dims flattened, where the program has flattened them; the default group, where the mesh is all of it (ranks
    of other slices then have nothing to say to one another, and need no communicator of their own); else a new group, made once for each mesh.
    """
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    flattened = compat.flattened_mesh(mesh, dims)
    if flattened is not None:
        return flattened.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    groups = mesh.__dict__.setdefault("_cute_sharding_groups", {})
    if dims not in groups:
        rank = dist.get_rank()
        groups[dims] = compat.new_group(sorted(_slice(places(mesh, rank), dims, rank)))
    return groups[dims]


def _slice(coordinates: dict[int, Device], dims: Sequence[int], rank: int) -> list[int]:
    mine = coordinates[rank]
    return [r for r, place in coordinates.items() if all(a == b for m, (a, b) in enumerate(zip(place, mine)) if m not in dims)]


def peers(group: Any, mesh: Any, dims: tuple[int, ...], rank: int) -> tuple[Device | None, ...]:
    """The coordinates of the group's ranks, in its order; None for those that differ from ``rank`` on other mesh dims than ``dims``."""
    return _peers(group, mesh, dims, rank, compat.emulates_ranks())


@lru_cache(maxsize=1 << 10)
def _peers(group: Any, mesh: Any, dims: tuple[int, ...], rank: int, emulated: bool) -> tuple[Device | None, ...]:
    coordinates = places(mesh, rank)
    members = set(_slice(coordinates, dims, rank))
    ranks = dist.get_process_group_ranks(group)
    if emulated and len(ranks) < dist.get_world_size():
        ranks = sorted(members)  # the group at hand is that of rank 0
    return tuple([coordinates[r] if r in members else None for r in ranks])


def spans(group: Any, mesh: Any, dims: Sequence[int]) -> bool:
    """Whether the group has no ranks but those."""
    return dist.get_world_size(group) == prod(mesh.size(m) for m in dims)


def copies_natively(group: Any) -> bool:
    """Whether the backend gathers and reduce-scatters better than an all-to-all does it. gloo does not: its own go by lists of tensors that it copies once more."""
    return dist.get_backend(group) != "gloo"
