"""Converts torch's placements to cuts of the algebra, and back; the order in which mesh dims shard;
and log lines about redistributions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from cute_sharding import sharding
from cute_sharding._memory import remembered
from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping.stats import is_new, logger
from cute_sharding.dtensor.compiled.symbols import to_sizes, to_symints
from cute_sharding.dtensor.replaced import communication, symints, tensor_specs
from cute_sharding.dtensor.replaced.compiler import strided_shard
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.exchange.placed import holds_all
from cute_sharding.exchange.plan import RedistributionPlan, collectives, received_by
from cute_sharding.exchange.step import Step
from cute_sharding.sharding.rows import Chains, Cut, chains_of

# -- words -----------------------------------------------------------------------------------------
# Log lines about redistributions: how each runs, and which process group is missing.
#
# They are the same on all ranks, so the first rank of the mesh writes them for all.

Placements = Sequence[Placement]


def say_redistributed(
    mesh: Any,
    shape: tuple[int, ...],
    before: Placements,
    after: Placements,
    plan: RedistributionPlan | None,
    *,
    among: int = 1,
) -> None:
    """Log once, at level INFO, for a mesh, a shape and placements. ``plan``: None for torch's own
    steps. ``among``: the number of tensors that share the collectives.
    """
    if not logger.isEnabledFor(logging.INFO) or not communication.is_first_rank(mesh):
        return
    sizes = tuple(mesh.shape)
    what = f"redistribute: {shape} {text(before)} -> {text(after)} on mesh {sizes}"
    if plan is None:
        how = "left to torch's own steps"
    elif not plan.collectives:
        how = "nothing is sent"
    else:
        n = plan.collectives
        shared = f", shared by {among} tensors" if among > 1 else ""
        how = (
            f"{n} collective{'s' * (n != 1)}{shared}, each device receives up to "
            f"{plan.received_elements} elements"
        )
    if is_new((mesh, what, how)):
        logger.info("%s: %s", what, how)


def say_what_is_missing(
    mesh: Any,
    missing: tuple[tuple[int, ...], ...],
    before: Placements,
    after: Placements,
    plan: RedistributionPlan,
    best: Sequence[Step],
) -> None:
    """Warn once for each set of mesh dims."""
    if not communication.is_first_rank(mesh) or not is_new((mesh, missing)):
        return
    names, dims = mesh.mesh_dim_names, missing[0]
    flatten = f" or mesh[{', '.join(repr(names[m]) for m in dims)}]._flatten()" if names else ""
    logger.warning(
        "redistribution of a tensor of shape %s on mesh %s from %s to %s takes %s, "
        "and each device receives %d elements. With one process group for the mesh dims %s, the "
        "redistribution would take %s, and each device would receive %d elements. "
        "First call cute_sharding.prepare_groups(mesh)%s on all ranks. (The first rank of the "
        "mesh logs this message once for these mesh dims.)",
        *(plan.shape, plan.mesh, text(before), text(after)),
        *(counted(plan.collectives, "collective"), plan.received_elements),
        " and ".join(map(str, missing)),
        *(counted(collectives(best), "collective"), received_by(best), flatten),
    )


# -- placements ------------------------------------------------------------------------------------
# Converts torch's placements to cuts of the algebra, and back.

Cuts: TypeAlias = tuple[Cut, ...]

_shard = lru_cache(maxsize=64)(Shard)  # every answer has the same few


def cut_of(placement: Placement) -> Cut:
    """The cut of a placement, (tensor dim, split factor) or None, in the algebra's sizes.

    Raises:
        RuntimeError: the placement has none; see :func:`.tensor_specs.cut_of`.
    """
    cut = tensor_specs.cut_of(placement)
    return cut if cut is None or type(cut[1]) is int else (cut[0], to_sizes(cut[1]))


def placement_of(cut: Cut) -> Placement:
    """The inverse of :func:`cut_of` for placements that shard; Replicate for None."""
    if cut is None:
        return Replicate()
    dim, split_factor = cut
    return _shard(dim) if split_factor == 1 else strided_shard(dim, to_symints(split_factor))


def counted_from_0(placement: Placement, ndim: int) -> Placement:
    """The placement, with a negative dim of ``ndim`` dims counted from 0."""
    if not isinstance(placement, (Shard, StridedShard)) or placement.dim >= 0:
        return placement
    return on_dim(placement, placement.dim + ndim)


def on_dim(placement: Shard | StridedShard, dim: int) -> Placement:
    """The placement, which shards another dim."""
    if isinstance(placement, StridedShard):  # tested first, as some releases make it a Shard
        return strided_shard(dim, symints.split_factor_of(placement))
    return Shard(dim)


def replaced(placements: Sequence[Placement], cuts: Sequence[Cut]) -> tuple[Placement, ...]:
    """The placements of ``cuts``; if a mesh dim shards neither before nor after, its entry of
    ``placements``, which may be Partial.
    """
    return tuple(
        [
            p if cut is None and cut_of(p) is None else placement_of(cut)
            for p, cut in zip(placements, cuts)
        ]
    )


def without(kinds: tuple[type, ...], placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements, with Replicate in place of those of these kinds."""
    return tuple([Replicate() if isinstance(p, kinds) else p for p in placements])


def text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(str, placements))}]"


def of_text(placements: str, ndim: int) -> tuple[Placement, ...]:
    """torch's placements of a tensor of ``ndim`` dims, from text as they are printed.

    Raises:
        ValueError: a part of the text is no placement.
    """
    return tuple(
        [
            tensor_specs.Partial(p.reduce_op)
            if isinstance(p, sharding.Partial)
            else placement_of((p.dim, p.split_factor) if isinstance(p, sharding.Shard) else None)
            for p in sharding.parse_placements(placements, ndim)
        ]
    )


def checked_placements(
    given: Sequence[Any] | str, shape: tuple[int, ...], sizes: tuple[int, ...], name: str
) -> tuple[Placement, ...]:
    """Placements for a tensor of this shape on a mesh of these sizes, with dims counted from 0.
    Errors call them ``name``.

    Raises:
        ValueError: their number is not that of mesh dims, or one names a dim that does not exist.
        TypeError: one is no placement.
    """
    placements: Sequence[Any] = of_text(given, len(shape)) if isinstance(given, str) else given
    if len(placements) != len(sizes):
        raise ValueError(
            f"{name} has {len(placements)} placements {text(placements)} for a mesh of "
            f"{len(sizes)} dims {sizes}: give one placement for each mesh dim"
        )
    result: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(
                f"{name} has {placement!r}, which is not a placement: use Shard, _StridedShard, "
                "Replicate or Partial of torch.distributed.tensor"
            )
        cut = cut_of(placement)
        if cut is not None and not -len(shape) <= cut[0] < len(shape):
            raise ValueError(
                f"{name}: placement {placement} is for tensor dim {cut[0]}, but the shape {shape} "
                f"has only {counted(len(shape), 'dim')}"
            )
        result.append(counted_from_0(placement, len(shape)))
    return tuple(result)


# -- reading ---------------------------------------------------------------------------------------
# The order in which the mesh dims of a DTensor shard its tensor dims, by its spec, and as torch
# redistributes it.
#
# View propagation assumes left to right: each mesh dim shards what the ones before it left. But a
# spec may name another order. And ``_StridedShard`` placements that a program made (as fully_shard
# over tensor parallelism does) encode one for torch's redistribution: ``[_StridedShard(0,
# split_factor=2), Shard(0)]`` on mesh dims of 4 and 2 means that the second mesh dim shards first.
# If sizes divide, left to right gives the same rows. If not, devices have other rows, and no view
# makes placements for which the two differ.


@remembered
def left_to_right(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Chains:
    return chains_of([cut_of(p) for p in placements], len(shape), mesh)


def chains_of_spec(spec: DTensorSpec) -> Chains:
    """The chains of cuts of a tensor with this spec; left to right if that gives the same rows."""
    order = tensor_specs.shard_order(spec)
    return _chains(tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements), order)


def chains_of_placements(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Chains:
    """The chains of cuts of a tensor with these placements on a mesh of these sizes, in a spec made
    by a program.
    """
    return _chains(shape, mesh, placements, tensor_specs.decoded_order(placements, mesh))


def agree(shape: Sequence[int], spec: DTensorSpec, placements: Sequence[Placement]) -> bool:
    """Whether placements on the mesh of ``spec`` give the same rows left to right, and as the order
    that torch decodes from them.
    """
    given = tuple(shape), tuple(spec.mesh.shape), tuple(placements)
    order = tensor_specs.decoded_order(given[2], given[1])
    return order is None or _chains(*given, order) == left_to_right(*given)


def _chains(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tensor_specs.Order | None,
) -> Chains:
    plain = left_to_right(shape, mesh, placements)
    if order is None:
        return plain
    ordered = _ordered(order, len(shape), mesh)
    if any(map(tensor_specs.is_last, placements)):  # it has no meaning left to right
        return ordered
    return plain if hold_the_same(shape, mesh, plain, ordered) else ordered


def _ordered(order: tensor_specs.Order, ndim: int, mesh: Sequence[int]) -> Chains:
    chains: list[tuple[tuple[int, int], ...]] = [()] * ndim
    for m, p in order:
        cut = cut_of(p)
        if cut is not None and mesh[m] > 1:
            chains[cut[0]] += ((m, cut[1]),)
    return tuple(chains)


@remembered
def hold_the_same(
    shape: tuple[int, ...], mesh: tuple[int, ...], one: Chains, other: Chains
) -> bool:
    """Whether every device of a mesh holds the same rows of a tensor under both chains."""
    return one == other or (
        holds_all(shape, mesh, one, other) and holds_all(shape, mesh, other, one)
    )
