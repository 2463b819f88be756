"""Whether it is understood how the tensors of an op lie. Where it is not, torch answers.

A spec says placements, and in which order its mesh dims cut: left to right; in an order of its own;
or, of ``_StridedShard`` placements that a program made, in one that torch decodes from the split
factors, which is another than left to right where sizes do not divide (:mod:`..run.reading`).
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
    """Whether all are on one mesh, of placements of torch's own kinds, which cut left to right or
    in the order of their split factors; and the strided ones are read in one way.
    """
    return (
        all(spec.mesh == specs[0].mesh for spec in specs)
        and all(map(_is_understood, specs))
        and len(_readings(specs)) <= 1
    )


def are_read_as_order(specs: Sequence[DTensorSpec]) -> bool:
    """Whether strided ones among them are read as an order of shards."""
    return True in _readings(specs)


def means_one_thing(spec: DTensorSpec) -> bool:
    """Whether its placements say which rows devices have, whatever the order; of symbolic sizes
    that is said of none.
    """
    return not spec.use_strided_shard_as_shard_order or _is_alike_in_both(spec)


def _is_alike_in_both(spec: DTensorSpec) -> bool:
    """Whether both readings of its placements are the same; of symbolic sizes, for all sizes."""
    shape, placements = tuple(spec.shape), tuple(spec.placements)
    if symints.is_symbolic(shape):
        return tensor_specs.decoded_order(placements, spec.mesh) is None
    return agree(shape, spec, placements)


def mean_what_they_say(
    specs: Sequence[DTensorSpec], wanted: Sequence[tuple[Placement, ...]]
) -> bool:
    """Whether an assignment holds however the placements are read: both readings are the same, or
    one operand alone is cut, as before.
    """
    if not symints.is_symbolic(*(tuple(spec.shape) for spec in specs)) and all(
        agree(spec.shape, spec, some)
        for spec, placements in zip(specs, wanted)
        for some in (tuple(spec.placements), placements)
    ):
        return True
    cut = [
        (spec, placements)
        for spec, placements in zip(specs, wanted)
        if any(isinstance(p, (Shard, StridedShard)) for p in (*spec.placements, *placements))
    ]
    return len(cut) == 1 and tuple(cut[0][0].placements) == cut[0][1]


def _is_understood(spec: DTensorSpec) -> bool:
    return all(
        type(p) in (Shard, StridedShard, Replicate, Partial) for p in spec.placements
    ) and not tensor_specs.says_an_order(spec)


def _readings(specs: Sequence[DTensorSpec]) -> set[bool | None]:
    """How the strided ones are to be read, where it matters: whether as an order of shards."""
    return {
        spec.use_strided_shard_as_shard_order
        for spec in specs
        if tensor_specs.split_factors(spec) and not _is_alike_in_both(spec)
    }
