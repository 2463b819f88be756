"""Converts the placements of specs to the terms of signatures, and back, where it is understood how
the tensors are sharded. Where it is not, torch answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cute_sharding.dtensor.replaced import symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    are_known,
    cut_of,
)
from cute_sharding.dtensor.run.placements import agree, placement_of
from cute_sharding.propagation.signatures import Part
from cute_sharding.sharding.rows import kinds_of_device, local_size

# -- cuts ------------------------------------------------------------------------------------------
# Converts the placements of specs to the terms of signatures, and back.


def is_sharded(spec: DTensorSpec) -> bool:
    return any(isinstance(p, (Shard, StridedShard)) for p in spec.placements)


def is_uneven(spec: DTensorSpec) -> bool:
    sizes: list[Any] = list(spec.shape)
    for placement, n in zip(spec.placements, spec.mesh.shape):
        if isinstance(placement, (Shard, StridedShard)):
            if symints.is_truly(sizes[placement.dim] % n != 0):
                return True
            sizes[placement.dim] //= n
    return False


def some_device_is_empty(spec: DTensorSpec, dims: Collection[int] | None = None) -> bool:
    """Whether some device has no row of one of these dims, or of any dim by default. Symbolic sizes
    count by their present values. False for placements of an unknown kind.
    """
    return any(
        0 in some for d, some in enumerate(sizes_of_devices(spec)) if dims is None or d in dims
    )


def leave_one_without(specs: Sequence[DTensorSpec]) -> bool:
    """Whether a tensor has rows of all dims and some device has none of one; False if sizes are
    symbolic.
    """
    return any(
        not symints.is_symbolic(tuple(spec.shape))
        and 0 not in spec.shape
        and some_device_is_empty(spec)
        for spec in specs
    )


def is_of_views(spec: DTensorSpec) -> bool:
    """Whether some shards are not those of any order of shards: only views make such shards. torch
    misreads them in the specs of a program, on a mesh of several dims (2.13 and 2.15 alike).
    """
    return bool(tensor_specs.split_factors(spec)) and not (
        spec.use_strided_shard_as_shard_order
        and tensor_specs.decoded_order(tuple(spec.placements), spec.mesh.shape) is not None
    )


def devices_differ(spec: DTensorSpec) -> bool:
    """Whether some device has more rows of a dim than another; False if that is not known."""
    return any(len(some) > 1 for some in sizes_of_devices(spec))


def sizes_of_devices(spec: DTensorSpec) -> list[set[int]]:
    """For each dim, the numbers of rows that devices have; empty if they are not known."""
    if not are_known(spec.placements):
        return []
    mesh, pairs = tuple(spec.mesh.shape), [*enumerate(spec.placements)]
    if any(map(tensor_specs.is_last, spec.placements)):
        pairs = [*(tensor_specs.shard_order(spec) or ())]
    numbers = symints.numbers_at_hand((tuple(spec.shape), [cut_of(p) for _, p in pairs]))
    if numbers is None:
        return []
    shape, cuts = numbers
    counts = [{n} for n in shape]
    for cut, (m, _) in zip(cuts, pairs):
        if cut is not None:
            (d, factor), parts = cut, mesh[m]
            counts[d] = {
                local_size(n, factor, parts, device)
                for n in counts[d]
                for device in kinds_of_device(n, factor, parts)
            }
    return counts


def parts_of(placements: Sequence[Placement]) -> tuple[Part, ...]:
    """What each mesh dim does; of symbolic split factors the present numbers. A mesh dim that
    shards last counts as a plain shard, which has about as many rows.

    Raises:
        RuntimeError: a placement is of an unknown kind.
    """
    cuts: Any = [*map(cut_of, placements)]
    if symints.is_symbolic(cuts):
        cuts = symints.numbers_at_hand(cuts)
    cuts = [cut and (cut[0], max(cut[1], 1)) for cut in cuts]
    return tuple(
        [p.reduce_op if isinstance(p, Partial) else cut for p, cut in zip(placements, cuts)]
    )


def placements_of(
    parts: Sequence[Part], factors: dict[int, Any], last: Mapping[int, Any] = MappingProxyType({})
) -> tuple[Placement, ...]:
    """The inverse of :func:`parts_of`; ``factors``: split factors, by their present numbers;
    ``last``: those of the mesh dims that shard last.
    """
    return tuple(
        [
            Partial(part)
            if isinstance(part, str)
            else placement_of(part and (part[0], last.get(m) or factors.get(part[1], part[1])))
            for m, part in enumerate(parts)
        ]
    )


def last_of(specs: Sequence[DTensorSpec]) -> dict[int, int]:
    """The split factors of the mesh dims that shard some operand last."""
    return {
        m: p.split_factor  # type: ignore[attr-defined]
        for spec in specs
        for m, p in enumerate(spec.placements)
        if tensor_specs.is_last(p)
    }


# -- understood ------------------------------------------------------------------------------------
# Whether it is understood how the tensors of an op are sharded. If it is not, torch answers.
#
# A spec has placements, and an order in which its mesh dims shard: left to right; an order that it
# names; or, for ``_StridedShard`` placements that a program made, the order that torch decodes from
# the split factors, which differs from left to right if sizes do not divide (``run.placements``).


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
        type(p) in (Shard, StridedShard, Replicate, Partial) or tensor_specs.is_masked(p)
        for p in spec.placements
    ) and not tensor_specs.says_an_order(spec)


def _readings(specs: Sequence[DTensorSpec]) -> set[bool | None]:
    """Whether strided placements are read as an order of shards: of those for which it matters."""
    return {
        spec.use_strided_shard_as_shard_order
        for spec in specs
        if tensor_specs.split_factors(spec) and not _is_alike_in_both(spec)
    }
