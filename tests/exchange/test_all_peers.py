"""The messages to all peers at once, beside those to one after the other."""

import random
from itertools import pairwise, product
from unittest.mock import patch

import pytest

from cute_sharding.exchange import AllToAll, Placed
from cute_sharding.exchange import step as steps
from cute_sharding.exchange.part import edges
from cute_sharding.sharding.rows import chains_of, near, rows_held


def rows_of(runs):
    """From the position on the device to the row."""
    found = {}
    for run in runs:
        for turns in product(*(range(count) for count, _, _ in run.loops)):
            x = run.x + sum(i * dx for i, (_, dx, _) in zip(turns, run.loops))
            y = run.y + sum(i * dy for i, (_, _, dy) in zip(turns, run.loops))
            found.update({y + j: x + j for j in range(run.length)})
    return found


@pytest.mark.parametrize("split_factor", [1, 2, 3, 5])
def test_blocks_are_those_of_each_device(split_factor):
    for n, parts in product(range(41), [1, 2, 3, 4, 7, 16]):
        case = n, parts
        found = edges(n, split_factor, parts)
        if found is None:  # pieces, and a last one of another size
            assert split_factor > 1 and n % split_factor, case
            continue
        assert found[0] == 0 and found[-1] == parts and len(found) <= 6, case
        held = [rows_held(n, ((split_factor, parts, k),)) for k in range(parts)]
        for first, stop in pairwise(found):
            steps = {
                (tuple(b.x - a.x for a, b in zip(one, other)), len(one), len(other))
                for one, other in pairwise(held[first:stop])
            }
            # The same runs, and not others of the same rows: messages lie in their order.
            alike = {tuple(run._replace(x=0) for run in runs) for runs in held[first:stop]}
            assert len(alike) == 1 and len(steps) <= 1, case
            assert all(len({*step}) <= 1 for step, _, _ in steps), case


def test_no_device_near_is_missing():
    for seed in range(300):
        draw = random.Random(seed)
        n, factor, parts = draw.randint(0, 60), draw.choice([1, 1, 2, 3, 4]), draw.randint(1, 20)
        chain = [(draw.choice([1, 2, 3]), draw.randint(1, 6)) for _ in range(draw.randint(1, 2))]
        mine = rows_held(n, tuple([(f, p, draw.randrange(p)) for f, p in chain]))
        wanted = {*rows_of(mine).values()}
        holding = {
            k
            for k in range(parts)
            if wanted & {*rows_of(rows_held(n, ((factor, parts, k),))).values()}
        }
        found = near(n, factor, parts, mine)
        assert holding <= found <= set(range(parts)), seed


def elements(buffer, into):
    """Every (vector in the tensor, place in the buffer), and the sizes of messages."""
    found = {}
    for copy in buffer.copies[0]:
        copy = copy.flipped if into else copy
        for i in product(*map(range, copy.sizes)):
            x, y = (
                tuple(a + sum(k * step[d] for k, step in zip(i, steps)) for d, a in enumerate(at))
                for at, steps in ((copy.x, copy.dx), (copy.y, copy.dy))
            )
            assert y not in found
            found[y] = x
    return found, buffer.sizes


def drawn(seed):
    draw = random.Random(seed)
    mesh = draw.choice([(70,), (9, 8), (3, 4, 6), (2, 36)])
    shape = tuple(draw.choice([1, 5, 71, 140, 144]) for _ in range(2))

    def cut():
        return draw.choice([None, (0, 1), (1, 1), (draw.randrange(2), draw.choice([2, 3]))])

    source, target = (chains_of([cut() for _ in mesh], 2, mesh) for _ in range(2))
    device = tuple(draw.randrange(n) for n in mesh)
    before = Placed.numbered(shape, mesh, source)
    return AllToAll(before, before.cut_as(target)), before.mesh.rank(device)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("first", range(0, 240, 20))
def test_all_at_once_is_one_by_one(first):
    at_once = 0
    for seed in range(first, first + 20):
        step, rank = drawn(seed)
        peers = step.group(rank)
        own = step.flow.kept_by(rank)
        for kept in (own, None):
            with patch.object(steps, "MANY", 1):
                found = step._buffers(rank, peers, kept, 0)
                at_once += step._at_once(rank, peers, kept, into=False) is not None
            with patch.object(steps, "MANY", 1 << 30):
                slowly = step._buffers(rank, peers, kept, 0)
            for into in (False, True):
                one, other = elements(found[into], into), elements(slowly[into], into)
                assert one == other, (seed, into, kept)
    assert at_once


def test_few_copies_among_many_peers():
    rows = Placed.numbered((8192, 16384), (8192,), (((0, 1),), ()))
    exchange = AllToAll(rows, rows.cut_as(((), ((0, 1),))))
    part = exchange.transfer(5, exchange.group(5))
    assert len(part.sends) == 8192 and set(part.sends) == {2}
    assert part.packs[0] is None or len(part.packs[0]) <= 2
    assert part.unpacks[0] is None or len(part.unpacks[0]) <= 2
