"""Ranks, their places on a mesh and in a process group; functions of every rank under
LocalTensorMode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch_modes,
    local_tensors,
    process_groups,
)
from cute_sharding.exchange import Mesh
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


@remembered
def slice_with(mesh: Any, rank: int) -> Mesh:
    """The mesh with its ranks; if it is a slice of a larger mesh, the slice with ``rank``.

    Raises:
        ValueError: the rank is on none.
    """
    for on in process_groups.slices(mesh):
        if on.coordinates(rank) is not None:
            return on
    raise ValueError(
        f"rank {rank} is not on the mesh {mesh}. Pass a mesh with rank {rank}, or call the "
        "function only on the ranks of the mesh"
    )


@remembered
def place(mesh: Any, rank: int) -> Device:
    """The coordinates of a rank on the mesh."""
    return slice_with(mesh, rank).device(rank)


@remembered
def ranks_beside(mesh: Any, rank: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that differ from a rank only on these mesh dims, in the order of their process
    group, which ascends.
    """
    on = slice_with(mesh, rank)
    return tuple(sorted(on.slice_of(on.device(rank), dims)))


@remembered
def numbers(mesh: Any, rank: int, dims: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
    """The number of a rank's place on the mesh, row-major; and those of :func:`ranks_beside`."""
    on = slice_with(mesh, rank)
    number = Mesh.numbered(on.sizes).rank
    beside = [number(on.device(peer)) for peer in ranks_beside(mesh, rank, dims)]
    return number(on.device(rank)), tuple(beside)


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
