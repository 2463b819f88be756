"""Movements of tensors whose placements can be read in two ways (redistributing/reading.py).

Which it is their local tensors tell when the op runs. So the results are placed in a way that has
one reading, and the exchange is planned from the one that is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product

from cute_sharding.dtensor.redistributing.groups import dims_of_group
from cute_sharding.dtensor.redistributing.reading import agree, readings
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec
from cute_sharding.movement import BY_OP, Move
from cute_sharding.movement.choose import Choice, kept
from cute_sharding.movement.free import Cuts
from cute_sharding.movement.steps import Placed, Step, placed

# Combinations of readings that are planned for, at the most: each operand may have two.
_MOST = 4


def has_one_reading(spec: DTensorSpec) -> bool:
    return not spec.use_strided_shard_as_shard_order or agree(
        tuple(spec.shape), spec, tuple(spec.placements)
    )


def of_two_readings(
    move: Move, specs: Sequence[DTensorSpec], cuts: tuple[Cuts, ...]
) -> Choice | None:
    """To plain shards of the dims that can be read in two ways: one movement of each reading ends
    there. The choice is for the first one. None where the op leaves such a dim as it is, or ranks
    that may have to exchange have no group.
    """
    mesh, sizes = specs[0].mesh, tuple(specs[0].mesh.shape)
    plain, sources = [], []
    for i, (spec, some) in enumerate(zip(specs, cuts)):
        one, other = readings(spec)
        differ = {d for d, (a, b) in enumerate(zip(one, other or one)) if a != b}
        if not differ <= move.touched(i):
            return None
        plain.append(tuple([(c[0], 1) if c and c[0] in differ else c for c in some]))
        sources.append((one, other or one))
    onto = kept(move, tuple(plain), sizes)
    ways = [replace(onto.movement, sources=one) for one in islice(product(*sources), _MOST + 1)]
    if len(ways) > _MOST or any(dims_of_group(mesh, way.mesh_dims) is None for way in ways):
        return None
    return Choice(onto.cuts, ways[0])


def steps_of_two_readings(
    steps: Sequence[Step], spec: DTensorSpec, cuts: Cuts
) -> tuple[Cuts, list[Placed]] | None:
    """As :func:`~cute_sharding.movement.steps.placed`, of steps that begin with a movement; None of
    others.
    """
    (op, args), *others = steps
    move = BY_OP[op].move(tuple(spec.shape), *args) if op in BY_OP else None
    choice = move and of_two_readings(move, [spec], (cuts,))
    if not move or not choice:
        return None
    first = Placed(steps[0], move.outputs[0], choice.cuts[0], choice.movement)
    way = placed(others, first.shape, first.cuts, tuple(spec.mesh.shape))
    return (cuts, [first, *way[1]]) if way and way[0] == first.cuts else None
