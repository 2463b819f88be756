"""Exchanges between any ranks, beside enumeration: which elements each rank holds, element by
element.
"""

import random
from itertools import product
from math import prod

import pytest

from cute_sharding.exchange import Exchange, Mesh, Placed, identity
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding
from cute_sharding.sharding.rows import rows_held


def drawn_sharding(draw, shape, ranks):
    """Some placements of a tensor of that shape on a mesh of as many ranks, in some order."""
    sizes, left = [], len(ranks)
    while left > 1:
        n = draw.choice([k for k in range(1, left + 1) if left % k == 0])
        sizes.append(n)
        left //= n
    sizes = sizes or [1]
    placements = []
    for _ in sizes:
        d = draw.randrange(len(shape) + 1)
        placements.append(
            Replicate() if d == len(shape) else Shard(d, draw.choice([1, 1, 1, 2, 3]))
        )
    return Placed.of(Sharding(shape, tuple(sizes), tuple(placements)), ranks)


def drawn_ranks(draw, world=8):
    ranks = draw.sample(range(world), draw.choice([1, 2, 2, 3, 4, 4, 6, 8]))
    return tuple(ranks if draw.random() < 0.3 else sorted(ranks))


def drawn_pair(seed):
    draw = random.Random(seed)
    shape = tuple(
        draw.choice([0, 1, 2, 3, 5, 6, 8, 12]) for _ in range(draw.choice([0, 1, 2, 2, 3]))
    )
    ranks = drawn_ranks(draw)
    other = ranks if draw.random() < 0.3 else drawn_ranks(draw)
    if draw.random() < 0.2:
        other = tuple(draw.sample(ranks, len(ranks)))
    return drawn_sharding(draw, shape, ranks), drawn_sharding(draw, shape, other)


def elements(placed, rank):
    """The global index of each element that a rank holds, in the order of its local tensor."""
    device = placed.mesh.coordinates(rank)
    if device is None:
        return None
    rows = []
    for d, n in enumerate(placed.shape):
        found = {}
        for run in rows_held(n, placed.held_on(device)[d]):
            for turns in product(*(range(count) for count, _, _ in run.loops)):
                x = run.x + sum(i * dx for i, (_, dx, _) in zip(turns, run.loops))
                y = run.y + sum(i * dy for i, (_, _, dy) in zip(turns, run.loops))
                found.update({y + j: x + j for j in range(run.length)})
        rows.append([found[y] for y in range(len(found))])
    return [*product(*rows)]


def put(copy, read, write):
    """Carry out a copy between two things that are read and written at vectors."""
    for i in product(*map(range, copy.sizes)):
        x, y = (
            tuple(a + sum(k * step[d] for k, step in zip(i, steps)) for d, a in enumerate(start))
            for start, steps in ((copy.x, copy.dx), (copy.y, copy.dy))
        )
        write(y, read(x))


def carried_out(exchange, given):
    """What each rank has of each result, and how much each receives: with buffers of lists, as the
    parts say. ``given``: of each operand and rank, a dict from local vector to value.
    """
    parts = {rank: exchange.part(rank) for rank in exchange.ranks}
    buffers = {}
    for rank, part in parts.items():
        buffer = [None] * sum(part.sends)
        for k, copies in enumerate(part.packs):
            for copy in copies:
                put(copy, given[k][rank].__getitem__, lambda y, v: buffer.__setitem__(y[0], v))
        assert None not in buffer
        buffers[rank] = buffer
    results = []
    for k in range(len(exchange.targets)):
        result = {}
        for rank, part in parts.items():
            got = []
            for peer, count in zip(part.peers, part.receives):
                at = parts[peer].peers.index(rank) if count else 0
                assert not count or parts[peer].sends[at] == count
                start = sum(parts[peer].sends[:at])
                got += buffers[peer][start : start + count]
            values = {}
            for i, onto, copies in part.own:
                for copy in copies if onto == k else ():
                    put(copy, given[i][rank].__getitem__, once(values))
            for copy in part.unpacks[k]:
                put(copy, lambda x, got=got: got[x[0]], once(values))
            result[rank] = values
        results.append(result)
    return results


def once(values):
    def write(y, value):
        assert y not in values, f"{y} is written twice"
        values[y] = value

    return write


def locals_of(placed, rank, value=lambda index: index):
    """From the local vector to the value."""
    found = elements(placed, rank)
    if found is None:
        return None
    shape = placed.local_shape(rank)
    return dict(zip(product(*map(range, shape)), map(value, found)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("first", range(0, 3000, 100))
def test_every_rank_gets_what_it_needs_and_no_more(first):
    for seed in range(first, first + 100):
        source, target = drawn_pair(seed)
        exchange = Exchange(identity(source.shape), (source,), (target,))
        (result,) = carried_out(
            exchange, [{rank: locals_of(source, rank) for rank in exchange.ranks}]
        )
        for rank in exchange.ranks:
            said = (seed, str(source.mesh), source.chains, str(target.mesh), target.chains, rank)
            assert result[rank] == (locals_of(target, rank) or {}), said
            needs, has = ({*(elements(placed, rank) or ())} for placed in (target, source))
            received = sum(exchange.part(rank).receives)
            assert received == exchange.received_by(rank) == len(needs - has), said
            assert rank not in exchange.part(rank).peers


@pytest.mark.parametrize("owners", [2, 3, 4])
@pytest.mark.parametrize("takers", [1, 2, 3, 4, 6])
def test_those_that_have_the_same_send_alike(owners, takers):
    source = Placed.of(Sharding((12, 12), (owners,), (Replicate(),)))
    ranks = range(owners, owners + takers)
    for placements in [(Replicate(),), (Shard(0),)]:
        target = Placed.of(Sharding((12, 12), (takers,), placements), ranks)
        exchange = Exchange(identity((12, 12)), (source,), (target,))
        sent = [sum(exchange.part(rank).sends) for rank in range(owners)]
        total = 144 * (takers if placements == (Replicate(),) else 1)
        assert sum(sent) == total and max(sent) - min(sent) <= 12, sent


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(60))
def test_a_relation_between_meshes(seed):
    """A slice, a roll, a flip, of one mesh's tensor on another's ranks."""
    draw = random.Random(seed)
    shape = (draw.choice([5, 6, 8]), draw.choice([3, 4]))
    op, args, index = draw.choice(
        [
            ("torch.roll", (2, 0), lambda i, j: ((i - 2) % shape[0], j)),
            ("Tensor.__getitem__", (0, 1, shape[0], 2), lambda i, j: (1 + 2 * i, j)),
            ("torch.flip", ((0,),), lambda i, j: (shape[0] - 1 - i, j)),
        ]
    )
    move = BY_OP[op].move(shape, *args)
    source = drawn_sharding(draw, shape, drawn_ranks(draw))
    target = drawn_sharding(draw, move.outputs[0], drawn_ranks(draw))
    exchange = Exchange(move, (source,), (target,))
    backward = any(rows.backward for pair in move.links[0].pairs for rows in pair)
    (result,) = carried_out(exchange, [{rank: locals_of(source, rank) for rank in exchange.ranks}])
    for rank in exchange.ranks:
        wanted = locals_of(target, rank, lambda place: index(*place)) or {}
        if backward:  # rows lie from the last, until they are turned
            last = (target.local_shape(rank) or (0,))[0] - 1
            wanted = {(last - i, j): value for (i, j), value in wanted.items()}
        assert result[rank] == wanted


def test_who_is_on_no_mesh_has_no_part():
    source, target = (Placed.of(Sharding((4,), (2,), (Shard(0),)), r) for r in ((0, 1), (2, 3)))
    part = Exchange(identity((4,)), (source,), (target,)).part(7)
    assert part.peers == () and part.target_shapes == (None,) and part.packs == ((),)


def test_meshes_that_are_none():
    with pytest.raises(ValueError, match="but the list of ranks has 3"):
        Mesh((2, 2), (0, 1, 2))
    with pytest.raises(ValueError, match="must not repeat a rank"):
        Mesh((2,), (1, 1))
    with pytest.raises(ValueError, match="reduce the Partial first"):
        Placed.of(Sharding((4,), (2,), (Partial("sum"),)))


@pytest.mark.parametrize("devices", [64, 1024])
def test_peers_that_are_not_met_are_not_looked_at(devices):
    """Of blocks in a row each meets few of other blocks in a row: the cost does not grow."""
    n = 48 * devices
    source = Placed.of(Sharding((n,), (devices,), (Shard(0),)))
    target = Placed.of(Sharding((n,), (devices, 2), (Shard(0), Shard(0))), range(2 * devices))
    part = Exchange(identity((n,)), (source,), (target,)).part(devices // 2)
    assert 1 <= len(part.peers) <= 4 and prod(part.target_shapes[0]) == 24


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(40))
def test_the_same_layout_on_many_ranks_is_free(seed):
    """More ranks than are looked at one by one: of even blocks it is proved by the layouts."""
    draw = random.Random(seed)
    line, placements = (128,), (Shard(draw.choice([0, 1]), draw.choice([1, 2])),)
    other = draw.choice([(8, 16), (16, 8), (2, 64), (4, 4, 8)])
    shape = (512, 1024)
    source = Placed.of(Sharding(shape, line, placements))
    same = Placed.of(Sharding(shape, other, placements * len(other)))
    turned = Placed.of(
        Sharding(shape, other[::-1], (placements[0], *(Replicate(),) * (len(other) - 1)))
    )
    assert Exchange(identity(shape), (source,), (same,)).is_free
    exchange = Exchange(identity(shape), (source,), (turned,))
    assert not exchange.is_free and exchange.received_elements
    at = draw.randrange(128)
    assert elements(source, at) == elements(same, at)
    moved = Placed(shape, Mesh(other, (*range(1, 128), 0)), same.chains)
    assert not Exchange(identity(shape), (source,), (moved,)).is_free
