"""torch's placements as cuts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from cute_sharding.dtensor.compiled.symbols import known, unknown
from cute_sharding.dtensor.torch_private.tensor_specs import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.torch_private.tracing import strided_shard
from cute_sharding.views import Cut

Cuts: TypeAlias = tuple[Cut, ...]

_shard = lru_cache(maxsize=64)(Shard)  # the same few, in every answer


def cut_of(placement: Placement) -> Cut:
    """What a placement does to the tensor, as views and redistribution see it. A kind of placement
    that is not known is refused, not taken for Replicate.
    """
    kind = type(placement)  # isinstance takes longer, and subclasses are rare
    if kind is Shard:
        return placement.dim, 1  # type: ignore[attr-defined]
    if kind is Replicate:
        return None
    if isinstance(placement, StridedShard):
        return placement.dim, known(placement.split_factor)
    if isinstance(placement, Shard):
        return placement.dim, 1
    if isinstance(placement, (Replicate, Partial)):
        return None
    raise RuntimeError(
        f"placement {placement!r} is of a kind that views cannot carry: redistribute to Shard, "
        "Replicate or Partial first"
    )


def placement_of(cut: Cut) -> Placement:
    if cut is None:
        return Replicate()
    dim, split_factor = cut
    return _shard(dim) if split_factor == 1 else strided_shard(dim, unknown(split_factor))


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
