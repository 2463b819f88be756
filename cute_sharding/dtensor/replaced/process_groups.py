"""Meshes and process groups (torch/distributed/device_mesh.py, distributed_c10d.py).

A mesh's ranks, layout and groups are read; none is made or destroyed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _redistribute

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced.dispatch_modes import no_modes
from cute_sharding.exchange import Mesh

__all__ = [
    "averages",
    "backend_name",
    "coordinates_in_groups",
    "flattened_mesh",
    "group_of_dim",
    "group_of_flattened",
    "has_groups",
    "in_order",
    "is_ascending",
    "is_fake",
    "is_first_rank",
    "rank_lists",
    "ranks_along",
    "slices",
    "stand_for",
    "this_rank",
]


def rank_lists(mesh: Any) -> list[list[int]]:
    """The ranks of the mesh, row-major; if it is a slice of a larger mesh, those of every slice."""
    # Under LocalTensorMode, torch refuses views in inference mode of tensors from outside of it.
    with no_modes(), torch.inference_mode(False):
        return mesh._layout.remap_to_tensor(mesh._rank_map).flatten(1).tolist()


@lru_cache(maxsize=1 << 8)
def slices(mesh: Any) -> tuple[Mesh, ...]:
    """The mesh with its ranks; if it is a slice of a larger mesh, every slice."""
    return tuple([Mesh(tuple(mesh.shape), ranks) for ranks in rank_lists(mesh)])


def ranks_along(mesh: Any, dims: Sequence[int]) -> Iterator[tuple[Mesh, list[int]]]:
    """The sets of ranks that differ only on these mesh dims, ascending as in their process groups,
    each with its slice.
    """
    for on in slices(mesh):
        for device in product(*[range(1 if m in dims else n) for m, n in enumerate(on.sizes)]):
            yield on, sorted(on.slice_of(device, dims))


@remembered
def in_order(mesh: Any, dims: tuple[int, ...]) -> bool:
    """Whether process groups of these mesh dims number their ranks as the mesh does, with the dims
    in this order and the last one the fastest.
    """
    if dims == tuple(sorted(dims)) and all([*on.ranks] == sorted(on.ranks) for on in slices(mesh)):
        return True
    for on, ranks in ranks_along(mesh, dims):
        places = [[device[m] for m in dims] for device in map(on.device, ranks)]
        if places != sorted(places):
            return False
    return True


@remembered
def is_ascending(mesh: Any) -> bool:
    """Whether ranks ascend along each mesh dim, as they do in its process group. If they do not, a
    rank's place in the group is not its coordinate, and torch uses sometimes the one and sometimes
    the other as the number of its shard: it scatters and gathers by the place, and slices replicas
    by the coordinate. The same on all ranks of all slices of a mesh.
    """
    return all(in_order(mesh, (m,)) for m in range(mesh.ndim))


def is_first_rank(mesh: Any) -> bool:
    """Whether this process is the first rank of the mesh (or of its own slice of a larger mesh): it
    logs what is the same on all ranks. True without a process group.
    """
    return not dist.is_initialized() or _is_first(mesh, this_rank())


@lru_cache(maxsize=1 << 8)
def _is_first(mesh: Any, rank: int) -> bool:
    return any(on.ranks[0] == rank for on in slices(mesh))


def coordinates_in_groups(mesh: Any, dim: int) -> dict[int, tuple[int, ...]]:
    """For each rank of the mesh, the coordinates of the ranks in its process group of the mesh dim,
    in the group's order, which ascends.
    """
    found: dict[int, tuple[int, ...]] = {}
    for on, ranks in ranks_along(mesh, (dim,)):
        found.update(dict.fromkeys(ranks, tuple([on.device(rank)[dim] for rank in ranks])))
    return found


def has_groups(mesh: Any) -> bool:
    """Whether the mesh was made with process groups."""
    return bool(getattr(mesh, "_dim_group_names", None))


def this_rank() -> int:
    """This process's rank, also as a number if every rank runs in this process."""
    return dist.group.WORLD.rank()  # type: ignore[union-attr]


def flattened_mesh(mesh: Any, dims: tuple[int, ...]) -> Any | None:
    """The mesh that the program made by flattening these mesh dims, or None."""
    return _redistribute._get_flattened_mesh_by_layout_impl(mesh, dims)


def group_of_dim(mesh: Any, dim: int) -> Any:
    """The process group of a mesh dim."""
    if has_groups(mesh) and not is_compiling():
        # this is what the mesh itself looks up, in more steps
        c10d: Any = distributed_c10d
        return c10d._resolve_process_group(mesh._dim_group_names[dim])
    group = _living(mesh.get_group(dim))
    if group is None:
        raise RuntimeError(
            f"the process group of mesh dim {dim} of {mesh} was destroyed: create the mesh again"
        )
    return group


def group_of_flattened(mesh: Any) -> Any | None:
    """The process group of a mesh that a program made by flattening; None if it is gone."""
    try:
        return _living(mesh.get_group())
    except RuntimeError:
        return None


def _living(group: Any) -> Any | None:
    """The group that has the name of ``group`` now; None if none has.

    torch caches specs, so it may return a mesh of a destroyed process group, which equals a mesh of
    the next group. Its collectives use the group's name and do not notice; but while torch
    compiles, such a mesh returns its old group.
    """
    if not isinstance(group, dist.ProcessGroup) or group in distributed_c10d._world.pg_map:
        return group
    c10d: Any = distributed_c10d
    try:
        return c10d._resolve_process_group(group.group_name)
    except RuntimeError:
        return None


def backend_name(group: Any, device_type: str) -> str | None:
    """The name of the group's backend for a kind of device; None without one. In a dry run, that of
    the backend that the fake one stands for.
    """
    try:
        name = _backend_name(ref(group), device_type)
    except RuntimeError:
        return None
    return _stood_for.get(name, name)


def stand_for(backend: str) -> None:
    """Have torch's ``fake`` backend count as another one, in the process of a dry run."""
    _stood_for["fake"] = backend


_stood_for: dict[str, str] = {}


def is_fake(group: Any) -> bool:
    """Whether the group is fake, and communicates with nobody."""
    return bool(dist.get_backend(group) == "fake")


@lru_cache(maxsize=1 << 8)
def _backend_name(group: ref[Any], device_type: str) -> str:
    living: Any = group()
    return str(living._get_backend(torch.device(device_type)).name())


def averages(group: Any, device_type: str) -> bool:
    """Whether the group's backend can average, so that halves do not overflow: NCCL scales
    contributions before it sums them.
    """
    return backend_name(group, device_type) == "nccl"
