"""Plans of loads: who needs what of a chunk, by brute force; who reads it; how much at a time."""

import random
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from enumeration import devices, held

from cute_sharding.exchange import Mesh, Placed
from cute_sharding.models import PlacedTensor
from cute_sharding.models.load import LoadPlan
from cute_sharding.models.stored import Chunk, Stored, _of_pieces, in_chunks, needs_of
from cute_sharding.relations import Relation
from cute_sharding.relations.relation import identity_pieces
from cute_sharding.sharding import Replicate, Shard, Sharding


def drawn_chunks(rng, shape):
    """A grid of uneven boxes."""
    cuts = [sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 2)))}) for n in shape]
    spans = [list(pairwise(at)) for at in cuts]
    return tuple(
        Chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*spans)
    )


def drawn_target(rng, shape, ranks):
    mesh = rng.choice([(len(ranks),), (2, len(ranks) // 2)])
    placements = tuple(
        rng.choice([Replicate(), *(Shard(d, rng.choice([1, 1, 2])) for d in range(len(shape)))])
        for _ in mesh
    )
    return Sharding(shape, mesh, placements)


@pytest.mark.parametrize("seed", range(60))
def test_what_ranks_need_of_a_chunk(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
    stored = Stored("w", shape, "float32", drawn_chunks(rng, shape))
    ranks = rng.sample(range(10), 4)
    sharding = drawn_target(rng, shape, ranks)
    target = Placed.of(sharding, ranks)
    found = needs_of(stored, identity_pieces(0, 0, prod(shape)), [target])
    pieces = identity_pieces(0, 0, prod(shape))
    assert found == _of_pieces(shape, stored.chunks, pieces, (target,))
    numbers = np.arange(prod(shape)).reshape(shape)
    for chunk, some in zip(stored.chunks, found, strict=True):
        elements = {*numbers[chunk.slices].flat}
        for rank, device in zip(ranks, devices(sharding.mesh)):
            has = {*held(shape, sharding.mesh, sharding.cuts, device).flat}
            assert some.get(rank, 0) == len(elements & has)


def test_what_ranks_need_for_a_view():
    """All elements in their order, and yet other rows."""
    stored = Stored("w", (4, 6), "float32", (Chunk((0, 0), (4, 4)), Chunk((0, 4), (4, 2))))
    for shape in ((24,), (6, 4)):
        target = Placed.of(Sharding(shape, (2,), (Shard(0),)))
        found = needs_of(stored, identity_pieces(0, 0, 24), [target])
        assert found == ({0: 8, 1: 8}, {0: 4, 1: 4})


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (5, 4), (2, 3, 4), (3, 1, 5)])
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_chunks_follow_one_another_in_memory(shape, most):
    chunks = in_chunks(shape, most)
    numbers = np.arange(prod(shape)).reshape(shape)
    assert [n for chunk in chunks for n in numbers[chunk.slices].flat] == [*range(prod(shape))]
    assert all(chunk.elements <= most for chunk in chunks)


def rows_of(shape, n):
    rows, width = shape
    each = -(-rows // n)
    return tuple(Chunk((i, 0), (min(each, rows - i), width)) for i in range(0, rows, each))


def plan_of(shapes, ranks, target, **limits):
    """Tensors that all ranks have saved by rows."""
    n = len(ranks)
    stored = [
        Stored(f"w{k}", shape, "float32", rows_of(shape, n)) for k, shape in enumerate(shapes)
    ]
    results = [
        PlacedTensor(Placed(shape, Mesh((n,), ranks), target), name=f"w{k}")
        for k, shape in enumerate(shapes)
    ]
    relation = Relation.same(*shapes)
    return LoadPlan(tuple(stored), relation, tuple(results), ranks, **limits)


ROWS, COLUMNS = (((0, 1),), ()), ((), ((0, 1),))


def test_who_has_it_reads_it():
    """So that nothing is sent where a checkpoint lies as the model does."""
    plan = plan_of([(8, 6), (16, 4), (4, 2)] * 5, (0, 1, 2, 3), ROWS)
    assert {*plan.read_by.values()} == {5 * 4 * (12 + 16 + 2)}
    assert not any(plan.part(k).results for k in range(plan.many))
    read = [plan.kept(k, 1).reads for k in range(plan.many)]
    assert sum(4 * sum(each.sizes) for some in read for each in some) == plan.read_by[1]


def test_all_read_about_as_much_within_the_limit():
    shapes = [(random.Random(k).randint(1, 40), 8) for k in range(50)]
    free = plan_of(shapes, (3, 4, 5, 6, 7), COLUMNS)
    total, largest = sum(4 * prod(shape) for shape in shapes), 4 * 8 * 8
    assert sum(free.read_by.values()) == total
    assert max(free.read_by.values()) <= total / 5 * 9 / 8 + largest
    assert free.many == 1
    limit = 6 * largest
    plan = plan_of(shapes, (3, 4, 5, 6, 7), COLUMNS, memory_limit=limit)
    assert plan.many > 5 and plan.read_by == free.read_by
    assert sorted(t for some in plan.finished for t in some) == [*range(50)]
    for part in map(plan.part, range(plan.many)):
        for rank in plan.ranks:
            mine = part.refit.bundle.part(rank)
            read = sum(4 * sum(each.sizes) for each in part.reads if each.reader == rank)
            assert read + sum(mine.sends) + sum(mine.receives) <= limit
    with pytest.raises(ValueError, match=r"a chunk of 'w\d+' has .* the whole chunk"):
        plan_of(shapes, (3, 4, 5, 6, 7), COLUMNS, memory_limit=10)


def test_what_was_not_saved_whole():
    with pytest.raises(
        ValueError, match="has 12 elements, but the checkpoint has 6 elements in 1 chunk"
    ):
        Stored("w", (4, 3), "float32", (Chunk((0, 0), (2, 3)),))
