"""What compiled programs of symbolic sizes exchange: one op that the compiler does not look into,
and that runs what an eager program runs, on the sizes of each call.

So there is one graph for all sizes, and ranks that compile meet those that do not in the same
collectives. What the op is to do is written in a string, for graphs are kept on disk: a kind, the
mesh, and what the kind needs. Redistribution is one, movement ops are others: the op itself stands
where all are known (movement/dynamic.py).
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha1
from itertools import islice
from typing import Any

import torch

from cute_sharding.dtensor.compiled.local_sizes import local_shape_of
from cute_sharding.dtensor.replaced import collective_ops, dispatch_modes, process_groups
from cute_sharding.dtensor.run.groups import means
from cute_sharding.dtensor.run.together import run_together
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.plan import Held, RedistributionPlan
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.sharding.chains import Chains

# The meshes that graphs name. Tracing comes by here, also before a graph from the disk is run.
_meshes: dict[str, Any] = {}


def exchanged(
    kind: str,
    operands: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[Any]],
    numbers: Sequence[Any],
    mesh: Any,
    *how: Any,
) -> list[torch.Tensor]:
    """What the op gives for the sizes at hand, for any sizes: results of those local shapes.

    Args:
        numbers: ints or symbols that the kind needs.
        how: what else it needs, as literals.
    """
    text = repr((kind, _name_of(mesh), tuple(map(len, shapes)), *how))
    sizes = [n for shape in shapes for n in shape]
    # Compilers keep what is waited for, also where a rank's result has no elements: other ranks
    # wait in the collectives behind it.
    with dispatch_modes.of_this_rank():  # another's may be for sizes that are numbers
        results = torch.ops.cute_sharding.exchange(
            operands, sizes, numbers, text, _group_name(mesh)
        )
    return [collective_ops.waited_in_graph(result) for result in results]


def run_opaque(
    plans: Sequence[RedistributionPlan],
    tensors: Sequence[torch.Tensor],
    mesh: Any,
    shapes: Sequence[tuple[Any, ...]],
) -> list[torch.Tensor]:
    """What plans do, run together, on this rank's tensors of DTensors of those shapes, which may be
    symbolic.
    """
    how, onto = [], []
    for plan, shape in zip(plans, shapes):
        source, target = plan.source, plan.target.chains
        how.append((source.chains, source.pending, source.kept, target))
        onto.append(local_shape_of(shape, target, mesh))
    sizes = [n for shape in shapes for n in shape]
    return exchanged("redistribute", tensors, onto, sizes, mesh, *how)


def _name_of(mesh: Any) -> str:
    """By what a graph names the mesh; :func:`mesh_named` knows it from then on."""
    key = _name(mesh)
    _meshes[key] = mesh
    return key


def _group_name(mesh: Any) -> str:
    """A process group of the mesh, by name: see ``in_one_order`` of
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


# -- in each call ----------------------------------------------------------------------------------


def redistributed(
    mesh: Any,
    operands: list[torch.Tensor],
    numbers: tuple[int, ...],
    *how: tuple[Chains, tuple[tuple[int, str], ...], tuple[int, ...], Chains],
) -> list[torch.Tensor]:
    """The operands, whose shapes are the ``numbers``, brought from chains to chains."""
    sizes, by, remaining = tuple(mesh.shape), means(mesh), iter(numbers)
    network = Network.of_programs(sizes, by.network)
    plans = []
    for chains, pending, kept, target in how:
        shape = tuple(islice(remaining, len(target)))
        held = Held(chains, pending, kept)
        plans.append(plan_steps(shape, sizes, held, target, network, *by[1:]))
    return run_together(plans, operands, mesh)
