"""A redistribution in a compiled program whose sizes are symbolic: one op that the compiler does
not look into, and that runs what an eager program runs, on the sizes of each call.

So there is one graph for all sizes, and ranks that compile meet those that do not in the same
collectives. What the op is to do is written in a string, for graphs are kept on disk.
"""

from __future__ import annotations

from ast import literal_eval
from functools import lru_cache
from hashlib import sha1
from typing import Any

import torch

from cute_sharding.dtensor.compiled.library import in_own_memory, library
from cute_sharding.dtensor.compiled.local_sizes import local_shape_of
from cute_sharding.dtensor.replaced import collective_ops, dispatch_modes, process_groups
from cute_sharding.dtensor.run.executor import run
from cute_sharding.dtensor.run.groups import means
from cute_sharding.redistribution.network import Network
from cute_sharding.redistribution.plan import Held, RedistributionPlan
from cute_sharding.redistribution.planner import plan_steps

# The meshes that graphs name. Tracing comes by here, also before a graph from the disk is run.
_meshes: dict[str, Any] = {}


def run_opaque(
    plan: RedistributionPlan, local: torch.Tensor, mesh: Any, shape: tuple[Any, ...]
) -> torch.Tensor:
    """What ``plan`` does for the sizes at hand, for any sizes: the op, on this rank's tensor of a
    DTensor of symbolic ``shape``.
    """
    onto = local_shape_of(shape, plan.target.chains, mesh)
    how = repr(
        (
            name_of(mesh),
            plan.source.chains,
            plan.source.pending,
            plan.source.kept,
            plan.target.chains,
        )
    )
    # Compilers keep what is waited for, also where a rank's result has no elements: other ranks
    # wait in the collectives behind it.
    with dispatch_modes.of_this_rank():  # another's may be for sizes that are numbers
        moved = torch.ops.cute_sharding.redistribute(
            local, list(shape), onto, how, group_name(mesh)
        )
    return collective_ops.waited_in_graph(moved)


def name_of(mesh: Any) -> str:
    """By what a graph names the mesh; :func:`mesh_named` knows it from then on."""
    key = _name(mesh)
    _meshes[key] = mesh
    return key


def group_name(mesh: Any) -> str:
    """A process group of the mesh, by name: see ``as_collectives`` of
    replaced/collective_order.py.
    """
    name: str = process_groups.group_of_dim(mesh, 0).group_name
    return name


@lru_cache(maxsize=1 << 8)
def _name(mesh: Any) -> str:
    return sha1(
        repr(
            (
                mesh.device_type,
                tuple(mesh.shape),
                mesh.mesh_dim_names,
                process_groups.rank_lists(mesh),
            )
        ).encode(),
        usedforsecurity=False,
    ).hexdigest()[:16]


parsed = lru_cache(maxsize=1 << 10)(literal_eval)


def mesh_named(key: str, how: str) -> Any:
    """
    Raises:
        RuntimeError: no graph was made for such a mesh in this process.
    """
    if key not in _meshes:
        raise RuntimeError(
            f"a compiled program redistributes on a mesh that this process has not met ({how}): "
            "compile it in this process"
        )
    return _meshes[key]


def _read(how: str) -> tuple[Any, Held, Any]:
    key, chains, pending, kept, target = parsed(how)
    return mesh_named(key, how), Held(chains, pending, kept), target


def _redistribute(
    local: torch.Tensor, shape: list[int], onto: list[int], how: str, group: str
) -> torch.Tensor:
    mesh, source, target = _read(how)
    sizes, by = tuple(mesh.shape), means(mesh)
    steps = plan_steps(
        tuple(shape),
        sizes,
        source,
        target,
        Network.of_programs(sizes, by.network),
        *by[1:],
    )
    return in_own_memory(run(steps, local, mesh), [local])


def _shape_of(
    local: torch.Tensor, shape: list[Any], onto: list[Any], how: str, group: str
) -> torch.Tensor:
    return local.new_empty(onto)


# The result's sizes are an argument: a backward graph is handed the symbols that its nodes have as
# arguments, and no others.
library.define(
    "redistribute(Tensor local, SymInt[] shape, SymInt[] onto, str how, str group) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.impl("redistribute", _redistribute, "CompositeExplicitAutograd")
torch.library.register_fake("cute_sharding::redistribute", _shape_of, lib=library)
