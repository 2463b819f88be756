"""torch's placements as cuts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from cute_sharding import sharding
from cute_sharding.dtensor.compiled.symbols import known, unknown
from cute_sharding.dtensor.replaced import tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.replaced.tracing import strided_shard
from cute_sharding.views import Cut

Cuts: TypeAlias = tuple[Cut, ...]

_shard = lru_cache(maxsize=64)(Shard)  # the same few, in every answer


def cut_of(placement: Placement) -> Cut:
    """What a placement does to the tensor, in sizes of the algebra.

    Raises:
        RuntimeError: as :func:`.tensor_specs.cut_of`, which says it.
    """
    cut = tensor_specs.cut_of(placement)
    return cut if cut is None or type(cut[1]) is int else (cut[0], known(cut[1]))


def placement_of(cut: Cut) -> Placement:
    """The inverse of :func:`cut_of`, of placements that cut; Replicate for None."""
    if cut is None:
        return Replicate()
    dim, split_factor = cut
    return _shard(dim) if split_factor == 1 else strided_shard(dim, unknown(split_factor))


def counted_from_0(placement: Placement, ndim: int) -> Placement:
    """The placement with a dim that counts from the end of ``ndim`` dims counted from 0."""
    if not isinstance(placement, (Shard, StridedShard)) or placement.dim >= 0:
        return placement
    dim = placement.dim + ndim
    if isinstance(placement, StridedShard):  # first: in some releases it is a Shard
        return StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def replaced(placements: Sequence[Placement], cuts: Sequence[Cut]) -> tuple[Placement, ...]:
    """The placements of ``cuts``; where a mesh dim shards neither before nor after, the one of
    ``placements``, which may be Partial.
    """
    return tuple(
        [
            p if cut is None and cut_of(p) is None else placement_of(cut)
            for p, cut in zip(placements, cuts)
        ]
    )


def text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(str, placements))}]"


def of_text(placements: str, ndim: int) -> tuple[Placement, ...]:
    """torch's placements of a tensor of so many dims, from text as they are printed.

    Raises:
        ValueError: a part of it is no placement.
    """
    return tuple(
        [
            tensor_specs.Partial(p.reduce_op)
            if isinstance(p, sharding.Partial)
            else placement_of((p.dim, p.split_factor) if isinstance(p, sharding.Shard) else None)
            for p in sharding.parse_placements(placements, ndim)
        ]
    )
