"""In which order the mesh dims of a DTensor cut its tensor dims.

Left to right, each what the ones before it left: that is how torch lays out what
``distribute_tensor`` gets, and what view propagation means. But a spec may also say an order of its
own; and torch *moves* specs of _StridedShard placements that a program made (fully_shard over
tensor parallelism does) as if the split factors encoded an order: ``[_StridedShard(0,
split_factor=2), Shard(0)]`` on mesh dims of 4 and 2 is then the second mesh dim first. Where sizes
divide, both readings say the same. Where they do not, they may say different sizes, torch has
tensors of both kinds, and nothing but the local shapes tells which one is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch_modes,
    local_tensors,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.groups import group_of
from cute_sharding.dtensor.run.placements import cut_of
from cute_sharding.dtensor.run.ranks import on_each_rank, place, true_on_each_rank
from cute_sharding.exchange.cost import coordinates, within
from cute_sharding.sharding.chains import Chains, chains_of
from cute_sharding.sharding.meeting import count_rows as size
from cute_sharding.sharding.meeting import rows_held as held

# Where a spec keeps the reading that was found for it: torch hands the spec of a tensor on, to its
# gradient and to its next use.
_KEPT = "_cute_sharding_reading"
# Autograd makes the spec of a gradient anew. So of specs that a program made itself, which are few,
# it is also kept here; all ranks of their mesh have found it together.
_plain: set[Any] = set()


@lru_cache(maxsize=1 << 12)
def left_to_right(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Chains:
    return chains_of([cut_of(p) for p in placements], len(shape), mesh)


def readings(spec: DTensorSpec) -> tuple[Chains, Chains | None]:
    """The chains of a spec, and other chains that it might mean as well, where devices would then
    hold something else.
    """
    shape, mesh = tuple(spec.shape), tuple(spec.mesh.shape)
    plain = left_to_right(shape, mesh, tuple(spec.placements))
    order = tensor_specs.shard_order(spec)
    if order is None:
        return plain, None
    ordered = _ordered(order, len(shape), mesh)
    if not spec.use_strided_shard_as_shard_order:
        return ordered, None
    return plain, None if _same(shape, mesh, plain, ordered) else ordered


def agree(shape: Sequence[int], spec: DTensorSpec, placements: Sequence[Placement]) -> bool:
    """Whether a tensor of those placements on the mesh of ``spec`` is the same in both readings."""
    order = tensor_specs.decoded_order(tuple(placements), spec.mesh)
    if order is None:
        return True
    mesh = tuple(spec.mesh.shape)
    return _same(
        tuple(shape),
        mesh,
        left_to_right(tuple(shape), mesh, tuple(placements)),
        _ordered(order, len(shape), mesh),
    )


def read_in_one_way(spec: DTensorSpec) -> Chains | None:
    """The chains of a spec, where it can be read in one way or is known to be read so; else None:
    then :func:`of_source` asks all ranks.
    """
    plain, ordered = readings(spec)
    if ordered is None:
        return plain
    kept: Chains | None = getattr(spec, _KEPT, None)
    return kept if kept in (plain, ordered) else None


def of_source(spec: DTensorSpec, local: torch.Tensor) -> Chains:
    """How the tensor at hand is cut. Where that can be read in two ways, the ranks tell one another
    which one their local shapes fit, in tiny all-reduces, the first time that they see its spec.

    Of what redistribution made it is known. Where there is nothing to communicate about, while a
    graph is traced and on meta and fake tensors, it is torch's reading, the shard order.

    Raises:
        RuntimeError: on every rank, where neither fits them all; or where local shapes cannot tell,
            as on a few meshes of three dims.
    """
    known = read_in_one_way(spec)
    if known is not None:
        return known
    plain, ordered = readings(spec)
    assert ordered is not None
    shape, sizes = tuple(spec.shape), tuple(spec.mesh.shape)
    if not _shapes_tell(shape, sizes, plain, ordered):
        raise RuntimeError(
            f"a DTensor of shape {shape} on mesh {sizes} with placements {spec.placements} can be "
            "read left to right or as a shard order, which are other rows in local tensors of the "
            "same "
            "sizes: nothing tells which. Make it with Shard or Replicate placements, and "
            "redistribute it from there"
        )
    if dispatch_modes.is_tracing() or local_tensors.is_imagined(local):
        return ordered
    if _fits(spec, ordered, local):
        chosen = ordered
    elif _fits(spec, plain, local):
        chosen = plain
    else:
        raise RuntimeError(
            f"the local tensors of a DTensor of shape {tuple(spec.shape)} with placements "
            f"{spec.placements} are of sizes that neither reading of the placements gives"
        )
    object.__setattr__(spec, _KEPT, chosen)
    (_plain.add if chosen == plain else _plain.discard)(_key(spec))
    return chosen


def of_target(spec: DTensorSpec, *, is_explicit: bool) -> Chains:
    """How a result is to be cut: where that can be read in two ways, as torch's redistribution cuts
    it, in the order; a gradient as the tensor that it belongs to.
    """
    plain, ordered = readings(spec)
    if ordered is None:
        return plain
    chosen = getattr(spec, _KEPT, None)
    if is_explicit or chosen not in (plain, ordered):
        chosen = plain if not is_explicit and _key(spec) in _plain else ordered
        if not dispatch_modes.is_tracing():
            object.__setattr__(spec, _KEPT, chosen)
    return chosen


def _key(spec: DTensorSpec) -> Any:
    return spec.mesh, tuple(spec.placements), tuple(spec.shape)


def _ordered(order: Sequence[tuple[int, Sequence[int]]], ndim: int, mesh: Sequence[int]) -> Chains:
    chains: list[tuple[tuple[int, int], ...]] = [()] * ndim
    for dim, mesh_dims in order:
        chains[dim] = tuple([(m, 1) for m in mesh_dims if mesh[m] > 1])
    return tuple(chains)


@lru_cache(maxsize=1 << 12)
def _same(shape: tuple[int, ...], mesh: tuple[int, ...], one: Chains, other: Chains) -> bool:
    return one == other or (within(shape, mesh, one, other) and within(shape, mesh, other, one))


@lru_cache(maxsize=1 << 10)
def _shapes_tell(shape: tuple[int, ...], mesh: tuple[int, ...], one: Chains, other: Chains) -> bool:
    """Whether some device's local shape differs."""
    for device in product(*(coordinates(n, prod(mesh)) for n in mesh)):
        for n, a, b in zip(shape, one, other):
            sizes = [
                size(held(n, tuple([(f, mesh[m], device[m]) for m, f in chain])))
                for chain in (a, b)
            ]
            if sizes[0] != sizes[1]:
                return True
    return False


def _fits(spec: DTensorSpec, chains: Chains, local: torch.Tensor) -> bool:
    """Whether every rank's local tensor has the shape that the chains give it."""
    mesh = spec.mesh
    sizes = tuple(mesh.shape)

    def expected(rank: int) -> tuple[int, ...]:
        device = place(mesh, rank)
        return tuple(
            [
                size(held(n, tuple([(f, sizes[m], device[m]) for m, f in chain])))
                for n, chain in zip(spec.shape, chains)
            ]
        )

    if dispatch_modes.local_tensor_mode() is not None:
        return true_on_each_rank(
            lambda rank: (
                tuple(local_tensors.local_of(collective_ops.waited(local), rank).shape)
                == expected(rank)
            )
        )
    mine = on_each_rank(
        lambda rank, x: torch.tensor(
            [tuple(x.shape) == expected(rank)], dtype=torch.int32, device=x.device
        ),
        local,
    )
    for m, n in enumerate(sizes):
        if n > 1:
            mine = collective_ops.all_reduce(mine, "min", group_of(mesh, (m,)))
    return bool(mine.item())
