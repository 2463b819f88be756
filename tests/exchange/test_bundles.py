"""The exchanges of many tensors in one, carried out byte by byte on lists, beside enumeration."""

import random
from itertools import product

import pytest
from test_any_meshes import drawn_pair, drawn_ranks, drawn_sharding, elements, locals_of, once, put

import cute_sharding.exchange.bundle as bundles
from cute_sharding.exchange import Bundle, Exchange, Item, Placed, identity
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Replicate, Shard, Sharding


def drawn_bundle(seed):
    """Tensors on a few meshes; some of them are alike."""
    draw = random.Random(seed)
    pairs = [drawn_pair(seed * 100 + k) for k in range(draw.randint(1, 3))]
    pairs += draw.choices(pairs, k=draw.randint(0, 3))
    return Bundle(
        tuple(
            Item(
                Exchange(identity(one.shape), (one,), (other,)),
                draw.choice([1, 1, 2, 4, 8, 16]),
                draw.choice([(True, True), (True, True), (True, False), (False, True)]),
            )
            for one, other in pairs
        )
    )


def carried_out(bundle, given, room):
    """What each rank has of each item, by its local vectors: elements travel as the bytes
    (value, which byte).
    """
    parts = {rank: bundle.part(rank, room) for rank in bundle.ranks}
    buffers = {rank: packed(bundle, part, given, rank) for rank, part in parts.items()}
    results = {}
    for rank, part in parts.items():
        got = []
        for peer, count in zip(part.peers, part.receives):
            at = parts[peer].peers.index(rank)
            assert parts[peer].sends[at] == count
            start = sum(parts[peer].sends[:at])
            message = buffers[peer][start : start + count]
            assert not count or message[:room] == [None] * room
            got += message
        for i, (item, mine) in enumerate(zip(bundle.items, part.parts)):
            values = alone(bundle, parts, given, i, rank)
            for _, _, copies in mine.own:
                for copy in copies:
                    put(copy, given[i][rank].__getitem__, once(values))
            for copy in mine.unpacks[0]:
                put(copy, lambda x: whole(got, x[0], item.itemsize), once(values))
            results[i, rank] = values
    return results


def alone(bundle, parts, given, i, rank):
    """What a rank is sent of an item in messages by themselves."""
    values, item = {}, bundle.items[i]
    (one,), (other,) = item.exchange.sources, item.exchange.targets
    for single in parts[rank].alone[i].taken:
        (sent,) = [s for s in parts[single.peer].alone[i].sent if s.peer == rank]
        assert (sent.size, sent.is_run) == (single.size, single.is_run)
        assert single.start is not None or sent.start is not None
        assert single.size * item.itemsize >= bundles.LONG
        message = {}
        for copy in sent.copies:
            put(copy, given[i][single.peer].__getitem__, once(message))
        flat = [message[at,] for at in range(sent.size)]
        if sent.start is not None:
            run = [*product(*map(range, one.local_shape(single.peer)))][sent.start :][: sent.size]
            assert flat == [given[i][single.peer][at] for at in run]
        for copy in single.copies:
            put(copy, lambda x: flat[x[0]], once(values))
        if single.start is not None:
            run = [*product(*map(range, other.local_shape(rank)))][single.start :][: sent.size]
            assert flat == [values[at] for at in run]
    return values


def packed(bundle, part, given, rank):
    buffer = [None] * sum(part.sends)
    for i, (item, mine) in enumerate(zip(bundle.items, part.parts)):

        def write(y, value, width=item.itemsize):
            for k in range(width):
                assert buffer[y[0] * width + k] is None, "a byte is written twice"
                buffer[y[0] * width + k] = value, k

        for copy in mine.packs[0]:
            put(copy, given[i][rank].__getitem__, write)
    return buffer


def whole(buffer, at, width):
    (value, _), *_ = found = buffer[at * width : (at + 1) * width]
    assert found == [(value, k) for k in range(width)]
    return value


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_each_tensor_arrives_whole_and_nothing_else_does(first, monkeypatch):
    for seed in range(first, first + 50):
        monkeypatch.setattr(bundles, "LONG", random.Random(seed).choice([1, 8, 24, 1 << 20]))
        bundle, room = drawn_bundle(seed), random.Random(seed).choice([0, 0, 8])
        sides = [(item.exchange.sources[0], item.exchange.targets[0]) for item in bundle.items]
        given = [{rank: locals_of(one, rank) for rank in bundle.ranks} for one, _ in sides]
        results = carried_out(bundle, given, room)
        for rank in bundle.ranks:
            least = 0
            for i, (one, other) in enumerate(sides):
                assert results[i, rank] == (locals_of(other, rank) or {}), (seed, i, rank)
                needs, has = ({*(elements(placed, rank) or ())} for placed in (other, one))
                least += len(needs - has) * bundle.items[i].itemsize
            assert bundle.received_by(rank) == least
            part = bundle.part(rank, room)
            apart = sum(
                single.size * item.itemsize
                for item, of in zip(bundle.items, part.alone)
                for single in of.taken
            )
            widest = max(item.itemsize for item in bundle.items)
            messages = sum(map(bool, part.receives))
            assert (
                least <= sum(part.receives) + apart <= least + messages * (2 * (widest - 1) + room)
            )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_and_what_is_received_is_what_is_needed(seed):
    for item in drawn_bundle(seed).items:
        for rank in item.exchange.ranks:
            mine = own_part(item.exchange, rank)
            assert mine.kept + size_of(mine.taken) == mine.needed
            assert mine.needed == len(elements(item.exchange.targets[0], rank) or ())


def test_messages_of_one_peer_are_one():
    """As many messages as of one tensor, where all lie alike."""

    def rows_to_columns(shape):
        one, two = (Placed.of(Sharding(shape, (4,), (Shard(d),))) for d in (0, 1))
        return Exchange(identity(shape), (one,), (two,))

    bundle = Bundle(tuple(Item(rows_to_columns((8 * k, 8)), 2) for k in range(1, 20)))
    part = bundle.part(0)
    assert part.peers == (1, 2, 3) and bundle.most_peers == 3
    assert part.sends == part.receives and sum(part.receives) == bundle.received_by(0)
    for mine in part.parts:  # the three messages are turns of one loop
        assert len(mine.packs[0]) == len(mine.unpacks[0]) == 1


def test_widths_stand_in_order_so_that_there_are_no_gaps():
    def halves(n):
        one, two = (
            Placed.of(Sharding((n,), (2,), (Shard(0),))),
            Placed.of(Sharding((n,), (2,), (Replicate(),))),
        )
        return Exchange(identity((n,)), (one,), (two,))

    bundle = Bundle((Item(halves(2), 1), Item(halves(6), 2), Item(halves(2), 16)))
    part = bundle.part(0)
    assert sum(part.receives) == 32 and bundle.received_by(0) == 1 + 6 + 16
    assert [mine.packs[0][0].y for mine in part.parts] == [(22,), (8,), (0,)]


def test_relations_travel_together():
    draw = random.Random(3)
    items = []
    for shift in range(1, 5):
        move = BY_OP["torch.roll"].move((8, 4), shift, 0)
        sides = [drawn_sharding(draw, (8, 4), drawn_ranks(draw)) for _ in range(2)]
        items.append(Item(Exchange(move, (sides[0],), (sides[1],)), 4))
    bundle = Bundle(tuple(items))
    given = [
        {rank: locals_of(item.exchange.sources[0], rank) for rank in bundle.ranks}
        for item in bundle.items
    ]
    results = carried_out(bundle, given, 0)
    for i, item in enumerate(bundle.items):
        for rank in bundle.ranks:
            wanted = locals_of(
                item.exchange.targets[0], rank, lambda at: ((at[0] - (i + 1)) % 8, at[1])
            )
            assert results[i, rank] == (wanted or {})


def test_seals_are_of_all_that_travels():
    bundles = [drawn_bundle(seed) for seed in range(30)]
    seals = {bundle.seal for bundle in bundles}
    assert len(seals) == len(bundles) and all(len(seal) == 8 for seal in seals)
    one = bundles[0]
    other = Bundle(tuple(item._replace(itemsize=item.itemsize * 2) for item in one.items))
    assert one.seal != other.seal
