"""Meshes, process groups and functional collectives (torch/distributed/device_mesh.py,
distributed_c10d.py, _functional_collectives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import Work, _register_work
from torch.compiler import is_compiling
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _redistribute

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced.dispatch_modes import (
    is_tracing,
    local_tensor_mode,
    no_modes,
    of_this_rank,
)
from cute_sharding.exchange import Mesh

__all__ = [
    "OURS",
    "WAIT",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "averages",
    "backend_name",
    "communicates",
    "complete_when_waited",
    "coordinates_in_groups",
    "flattened_mesh",
    "group_of_dim",
    "group_of_flattened",
    "has_groups",
    "in_flight",
    "in_order",
    "is_ascending",
    "is_fake",
    "is_first_rank",
    "rank_lists",
    "ranks_along",
    "reduce_scatter",
    "slices",
    "stand_for",
    "this_rank",
    "wait_for",
    "waited_in_graph",
]


# -- process groups --------------------------------------------------------------------------------
# Meshes and process groups (torch/distributed/device_mesh.py, distributed_c10d.py).
#
# A mesh's ranks, layout and groups are read; none is made or destroyed here.


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
    """This process's rank, also as a number if every rank runs in this process; in
    :func:`numbered_as`, that number.
    """
    number = _number.get()
    return dist.group.WORLD.rank() if number is None else number  # type: ignore[union-attr]


@contextmanager
def numbered_as(rank: int) -> Iterator[None]:
    """This process has another rank inside of it, as in a group over several worlds."""
    token = _number.set(rank)
    try:
        yield
    finally:
        _number.reset(token)


_number: ContextVar[int | None] = ContextVar("_number", default=None)


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


# -- collective ops --------------------------------------------------------------------------------
# Functional collectives (torch/distributed/_functional_collectives.py): those that a redistribution
# uses, and waiting for their results.
#
# They are called here, and none is replaced.

# torch's functional collectives, waited for; with ``async_op`` the result may not have arrived, and
# has to be :func:`wait_for` for. Eagerly they are called below autograd: redistribution is an
# autograd function of its own, and torch's autograd kernels for them, which are Python, take the
# host twice as long as the collective itself.

_c10d: Any = torch.ops._c10d_functional
WAIT = _c10d.wait_tensor.default
_below_autograd = torch._C._AutoDispatchBelowAutograd


def all_to_all(
    buffer: torch.Tensor,
    receives: list[Any],
    sends: list[Any],
    group: Any,
    *,
    async_op: bool = False,
) -> torch.Tensor:
    if not _is_plain(buffer):
        with of_this_rank():
            result = funcol.all_to_all_single(buffer, receives, sends, group)
        return result if async_op else wait_for(result)
    with _below_autograd():
        return _result_of(
            _c10d.all_to_all_single.default(buffer, receives, sends, group.group_name), async_op
        )


def all_gather(
    tensor: torch.Tensor, group: Any, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    if not _is_plain(tensor):
        result = funcol.all_gather_single(tensor, dim, group)
        return result if async_op else wait_for(result)
    parts, outer = group.size(), tensor.shape[:dim]
    with _below_autograd():
        blocks: torch.Tensor = _c10d.all_gather_into_tensor.default(tensor, parts, group.group_name)
        if prod(outer) == 1:
            whole = (*outer, parts * tensor.shape[dim], *tensor.shape[dim + 1 :])
            return _result_of(blocks.view(whole) if dim else blocks, async_op)
        return torch.cat(waited_in_graph(blocks).chunk(parts), dim)


def reduce_scatter(
    tensor: torch.Tensor, op: str, group: Any, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    if dim or not _is_plain(tensor):
        result = funcol.reduce_scatter_single(tensor, op, dim, group)
        return result if async_op else wait_for(result)
    with _below_autograd():
        return _result_of(
            _c10d.reduce_scatter_tensor.default(tensor, op.lower(), group.size(), group.group_name),
            async_op,
        )


def all_reduce(
    tensor: torch.Tensor, op: str, group: Any, *, async_op: bool = False
) -> torch.Tensor:
    if not _is_plain(tensor):
        result = funcol.all_reduce(tensor, op, group)
        return result if async_op else wait_for(result)
    with _below_autograd():
        return _result_of(_c10d.all_reduce.default(tensor, op.lower(), group.group_name), async_op)


def _result_of(result: torch.Tensor, async_op: bool) -> torch.Tensor:
    """The result of a plain collective that has started."""
    return funcol.AsyncCollectiveTensor(result) if async_op else waited_in_graph(result)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the program is neither traced nor run as all ranks in one process, and autograd does
    not record the tensor.
    """
    return not (
        is_tracing()
        or local_tensor_mode() is not None
        or (tensor.requires_grad and torch.is_grad_enabled())
    )


# Our ops that communicate (run/in_graphs.py); and the ops in torch's libraries of collectives that
# do not.
OURS = ("exchange",)
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


def communicates(op: Any) -> bool:
    """Whether an op starts a collective: one of torch's, or one of ours."""
    if op.namespace == "cute_sharding":
        return op._opname in OURS
    return op.namespace in ("_c10d_functional", "_dtensor") and op._opname not in _NO_COLLECTIVES


def waited_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind torch's op that waits, as in a graph after a collective: no compiler
    removes that op. Eagerly it waits for a plain tensor, but not for one that is :func:`in_flight`.
    """
    result: torch.Tensor = WAIT(tensor)
    return result


class _Completion(Work):
    """What is left to do when the results of an op of ours are waited for: it is done once, also if
    each of several results is waited for.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        super().__init__()
        self._complete: Callable[[], None] | None = complete

    def wait(self, timeout: Any = None) -> bool:
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        return True


def complete_when_waited(results: Sequence[torch.Tensor], complete: Callable[[], None]) -> None:
    """Have torch's op that waits for one of the results call ``complete``, which waits for the
    collective and writes to them. Each result has memory of its own, by which torch knows it.
    """
    work = _Completion(complete)
    for result in results:
        _register_work(result, work)


def in_flight(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a collective writes to, which may not have ended."""
    return tensor.elem if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor after the collective that writes to it has ended; any other tensor at once. While
    a graph is traced, torch's collectives have added the op that waits themselves.
    """
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor
