"""Ranks, their places on a mesh and in a process group, and the process groups that redistributions
use: ``prepare_groups`` makes more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.settings import network_in_force
from cute_sharding.dtensor.replaced import communication, compiler, dispatch_modes, local_tensors
from cute_sharding.exchange import Mesh
from cute_sharding.exchange.network import Chosen
from cute_sharding.exchange.planner import Groups
from cute_sharding.sharding.rows import Device

# -- ranks -----------------------------------------------------------------------------------------
# Ranks, their places on a mesh and in a process group; functions of every rank under
# LocalTensorMode.


def only_rank() -> int | None:
    """This process's rank; None while tracing, and if every rank runs in this process."""
    if dispatch_modes.local_tensor_mode() is not None or dispatch_modes.is_tracing():
        return None
    return communication.this_rank()


def on_each_rank(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(rank, *local tensors)`` for this process's rank, or under LocalTensorMode for
    every rank.
    """
    mode = dispatch_modes.local_tensor_mode()
    if mode is None:
        with dispatch_modes.of_this_rank():
            return function(communication.this_rank(), *tensors)
    tensors = tuple(map(communication.wait_for, tensors))
    return mode.rank_map(
        lambda rank: function(rank, *(local_tensors.local_of(t, rank) for t in tensors))
    )


def on_all_ranks(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """``function(*local tensors)``, which does not depend on the rank: in a graph its nodes are
    those of all ranks, if the tensors have the same shapes.
    """
    with dispatch_modes.of_each_rank():
        return on_each_rank(lambda _, *some: function(*some), *tensors)


def all_on_all_ranks(
    function: Callable[..., list[torch.Tensor]], *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """As :func:`on_all_ranks`, for a function that returns several tensors."""
    with dispatch_modes.of_each_rank():
        return all_on_each_rank(lambda _, *some: function(*some), *tensors)


def all_on_each_rank(
    function: Callable[..., list[torch.Tensor]], *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """As :func:`on_each_rank`, for a function that returns several tensors."""
    mode = dispatch_modes.local_tensor_mode()
    if mode is None:
        with dispatch_modes.of_this_rank():
            return function(communication.this_rank(), *tensors)
    tensors = tuple(map(communication.wait_for, tensors))
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
        return list(function(communication.this_rank()))
    lists = {rank: function(rank) for rank in mode.ranks}
    return [
        local_tensors.local_int({rank: ints[i] for rank, ints in lists.items()})
        for i in range(len(next(iter(lists.values()))))
    ]


def true_on_each_rank(function: Callable[[int], bool]) -> bool:
    mode = dispatch_modes.local_tensor_mode()
    return function(communication.this_rank()) if mode is None else all(map(function, mode.ranks))


@remembered
def slice_with(mesh: Any, rank: int) -> Mesh:
    """The mesh with its ranks; if it is a slice of a larger mesh, the slice with ``rank``.

    Raises:
        ValueError: the rank is on none.
    """
    for on in communication.slices(mesh):
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
    return is_native(communication.backend_name(group, mesh.device_type))


def is_native(backend: str | None) -> bool:
    return backend != "gloo"


# -- groups ----------------------------------------------------------------------------------------
# The process groups that redistributions use, and ``prepare_groups``, which makes more of them.
#
# The group of a step depends on the mesh alone, so ranks agree whatever else each of them does:
# other slices of the mesh, pipeline stages and replicas take no part, and a redistribution never
# makes a group.


def prepare_groups(
    mesh: DeviceMesh,
    *dims: Sequence[int | str] | DeviceMesh,
    timeout: timedelta | None = None,
    pg_options: Any = None,
) -> None:
    """Make process groups that span several mesh dims, so that a redistribution over these mesh
    dims is one exchange of the missing elements.

    A mesh has a group for each of its dims. Without groups of several dims, a redistribution over
    several mesh dims takes more steps, and may move elements more than once. ``mesh["a",
    "b"]._flatten()`` makes the group of the named dims.

    Call it on every rank of the program, even on ranks outside of the mesh, with the same arguments
    and at the same point of the program: for example after ``init_process_group`` and before the
    first step. PyTorch then compiles compiled programs again. Existing groups are not made again.
    If the mesh is a slice of a larger mesh, every slice gets groups. The groups end with the
    default group.

    If you pass another mesh, the ranks of ``mesh`` and of the other mesh get a common group.
    :func:`cute_sharding.redistribute` between the two meshes is then one collective.

    Args:
        mesh: the mesh.
        dims: sets of mesh dims, by number or name, such as ``("dp", "tp")``. By default, every set
            of two or more mesh dims with more than one device. Or other meshes.
        timeout: the timeout of the groups' collectives; by default that of the mesh's own groups.
        pg_options: the options of the groups' backend, as for ``torch.distributed.new_group``.

    Raises:
        ValueError: the mesh has no such dim, or a set has fewer than two.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of eight, of which the others are made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=8, store=store)
    >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    >>> turned = [Replicate(), Shard(0), Shard(1)], [Replicate(), Shard(1), Shard(0)]
    >>> plan_redistribution((64, 64), mesh, *turned).received_elements
    1536
    >>> prepare_groups(mesh, ("cp", "tp"))
    >>> plan_redistribution((64, 64), mesh, *turned).received_elements
    1024
    >>> torch.distributed.destroy_process_group()
    """
    others = [among for among in dims if isinstance(among, DeviceMesh)]
    sets = [_numbers(mesh, among) for among in dims if not isinstance(among, DeviceMesh)]
    wide = [m for m in range(mesh.ndim) if mesh.size(m) > 1]
    if not dims:
        sets = [among for count in range(2, len(wide) + 1) for among in combinations(wide, count)]
    before = len(_prepared())
    names = mesh.mesh_dim_names or tuple([f"dim_{m}" for m in range(mesh.ndim)])
    for among in sets:
        among = tuple([m for m in among if m in wide])
        if (
            len(among) > 1
            and communication.flattened_mesh(mesh, among) is None
            and not _is_world(mesh, among)
        ):
            lists = [tuple(ranks) for _, ranks in communication.ranks_along(mesh, among)]
            _make(lists, mesh, f"mesh_{'_'.join(names[m] for m in among)}", timeout, pg_options)
    for other in others:
        _prepare_both(mesh, other, timeout, pg_options)
    if len(_prepared()) > before:
        compiler.forget_compiled_code()


def _prepare_both(mesh: DeviceMesh, other: DeviceMesh, timeout: Any, pg_options: Any) -> None:
    """Make the group of the ranks of both meshes; for slices, a group of every two that share
    ranks, or of all ranks if one of the meshes is no slice.
    """
    unions: list[set[int]] = []
    for ranks in (*communication.rank_lists(mesh), *communication.rank_lists(other)):
        apart = [one for one in unions if one.isdisjoint(ranks)]
        unions = [*apart, set(ranks).union(*(one for one in unions if one not in apart))]
    if 1 in (len(communication.rank_lists(each)) for each in (mesh, other)):
        unions = [set().union(*unions)]
    wanted = sorted(tuple(sorted(one)) for one in unions)
    if wanted != [tuple(range(dist.get_world_size()))]:
        _make(wanted, mesh, "ranks_of_two_meshes", timeout, pg_options)


def _make(
    lists: Sequence[tuple[int, ...]], mesh: Any, name: str, timeout: Any, pg_options: Any
) -> None:
    """Make groups of these lists of ranks, unless they are made already, which is known on all
    ranks alike, also on those outside of them.
    """
    groups, rank = _prepared(), communication.this_rank()
    if any(_key(mesh, ranks) not in groups for ranks in lists):
        made = _new_groups([*map(list, lists)], mesh, name, timeout, pg_options)
        groups.update({_key(mesh, ranks): made if rank in ranks else None for ranks in lists})


def _numbers(mesh: DeviceMesh, dims: Sequence[int | str]) -> tuple[int, ...]:
    names = mesh.mesh_dim_names or ()
    found = []
    for dim in [dims] if isinstance(dims, (int, str)) else dims:
        if isinstance(dim, str) and dim in names:
            found.append(names.index(dim))
        elif isinstance(dim, int) and -mesh.ndim <= dim < mesh.ndim:
            found.append(dim % mesh.ndim)
        else:
            raise ValueError(
                f"prepare_groups got the mesh dim {dim!r}, which {mesh} does not have: use "
                f"{', '.join(map(repr, names)) or f'0 to {mesh.ndim - 1}'}"
            )
    if len({*found}) < 2:
        raise ValueError(
            f"prepare_groups got {dims!r}, which names fewer than two mesh dims. A single mesh dim "
            "already has a process group. Pass sets of several mesh dims, such as (0, 1), or "
            "pass no sets to create all groups"
        )
    return tuple(sorted({*found}))


class Means(NamedTuple):
    """The settings and means by which plans on a mesh are chosen: part of the key of every kept
    plan. The network is as the setting has it (:meth:`Network.of_programs` reads it); the others
    are the last arguments of :func:`cute_sharding.exchange.planner.plan_steps`.

    A setting that plans depend on is read only in :func:`means`, so that it applies to eager
    programs, compiled ones and the op in graphs of many sizes alike. (A setting that makes plans
    depend on sizes in another way, as a limit of memory does, needs its own guards in
    :mod:`.in_graphs`.)
    """

    network: Chosen = None
    memory_limit: int | None = None
    groups: Groups = None
    native: bool = False


# The means of plans that no program runs, by default.
PLAIN = Means()


def means(mesh: Any) -> Means:
    """The means of plans on this mesh: the setting's network, :func:`groups_at_hand`, and whether
    the backend gathers and reduce-scatters better than it exchanges; no groups and False for a mesh
    without groups, and on ranks outside of the mesh, which run no plan. No setting limits the
    memory: an argument of ``cute_sharding.redistribute`` does.
    """
    network = network_in_force()
    if not communication.has_groups(mesh) or not mesh._is_current_rank_part_of_mesh():
        return Means(network, None, frozenset(), False)
    backend = _backend(mesh)
    return _means(network, groups_at_hand(mesh, backend), backend)


@lru_cache(maxsize=1 << 8)
def _means(network: Chosen, groups: Groups, backend: str | None) -> Means:
    return Means(network, None, groups, is_native(backend))


def _backend(mesh: Any) -> str | None:
    return communication.backend_name(communication.group_of_dim(mesh, 0), mesh.device_type)


def groups_at_hand(mesh: Any, backend: str | None = None) -> frozenset[tuple[int, ...]]:
    """The sets of two or more mesh dims whose ranks have a common process group: from
    ``prepare_groups``, from meshes that the program has flattened, and the default group if its
    ranks are those of the mesh. (One mesh dim always has one.) The same on every rank, eager and
    compiled, in every thread. ``backend`` is the mesh's, if the caller knows it.
    """
    if mesh.ndim < 2:
        return frozenset()
    return _at_hand(
        mesh,
        _flattenings(mesh),
        _backend(mesh) if backend is None else backend,
        len(_prepared()),
        ref(dist.group.WORLD),
    )


@lru_cache(maxsize=1 << 8)
def _at_hand(
    mesh: Any, flattened: Any, backend: str | None, prepared: int, world: Any
) -> frozenset[tuple[int, ...]]:
    dims = [m for m in range(mesh.ndim) if mesh.size(m) > 1]
    sets = (among for count in range(2, len(dims) + 1) for among in combinations(dims, count))
    return frozenset(
        among
        for among in sets
        if _group_of_several(mesh, among) is not None and _is_known_alike(mesh, among)
    )


def _is_known_alike(mesh: Any, dims: tuple[int, ...]) -> bool:
    """Whether all ranks of the mesh find a group for these mesh dims. Another mesh may have had
    groups prepared for some of these sets of ranks, and not for others.
    """
    groups = _prepared()
    return (
        communication.flattened_mesh(mesh, dims) is not None
        or _is_world(mesh, dims)
        or all(
            _key(mesh, tuple(ranks)) in groups for _, ranks in communication.ranks_along(mesh, dims)
        )
    )


def dims_of_group(mesh: Any, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The smallest set of mesh dims that has these ``dims`` and a process group; None if there is
    none.
    """
    if len(dims) < 2:
        return dims
    if not communication.has_groups(mesh):
        return None
    groups, others = groups_at_hand(mesh), [m for m in range(mesh.ndim) if m not in dims]
    for more in range(len(others) + 1):
        for some in combinations(others, more):
            among = tuple(sorted((*dims, *some)))
            if among in groups or tuple([m for m in among if mesh.size(m) > 1]) in groups:
                return tuple([m for m in among if mesh.size(m) > 1])
    return None


def group_of(mesh: Any, dims: tuple[int, ...]) -> Any:
    """The process group of exactly the ranks that differ only on these mesh dims.

    In this order: the group of the one mesh dim; one that ``prepare_groups`` made; the group of the
    dims flattened, if the program has flattened them; the default group. No group is made.

    Raises:
        RuntimeError: there is no such group.
    """
    if len(dims) == 1:
        return communication.group_of_dim(mesh, dims[0])
    group = _group_of_several(mesh, tuple(sorted(dims)))
    if group is None:
        raise RuntimeError(
            f"the ranks of the mesh dims {dims} of {mesh} have no common process group: call "
            "cute_sharding.prepare_groups(mesh) on all ranks"
        )
    return group


def group_of_ranks(ranks: tuple[int, ...], mesh: Any, other: Any) -> Any | None:
    """The process group of exactly these ranks, the ranks of both meshes; None if there is none. In
    this order: one that ``prepare_groups`` made; that of all dims of a mesh that has all these
    ranks; the default group.
    """
    group = _prepared().get(_key(mesh, ranks))
    for of in (mesh, other):
        if group is None and of.size() == len(ranks) and communication.has_groups(of):
            dims = tuple([m for m in range(of.ndim) if of.size(m) > 1])
            group = _group_of_several(of, dims) if len(dims) > 1 else None
            group = communication.group_of_dim(of, dims[0]) if len(dims) == 1 else group
    if group is None and len(ranks) == dist.get_world_size():
        backend = communication.backend_name(dist.group.WORLD, mesh.device_type)
        group = None if backend is None else dist.group.WORLD
    return group


def _group_of_several(mesh: Any, dims: tuple[int, ...]) -> Any | None:
    if not mesh._is_current_rank_part_of_mesh():
        return None
    ranks = ranks_beside(mesh, communication.this_rank(), dims)
    group = _prepared().get(_key(mesh, ranks))
    if group is None:
        flattened = communication.flattened_mesh(mesh, dims)
        group = None if flattened is None else communication.group_of_flattened(flattened)
    return dist.group.WORLD if group is None and _is_world(mesh, dims) else group


def _is_world(mesh: Any, dims: tuple[int, ...]) -> bool:
    """Whether these mesh dims have all ranks of the world, and the default group has the mesh's
    backend.
    """
    world = dist.group.WORLD
    if mesh.size() != dist.get_world_size() or not spans(world, mesh, dims):
        return False
    one, other = (
        communication.backend_name(group, mesh.device_type)
        for group in (world, communication.group_of_dim(mesh, dims[0]))
    )
    return one == other


# The groups that prepare_groups made, by a key that is the same on all ranks: the ranks, ascending,
# and the kind of device. None on a rank that is none of them. They end with the default group.
_groups: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def _prepared() -> dict[tuple[Any, ...], Any]:
    return _groups.setdefault(dist.group.WORLD, {})


def _key(mesh: Any, ranks: tuple[int, ...]) -> tuple[Any, ...]:
    return mesh.device_type, ranks


def prepared_key() -> str:
    """A hash of the prepared groups, for the key of graphs that a compiler keeps on disk."""
    return (
        hashlib.sha1(
            repr(sorted(map(repr, _prepared()))).encode(), usedforsecurity=False
        ).hexdigest()[:16]
        if dist.is_initialized() and _prepared()
        else ""
    )


def _flattenings(mesh: Any) -> tuple[Any, ...]:
    """The layouts of the meshes that the program made by flattening this mesh's root, and whose
    groups it has not destroyed.
    """
    return tuple(
        [
            flattened._layout
            for flattened in mesh._get_root_mesh()._flatten_mapping.values()
            if communication.group_of_flattened(flattened) is not None
        ]
    )


def _new_groups(
    slices: list[list[int]], mesh: Any, name: str, timeout: Any, pg_options: Any
) -> Any | None:
    """Make a process group for each of these lists of ranks, in this order on all ranks of the
    world; return the one that has this rank, or None.

    The groups have the backend of the mesh's own groups, and their timeout by default. If NCCL was
    given a device, they are split off the world's communicator at once, as DeviceMesh does.
    """
    world: Any = dist.group.WORLD
    like = communication.group_of_dim(mesh, 0) if mesh._is_current_rank_part_of_mesh() else world
    backend, rank = dist.get_backend(like), communication.this_rank()
    if timeout is None:
        timeout = _timeout_of(like, mesh.device_type)
    with dispatch_modes.no_modes():
        # Known on all ranks alike, also on those outside of the mesh.
        everybody = sum(map(len, slices)) == dist.get_world_size()
        if (
            everybody
            and world.bound_device_id is not None
            and backend == dist.get_backend(world) == "nccl"
        ):
            return dist.split_group(
                world, slices, timeout=timeout, pg_options=pg_options, group_desc=name
            )
        made = [
            dist.new_group(
                ranks, timeout=timeout, backend=backend, pg_options=pg_options, group_desc=name
            )
            for ranks in slices
        ]
    return next((group for group, ranks in zip(made, slices) if rank in ranks), None)


def _timeout_of(group: Any, device_type: str) -> Any | None:
    """The timeout of the group's collectives; None if its backend does not say."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (RuntimeError, AttributeError):
        return None
