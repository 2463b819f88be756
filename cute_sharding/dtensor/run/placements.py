"""Converts torch's placements to cuts of the algebra, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from cute_sharding import sharding
from cute_sharding._words import counted
from cute_sharding.dtensor.compiled.symbols import to_sizes, to_symints
from cute_sharding.dtensor.replaced import symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.replaced.tracing import strided_shard
from cute_sharding.sharding.chains import Cut

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
