"""What a device holds of a relation's results and needs for them, beside enumeration."""

import random

import pytest
from drawn_moves import counted_out, drawn_program
from enumeration import devices

from cute_sharding.relations import Relation, held, needed
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding


def drawn_sharding(rng, shape):
    mesh = rng.choice([(2,), (3,), (2, 2), (2, 3)])
    placements = []
    for _ in mesh:
        d = rng.randrange(len(shape) + 1)
        placements.append(Replicate() if d == len(shape) else Shard(d, rng.choice([1, 1, 2, 3])))
    return Sharding(shape, mesh, tuple(placements))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_held_and_needed(first):
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        relation = drawn_program(seed, (1, 5)).relation()
        said = counted_out(relation)
        operand, result = (rng.randrange(len(x)) for x in (relation.inputs, relation.outputs))
        source = drawn_sharding(rng, relation.inputs[operand])
        target = drawn_sharding(rng, relation.outputs[result])
        for device in devices(source.mesh):
            at = {x: i for i, x in enumerate(source.flat_indices(device))}
            has = {place: (0, at[x]) for place, (k, x) in said.items() if k == operand and x in at}
            assert counted_out(held(relation, source, device, operand)) == has, seed
        for device in devices(target.mesh):
            wants = {(0, i): said[result, y] for i, y in enumerate(target.flat_indices(device))}
            assert counted_out(needed(relation, target, device, result)) == wants, seed


def test_shardings_that_do_not_fit():
    relation = Relation.same((4, 6))
    with pytest.raises(ValueError, match="operand 0 has shape"):
        held(relation, Sharding((4,), (2,), (Shard(0),)), (0,))
    with pytest.raises(ValueError, match="reduce the Partial first"):
        needed(relation, Sharding((4, 6), (2,), (Partial("sum"),)), (0,))
