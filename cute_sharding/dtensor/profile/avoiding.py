"""Placements of a tensor for which an op sends nothing. To find such placements, the package tries
placements with the rule of the op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from typing import Any

from cute_sharding.dtensor.profile.asking import Ask
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import text

# The most placements to try for one tensor.
MOST = 64
# The most placements to name for which the op sends nothing.
NAMED = 2


def free_placements(
    schema: OpSchema, at: int, dims: Sequence[int], ask: Ask
) -> list[tuple[int | None, tuple[Placement, ...]]]:
    """Placements of the tensor at position ``at`` for which the op sends nothing, and the bytes
    that the busiest rank receives in the redistribution to these placements. The placements with
    the fewest bytes come first; among equal bytes, those that keep the tensor sharded. None: a
    Partial has to be reduced first.

    Args:
        dims: the mesh dims on which the placement may change.
        ask: computes the redistributions of an op.
    """
    specs = op_schemas.specs_of(schema)
    spec, found = specs[at], []
    for placements in candidates(spec, dims):
        if not is_free(ask, with_placements(schema, {at: placements})):
            continue
        found.append((ask.received_to(spec, placements), placements))
    return sorted(found, key=_cost)[:NAMED]


def sharded_parts(
    schema: OpSchema, at: int, dims: Sequence[int], ask: Ask
) -> Iterator[tuple[int, tuple[Placement, ...]]]:
    """For an op that divides a sharded dim of the tensor ``at`` into equal parts: pairs of a mesh
    dim, and placements for which each part is sharded over this mesh dim, and the op sends
    nothing.
    """
    specs = op_schemas.specs_of(schema)
    spec = specs[at]
    try:
        parts = ask(schema).results
    except Exception:  # after any error of the rule, the parts are unknown
        return
    for m in dims:
        placement = spec.placements[m]
        if type(placement) is not Shard or len(parts) < 2:
            continue
        d = placement.dim
        if any(len(part.shape) != len(spec.shape) for part in parts):
            continue
        if any(part.shape[d] * len(parts) != spec.shape[d] for part in parts):
            continue
        block = StridedShard(d, split_factor=len(parts))
        now = tuple([block if k == m else p for k, p in enumerate(spec.placements)])
        if is_free(ask, with_placements(schema, {at: now})):
            yield m, now


def candidates(spec: DTensorSpec, dims: Sequence[int]) -> Iterator[tuple[Placement, ...]]:
    """Plain placements for which every rank has elements."""
    now = tuple(spec.placements)
    choices: list[list[Placement]] = []
    for m, placement in enumerate(now):
        parts = spec.mesh.shape[m]
        shards = [Shard(d) for d, n in enumerate(spec.shape) if n % parts == 0]
        choices.append([Replicate(), *shards] if m in dims else [placement])
    for number, placements in enumerate(product(*choices)):
        if number == MOST:
            return
        if placements != now:
            yield placements


def is_free(ask: Ask, schema: OpSchema) -> bool:
    """Whether the op sends nothing."""
    try:
        answered = ask(schema)
    except Exception:  # after any error of the rule, the op is not free
        return False
    return answered.other.received == 0 and answered.other.error is None


def with_placements(schema: OpSchema, places: Mapping[int, tuple[Placement, ...]]) -> OpSchema:
    """The op with other placements of some of its tensors, by number."""
    at = count()
    return op_schemas.replaced_specs(
        schema, lambda spec: places.get(next(at), tuple(spec.placements))
    )


def _cost(found: tuple[int | None, tuple[Placement, ...]]) -> tuple[Any, ...]:
    received, placements = found
    whole = sum(isinstance(p, Replicate) for p in placements)
    return received is None, received or 0, whole, text(placements)
