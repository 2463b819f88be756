"""Ranks, their places on a mesh and in a process group; functions of every rank under
LocalTensorMode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch_modes,
    local_tensors,
    process_groups,
)
from cute_sharding.sharding.chains import Device


def only_rank() -> int | None:
    """This process's rank; None while tracing, and if every rank runs in this process."""
    if dispatch_modes.local_tensor_mode() is not None or dispatch_modes.is_tracing():
        return None
    return process_groups.this_rank()


def on_each_rank(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(rank, *local tensors)`` for this process's rank, or under LocalTensorMode for
    every rank.
    """
    mode = dispatch_modes.local_tensor_mode()
    if mode is None:
        with dispatch_modes.of_this_rank():
            return function(process_groups.this_rank(), *tensors)
    tensors = tuple(map(collective_ops.wait_for, tensors))
    return mode.rank_map(
        lambda rank: function(rank, *(local_tensors.local_of(t, rank) for t in tensors))
    )


def all_on_each_rank(
    function: Callable[..., list[torch.Tensor]], *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """As :func:`on_each_rank`, for a function that returns several tensors."""
    mode = dispatch_modes.local_tensor_mode()
    if mode is None:
        with dispatch_modes.of_this_rank():
            return function(process_groups.this_rank(), *tensors)
    tensors = tuple(map(collective_ops.wait_for, tensors))
    with mode.disable():
        found = {
            rank: function(rank, *(local_tensors.local_of(t, rank) for t in tensors))
            for rank in mode.ranks
        }
        several = zip(*found.values(), strict=True)
        return [local_tensors.local_tensor(dict(zip(found, parts))) for parts in several]


def ints_on_each_rank(function: Callable[[int], Sequence[int]]) -> list[Any]:
    """The function's list of ints, which may differ from rank to rank."""
    mode = dispatch_modes.local_tensor_mode()
    if mode is None:
        return list(function(process_groups.this_rank()))
    lists = {rank: function(rank) for rank in mode.ranks}
    return [
        local_tensors.local_int({rank: ints[i] for rank, ints in lists.items()})
        for i in range(len(next(iter(lists.values()))))
    ]


def true_on_each_rank(function: Callable[[int], bool]) -> bool:
    mode = dispatch_modes.local_tensor_mode()
    return function(process_groups.this_rank()) if mode is None else all(map(function, mode.ranks))


@lru_cache(maxsize=1 << 10)
def places(mesh: Any, rank: int) -> dict[int, Device]:
    """Rank -> coordinates, in the order of the mesh; if the mesh is a slice of a larger one, for
    the slice with ``rank``.
    """
    found = next((ranks for ranks in process_groups.rank_lists(mesh) if rank in ranks), None)
    if found is None:
        raise RuntimeError(f"rank {rank} is not on the mesh {mesh}")
    return dict(zip(found, product(*map(range, mesh.shape))))


def place(mesh: Any, rank: int) -> Device:
    """The coordinates of a rank on the mesh."""
    return places(mesh, rank)[rank]


def coordinate(index: int, sizes: tuple[int, ...]) -> Device:
    result = []
    for n in reversed(sizes):
        index, k = divmod(index, n)
        result.append(k)
    return tuple(reversed(result))


@lru_cache(maxsize=1 << 10)
def peers(mesh: Any, dims: tuple[int, ...], rank: int) -> tuple[Device, ...]:
    """The coordinates of the ranks that differ from ``rank`` only on ``dims``, in the order of
    their process group, which is by rank.
    """
    mine, others = place(mesh, rank), [m for m in range(mesh.ndim) if m not in dims]
    return tuple(
        [
            device
            for _, device in sorted(places(mesh, rank).items())
            if all(device[m] == mine[m] for m in others)
        ]
    )


@lru_cache(maxsize=1 << 10)
def in_order(mesh: Any, dims: tuple[int, ...]) -> bool:
    """Whether process groups of these mesh dims number their ranks as the mesh does, with the dims
    in this order and the last one the fastest.
    """
    sizes = tuple(mesh.shape)
    lists = process_groups.rank_lists(mesh)
    if list(dims) == sorted(dims) and all(a < b for ranks in lists for a, b in pairwise(ranks)):
        return True
    for ranks in lists:
        last: dict[tuple[int, ...], int] = {}
        placed = sorted(
            (
                tuple([place[m] for m in dims]),
                tuple([c for m, c in enumerate(place) if m not in dims]),
                rank,
            )
            for rank, place in zip(ranks, (coordinate(i, sizes) for i in range(len(ranks))))
        )
        for _, others, rank in placed:
            if last.get(others, -1) > rank:
                return False
            last[others] = rank
    return True


def spans(group: Any, mesh: Any, dims: Sequence[int]) -> bool:
    """Whether the group has no ranks but those of these mesh dims."""
    return dist.get_world_size(group) == prod(mesh.size(m) for m in dims)


def copies_natively(group: Any, mesh: Any) -> bool:
    """Whether the backend gathers and reduce-scatters better than by an all-to-all. gloo does not
    if copies follow: its collectives work on lists of tensors, which it copies once more.
    """
    return is_native(process_groups.backend_name(group, mesh.device_type))


def is_native(backend: str | None) -> bool:
    return backend != "gloo"
