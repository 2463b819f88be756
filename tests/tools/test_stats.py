"""stats(): what views, movement ops and redistributions receive, beside what collectives bring as
they run.
"""

import random
from math import prod
from pathlib import Path
from threading import Thread

import pytest
from simulation import distribute, number, placement_of, ranks_of
from torch.distributed.tensor import Replicate, Shard

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.bookkeeping import stats as counts

MESHES = [(4,), (3,), (2, 2), (2, 3)]
pytestmark = pytest.mark.one_in(4)
ROOT = Path(__file__).parents[2]


def drawn(rng, mesh, shape):
    return [
        placement_of((d, 1) if d >= 0 else None)
        for d in (rng.randrange(-1, len(shape)) for _ in mesh)
    ]


def counted(run, start):
    cute_sharding.stats(reset=True)
    with Received() as received:
        run(start)
    return cute_sharding.stats(), sum(received.by_rank.values())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_redistributions_receive_what_is_counted(mesh):
    rng, moved = random.Random(f"moves {mesh}"), 0
    with ranks_of(mesh):
        for _ in range(25):
            shape = tuple(rng.choice((5, 6, 7, 12)) for _ in range(2))
            before, after = drawn(rng, mesh, shape), drawn(rng, mesh, shape)
            start = distribute(number(shape), mesh, before)

            def run(x, after=after):
                x.redistribute(placements=after)

            with cute_sharding.enabled(redistribution=True, views=False):
                stats, ours = counted(run, start)
            if before == after or "redistribute" not in stats:
                continue
            counts = stats["redistribute"]
            assert counts["received_by_all"] == ours
            moved += ours > 0
    assert moved > 8


def view(rng, shape):
    n = prod(shape)
    first = [a for a in range(1, n + 1) if n % a == 0]
    target = rng.choice([(n,), *[(a, n // a) for a in first], (shape[0], 2, shape[1] // 2)])
    target = target if prod(target) == n else (n,)
    return lambda x: x.view(target)


def slice_or_flip(rng, shape):
    d = rng.randrange(len(shape))
    n = shape[d]
    a = rng.randrange(n)
    b = rng.randrange(a, n) + 1
    return lambda x: x.narrow(d, a, b - a)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("draw", [view, slice_or_flip])
def test_ops_receive_what_is_counted(mesh, draw):
    rng, moved = random.Random(f"{draw.__name__} {mesh}"), 0
    with ranks_of(mesh):
        for _ in range(40):
            shape = tuple(rng.choice((4, 5, 6, 12)) for _ in range(2))
            start = distribute(number(shape), mesh, drawn(rng, mesh, shape))
            run = draw(rng, shape)
            with cute_sharding.enabled(movement=True):
                stats, ours = counted(run, start)
            assert sum(of["received_by_all"] for of in stats.values()) == ours, stats
            moved += ours > 0
    assert moved > 3


@pytest.mark.one_in(1)
def test_what_is_padded_is_received():
    """5 rows on 4 devices: the last has none, and receives no padding."""
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True):
        start = distribute(number((5, 2)), (4,), [Shard(0)])
        stats, _ = counted(lambda x: x.redistribute(placements=[Replicate()]), start)
    counts = stats["redistribute"]
    assert counts["received_by_all"] == 2 * (3 + 3 + 4 + 5)
    assert "stock" not in counts and counts["stock"] == 0


@pytest.mark.one_in(1)
def test_a_table():
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        start = distribute(number((2, 6, 4)), (2,), [Shard(2)])
        stats, _ = counted(lambda x: x.view(2, 2, 12), start)
        assert stats.table().splitlines()[:2] == [
            "op            decided    received",
            "view.default  1 algebra         0",
        ], stats.table()
    assert "nothing was counted" in type(stats)().table()


@pytest.mark.one_in(1)
def test_what_is_asked_apart_is_not_counted():
    """And what another thread counts meanwhile is."""
    cute_sharding.stats(reset=True)
    with counts.count_apart() as outcomes:
        counts.count("mm.default", "gate")
        counts.count("mm.default", "signature")
        thread = Thread(target=counts.count, args=("roll.default", "free"))
        thread.start()
        thread.join()
    assert outcomes == ["gate", "signature"]
    assert cute_sharding.stats() == {"roll.default": {"free": 1}}
