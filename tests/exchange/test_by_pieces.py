"""Exchanges through drawn relations, between drawn meshes: every rank has what the program makes of
whole tensors, and receives what it needs and does not hold, each element once.
"""

import random
from dataclasses import replace

import pytest
from drawn_moves import drawn_program, numbered
from test_any_meshes import drawn_ranks, drawn_sharding, elements, once, put

from cute_sharding.exchange import Bundle, Exchange, Item, Mesh, Placed
from cute_sharding.relations import Relation, beside
from cute_sharding.relations.table import relation_of
from cute_sharding.sharding import Replicate, Shard, Sharding


def drawn_exchange(seed):
    """A program, its relation, and where operands and results lie: on a mesh each, or on two."""
    rng = random.Random(seed)
    program = drawn_program(seed)
    relation = program.relation()
    ranks = drawn_ranks(rng)
    other = ranks if rng.random() < 0.3 else drawn_ranks(rng)
    if rng.random() < 0.2:  # each tensor on a mesh of its own
        sources = [drawn_sharding(rng, shape, drawn_ranks(rng)) for shape in relation.inputs]
        targets = [drawn_sharding(rng, shape, drawn_ranks(rng)) for shape in relation.outputs]
        return program, Exchange(relation, tuple(sources), tuple(targets))
    sources = tuple(drawn_sharding(rng, shape, ranks) for shape in relation.inputs)
    targets = tuple(drawn_sharding(rng, shape, other) for shape in relation.outputs)
    return program, Exchange(relation, sources, targets)


def local_of(placed, rank, whole):
    """What a rank holds, from places to values: all by the last dim of more than one row."""
    found = elements(placed, rank)
    if found is None:
        return None
    shape = placed.local_shape(rank)
    line = max([d for d, n in enumerate(shape) if n > 1], default=0)
    return {
        tuple(at if d == line else 0 for d in range(len(shape))): int(whole[place])
        for at, place in enumerate(found)
    }


def carried_out(parts, operands, constants, results, is_whole=True):
    """Of each result what each rank has. ``operands``: of each and each rank, values by place."""
    buffers = {}
    for rank, part in parts.items():
        buffer = [None] * sum(part.sends)
        for given, copies in zip(operands, part.packs):
            for copy in copies:
                put(copy, given[rank].__getitem__, lambda y, v: buffer.__setitem__(y[0], v))
        assert not is_whole or None not in buffer
        buffers[rank] = buffer
    found = []
    for k in range(results):
        found.append({})
        for rank, part in parts.items():
            got = []
            for peer, count in zip(part.peers, part.receives):
                at = parts[peer].peers.index(rank)
                assert parts[peer].sends[at] == count
                start = sum(parts[peer].sends[:at])
                got += buffers[peer][start : start + count]
            values = found[-1][rank] = {}
            for i, onto, copies in part.own:
                read = (
                    operands[i][rank].__getitem__
                    if i < len(operands)
                    else lambda x, i=i: constants[i - len(operands)]
                )
                for copy in copies if onto == k else ():
                    put(copy, read, once(values))
            for copy in part.unpacks[k]:
                put(copy, lambda x, got=got: got[x[0]], once(values))
    return found


def received_at_least(program, exchange, given, rank):
    """How many elements of the operands are in a rank's results and not in its operands: element by
    element, of index arrays in which no number stands twice.
    """
    needs, has = set(), set()
    for placed, whole in zip(exchange.targets, program(given)):
        needs |= {*(local_of(placed, rank, whole) or {}).values()}
    for placed, whole in zip(exchange.sources, given):
        has |= {*(local_of(placed, rank, whole) or {}).values()}
    return len({value for value in needs if value >= 0} - has)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_every_rank_gets_what_the_program_makes(first):
    for seed in range(first, first + 50):
        program, exchange = drawn_exchange(seed)
        given = numbered(program.shapes)
        parts = {rank: exchange.part(rank) for rank in exchange.ranks}
        operands = [
            {rank: local_of(placed, rank, whole) for rank in parts}
            for placed, whole in zip(exchange.sources, given)
        ]
        results = carried_out(parts, operands, exchange.relation.constants, len(exchange.targets))
        for placed, whole, result in zip(exchange.targets, program(given), results, strict=True):
            for rank in parts:
                assert result[rank] == (local_of(placed, rank, whole) or {}), (seed, rank)
        for rank, part in parts.items():
            received = sum(part.receives)
            assert received == exchange.received_by(rank), seed
            assert received == received_at_least(program, exchange, given, rank), (seed, rank)
            assert rank not in part.peers and not any(part.filled)


def shares_of(exchange, k):
    """Of ranks that hold the same of an operand, how much each sends of it."""
    sent = {}
    for rank in exchange.sources[k].mesh.ranks:
        shares = [share for share in exchange.sent_by(rank) if share.operand == k]
        holder = tuple(elements(exchange.sources[k], rank))
        sent.setdefault(holder, []).append(sum(share.size for share in shares))
    return sent


def test_those_that_hold_the_same_send_alike():
    replicas = 0
    for seed in range(300):
        _, exchange = drawn_exchange(seed)
        for k in range(len(exchange.sources)):
            for holder, sent in shares_of(exchange, k).items():
                replicas += len(sent) > 1 and sum(sent) > len(sent)
                assert not holder or max(sent) - min(sent) <= 1, seed
    assert replicas > 20


def test_what_is_needed_twice_is_sent_once():
    """Repeated heads, and one weight of two results, as where it is tied."""
    heads = relation_of("Tensor.view", (8, 4), (2, 4, 4)).then(
        relation_of("torch.unsqueeze", (2, 4, 4), 1)
    )
    heads = heads.then(relation_of("Tensor.expand", (2, 1, 4, 4), (2, 3, 4, 4)))
    both = beside(
        [heads.then(relation_of("Tensor.view", (2, 3, 4, 4), (24, 4))), Relation.same((8, 4))]
    )
    source = Placed.of(Sharding((8, 4), (2,), (Shard(0),)))
    targets = [Placed.of(Sharding(shape, (1,), (Replicate(),)), (2,)) for shape in both.outputs]
    exchange = Exchange(both, (source,), tuple(targets))
    assert exchange.received_by(2) == 32
    assert exchange.part(2).receives == (16, 16)


def test_several_exchanges_are_one():
    turn = relation_of("torch.flip", (8, 4), (0,))
    source = Placed.of(Sharding((8, 4), (2,), (Shard(0),)))
    target = Placed.of(Sharding((8, 4), (2,), (Shard(1),)), (1, 2))
    one = Exchange(turn, (source,), (target,))
    other = Exchange(Relation.same((8, 4)), (source,), (target,))
    bundle = Bundle((Item(one, 1), Item(other, 1)))
    parts = {rank: bundle.part(rank) for rank in bundle.ranks}
    given = numbered([(8, 4), (8, 4)])
    for k, wanted in enumerate((given[0].flip(0), given[1])):
        # of one alone, the places of the other's elements stay empty
        alone = {
            rank: replace(part.parts[k], sends=part.sends, receives=part.receives, peers=part.peers)
            for rank, part in parts.items()
        }
        operands = [{rank: local_of(source, rank, given[k]) for rank in parts}]
        (result,) = carried_out(alone, operands, (), 1, is_whole=False)
        assert all(result[rank] == (local_of(target, rank, wanted) or {}) for rank in parts)
    assert bundle.received_by(2) == 2 * one.received_by(2)
    assert sum(parts[2].receives) == bundle.received_by(2)


def test_cost_does_not_grow_with_elements():
    fused = relation_of("torch.cat", [(4096, 4096), (1024, 4096), (1024, 4096)], 0)
    shards = [Placed.of(Sharding(shape, (8,), (Shard(0),))) for shape in fused.inputs]
    target = Placed.of(Sharding((6144, 4096), (4,), (Shard(1),)), range(8, 12))
    exchange = Exchange(fused, tuple(shards), (target,))
    part = exchange.part(9)
    assert sum(part.receives) == 6144 * 1024
    assert len(part.unpacks[0]) <= 8 * 3


def test_a_rank_of_no_mesh_has_no_part():
    source = Placed.of(Sharding((4,), (2,), (Shard(0),)))
    target = Placed(source.shape, Mesh((2,), (2, 3)), source.chains)
    exchange = Exchange(Relation.same((4,)), (source,), (target,))
    part = exchange.part(7)
    assert part.peers == () and part.target_shapes == (None,) and 7 not in exchange
    assert exchange.ranks == (0, 1, 2, 3) and exchange.most_peers == 1 and not exchange.is_free
