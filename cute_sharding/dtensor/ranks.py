"""Ranks, their places on a mesh and their process groups; and every rank in turn, under LocalTensorMode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cute_sharding.dtensor import compat
from cute_sharding.redistribution.chains import Device


def on_each_rank(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(rank, *local tensors)``: of this process's rank, or under LocalTensorMode of every rank."""
    mode = compat.local_tensor_mode()
    if mode is None:
        return function(compat.this_rank(), *tensors)
    tensors = tuple(map(compat.waited, tensors))
    return mode.rank_map(lambda rank: function(rank, *(compat.local_of(t, rank) for t in tensors)))


def ints_on_each_rank(function: Callable[[int], Sequence[int]]) -> list[Any]:
    """A list of ints that may differ from rank to rank."""
    mode = compat.local_tensor_mode()
    if mode is None:
        return list(function(compat.this_rank()))
    lists = {rank: function(rank) for rank in mode.ranks}
    return [compat.local_int({rank: ints[i] for rank, ints in lists.items()}) for i in range(len(next(iter(lists.values()))))]


def true_on_each_rank(function: Callable[[int], bool]) -> bool:
    mode = compat.local_tensor_mode()
    return function(compat.this_rank()) if mode is None else all(map(function, mode.ranks))


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


def group_of(mesh: Any, dims: tuple[int, ...], *, exact: bool = False) -> Any:
    """A process group of the ranks that differ on those mesh dims alone; or, unless ``exact``, of more of them.

    In this order: the group of the one mesh dim; that of the dims flattened, where the program has flattened them; the default group, where the mesh is all of it and of its kind (ranks
    of other slices then have nothing to say to one another, and need no communicator of their own); else a new group, made once for the ranks.
    """
    group = existing_group(mesh, dims, exact=exact)
    if group is not None:
        return group
    # Kept by ranks and backend and not by mesh: a program may make the same slice of its mesh anew in every step.
    groups, key = _made(), _key(mesh, dims)
    groups[key] = compat.new_group(list(key[0]), compat.group_of_dim(mesh, dims[0]), key[1:])
    return groups[key]


def _key(mesh: Any, dims: tuple[int, ...]) -> tuple[Any, ...]:
    """What a made group is known by: its ranks, and the kind of device and backend that it serves."""
    rank = compat.this_rank()
    return tuple(sorted(_slice(places(mesh, rank), dims, rank))), mesh.device_type, compat.backend_name(compat.group_of_dim(mesh, dims[0]), mesh.device_type)


def existing_group(mesh: Any, dims: tuple[int, ...], *, exact: bool = False) -> Any | None:
    """:func:`group_of`, if there is one already."""
    if len(dims) == 1:
        return compat.group_of_dim(mesh, dims[0])
    flattened = compat.flattened_mesh(mesh, dims)
    group = None if flattened is None else compat.group_of_flattened(flattened)
    if group is not None:
        return group
    world = dist.group.WORLD
    whole = mesh.size() == dist.get_world_size() and (not exact or spans(world, mesh, dims))
    if whole and compat.backend_name(world, mesh.device_type) == compat.backend_name(compat.group_of_dim(mesh, dims[0]), mesh.device_type):
        return world
    if compat.is_tracing():
        return None  # a graph may run from a cache in a program that has not made such a group
    return _made().get(_key(mesh, dims))


_groups: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def _made() -> dict[tuple[Any, ...], Any]:
    """The groups that were made. They end with the default group."""
    return _groups.setdefault(dist.group.WORLD, {})


def _slice(coordinates: dict[int, Device], dims: Sequence[int], rank: int) -> list[int]:
    mine = coordinates[rank]
    return [r for r, place in coordinates.items() if all(a == b for m, (a, b) in enumerate(zip(place, mine)) if m not in dims)]


def peers(group: Any, mesh: Any, dims: tuple[int, ...], rank: int) -> tuple[Device | None, ...]:
    """The coordinates of the group's ranks, in its order; None for those that differ from ``rank`` on other mesh dims than ``dims``."""
    return _peers(tuple(dist.get_process_group_ranks(group)), mesh, dims, rank)


@lru_cache(maxsize=1 << 10)
def _peers(ranks: tuple[int, ...], mesh: Any, dims: tuple[int, ...], rank: int) -> tuple[Device | None, ...]:
    coordinates = places(mesh, rank)
    members = set(_slice(coordinates, dims, rank))
    if not members <= {*ranks}:
        ranks = tuple(sorted(members))  # every rank runs in this process, and the group at hand is that of rank 0
    return tuple([coordinates[r] if r in members else None for r in ranks])


def spans(group: Any, mesh: Any, dims: Sequence[int]) -> bool:
    """Whether the group has no ranks but those."""
    return dist.get_world_size(group) == prod(mesh.size(m) for m in dims)


def copies_natively(group: Any, mesh: Any) -> bool:
    """Whether the backend gathers and reduce-scatters better than an all-to-all does it. gloo does not, where copies follow: its own go by lists of tensors that it copies once more."""
    return compat.backend_name(group, mesh.device_type) != "gloo"
