"""Whether it is understood how the tensors of an op are sharded. If it is not, torch answers.

A spec has placements, and an order in which its mesh dims shard: left to right; an order that it
names; or, for ``_StridedShard`` placements that a program made, the order that torch decodes from
the split factors, which differs from left to right if sizes do not divide (:mod:`..run.reading`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.dtensor.replaced import symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.reading import agree


def are_understood(specs: Sequence[DTensorSpec]) -> bool:
    """Whether all are on one mesh, with placements of torch's own kinds that shard left to right or
    in the order of their split factors; and the strided ones are all read in the same way.
    """
    return (
        all(spec.mesh == specs[0].mesh for spec in specs)
        and all(map(_is_understood, specs))
        and len(_readings(specs)) <= 1
    )


def are_read_as_order(specs: Sequence[DTensorSpec]) -> bool:
    """Whether strided placements among them are read as an order of shards, and mean other rows
    than left to right, or may mean others for other symbolic sizes.
    """
    return True in _readings(specs)


def _is_alike_in_both(spec: DTensorSpec) -> bool:
    """Whether both readings of its placements give the same rows; for all sizes, if symbolic."""
    shape, placements = tuple(spec.shape), tuple(spec.placements)
    if symints.is_symbolic(shape):
        return tensor_specs.decoded_order(placements, spec.mesh.shape) is None
    return agree(shape, spec, placements)


def keeps_the_only_shards(
    specs: Sequence[DTensorSpec], wanted: Sequence[tuple[Placement, ...]]
) -> bool:
    """Whether only one operand is sharded, and an assignment of placements keeps its own: that is
    right in both readings.
    """
    cut = [
        (tuple(spec.placements), placements)
        for spec, placements in zip(specs, wanted)
        if any(isinstance(p, (Shard, StridedShard)) for p in (*spec.placements, *placements))
    ]
    return len(cut) == 1 and cut[0][0] == cut[0][1]


def _is_understood(spec: DTensorSpec) -> bool:
    return all(
        type(p) in (Shard, StridedShard, Replicate, Partial) for p in spec.placements
    ) and not tensor_specs.says_an_order(spec)


def _readings(specs: Sequence[DTensorSpec]) -> set[bool | None]:
    """Whether strided placements are read as an order of shards: of those for which it matters."""
    return {
        spec.use_strided_shard_as_shard_order
        for spec in specs
        if tensor_specs.split_factors(spec) and not _is_alike_in_both(spec)
    }
