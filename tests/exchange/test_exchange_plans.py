"""What an exchange between meshes says of itself: as data, as text, and pair by pair."""

import json
import random
from dataclasses import replace

import pytest
from test_any_meshes import drawn_pair, drawn_ranks, drawn_sharding

from cute_sharding.exchange import Exchange, Mesh, Network, Placed, identity
from cute_sharding.exchange.meshes import plan_exchange
from cute_sharding.exchange.placed import ranks_text
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Replicate, Shard, Sharding


def placed(shape, sizes, placements, ranks=None):
    return Placed.of(Sharding(shape, sizes, placements), ranks)


def check_amounts(exchange):
    """Pair by pair, beside the parts of the ranks."""
    world = [*exchange.ranks, max(exchange.ranks) + 1]
    for rank in world:
        part = exchange.part(rank)
        sends = dict(zip(part.peers, part.sends))
        kept = sum(copy_size(copy) for _, _, copies in part.own for copy in copies)
        for other in world:
            wanted = kept if other == rank else sends.get(other, 0)
            assert exchange.amount(rank, other) == wanted, (rank, other)


def copy_size(copy):
    size = 1
    for n in copy.sizes:
        size *= n
    return size


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_what_one_rank_sends_another(first):
    for seed in range(first, first + 100):
        source, target = drawn_pair(seed)
        check_amounts(Exchange(identity(source.shape), (source,), (target,)))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(30))
def test_what_one_rank_sends_another_of_two_operands(seed):
    """Of two tensors that are joined, what both give counts."""
    draw = random.Random(seed)
    shape = (draw.choice([5, 6, 8]), draw.choice([3, 4]))
    move = BY_OP["torch.cat"].move([shape, shape], 0)
    ranks = drawn_ranks(draw)
    sources = tuple(drawn_sharding(draw, shape, ranks) for _ in range(2))
    target = drawn_sharding(draw, move.outputs[0], drawn_ranks(draw))
    check_amounts(Exchange(move, sources, (target,)))


@pytest.mark.parametrize(
    "ranks, text",
    [
        ((3,), "3"),
        ((3, 4), "3, 4"),
        ((3, 4, 5), "3 to 5"),
        (range(2, 9), "2 to 8"),
        (range(9, 5, -1), "9, 8, 7, 6"),
        ((0, 1, 2, 8, 9, 12, 4), "0 to 2, 8, 9, 12, 4"),
        (range(0, 1000, 3), "0, 3, 6, 9, 12, 15, 18, 21, .., 999"),
    ],
)
def test_ranks_in_words(ranks, text):
    assert ranks_text(ranks) == ranks_text(tuple(ranks)) == text
    number = "" if len(ranks) == 1 else "s"
    assert str(Mesh((len(ranks),), ranks)) == f"mesh ({len(ranks)},) of rank{number} {text}"


def test_a_mesh_is_its_sizes_and_ranks():
    """Whatever they are given as."""
    for ranks in ((4, 5, 6, 7), [4, 5, 6, 7], range(4, 8)):
        assert Mesh((2, 2), ranks) == Mesh((2, 2), range(4, 8))
        assert hash(Mesh((2, 2), ranks)) == hash(Mesh((2, 2), range(4, 8)))
    for ranks in ((3, 1), [3, 1], range(3, 0, -2)):
        mesh = Mesh((2,), ranks)
        assert mesh == Mesh((2,), (3, 1)) != Mesh((2,), (1, 3))
        assert [mesh.coordinates(rank) for rank in range(4)] == [None, (1,), None, (0,)]
        assert [mesh.rank((k,)) for k in range(2)] == [3, 1]
    with pytest.raises(ValueError, match="must not repeat a rank"):
        Mesh((3,), [4, 5, 4])


PENDING = ((0, "sum"),)


def pending_plan(ranks=(9, 4, 5)):
    """A sum of two, on ranks 0 and 1, for each of which tp has half of the columns on two."""
    source = placed((8, 8), (2, 2), (Replicate(), Shard(1)))
    target = placed((8, 8), (len(ranks),), (Shard(0),), ranks)
    return plan_exchange(replace(source, pending=PENDING), target, Network.default((2, 2)))


def test_the_plan_is_plain_data():
    plan = pending_plan().named(("dp", "tp"), ("gen",))
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["source_mesh"] == {"sizes": [2, 2], "names": ["dp", "tp"], "ranks": [0, 1, 2, 3]}
    assert data["target_mesh"] == {"sizes": [3], "names": ["gen"], "ranks": [9, 4, 5]}
    reduced, exchanged = data["steps"]
    assert {*reduced} | {"most_peers"} == {*exchanged}
    assert (reduced["kind"], reduced["mesh_dims"]) == ("reduce-scatter (sum)", ["dp"])
    assert reduced["source_layout"] == "((2,2),(8,4)):((0,4),(8,1))"
    assert (exchanged["kind"], exchanged["mesh_dims"]) == ("exchange between meshes", [])
    assert exchanged["source_layout"] == reduced["target_layout"]
    assert exchanged["target_layout"] is None  # 8 rows on 3 ranks
    assert data["received_elements"] == 16 + 24 and data["lower_bound"] is None
    assert data["seconds"] == pytest.approx(sum(step["seconds"] for step in data["steps"]))
    by_number = pending_plan().to_dict()
    assert by_number["steps"][0]["mesh_dims"] == [0] and by_number["source_mesh"]["names"] is None


def test_the_plan_as_text():
    assert str(pending_plan().named(("dp", "tp"), ("gen",))).splitlines() == [
        "reduce-scatter (sum) on mesh dims dp: receives 16 elements, 3e-06 s",
        "  ((2,2),(8,4)):((0,4),(8,1)) -> ((2,2),(4,4)):((32,4),(8,1))",
        "exchange between meshes, mesh (dp=2, tp=2) of ranks 0 to 3 -> mesh (gen=3) of ranks 9, 4, "
        "5: receives 24 elements, 9e-06 s",
        "  [S(0), S(1)] -> [S(0)]",
        "  at most 4 peers a rank",
        "in all: 2 collectives, 40 elements of 4 bytes received, at most 80 held, 1.2e-05 s",
    ]


def test_the_plan_of_what_stays_where_it_is():
    line, square = (placed((8, 4), sizes, (Shard(0),) * len(sizes)) for sizes in ((4,), (2, 2)))
    assert str(plan_exchange(line, square)).splitlines() == [
        "relabel, mesh (4,) of ranks 0 to 3 -> mesh (2, 2) of ranks 0 to 3: receives 0 elements, "
        "0 s",
        "  ((4,),(2,4)):((8,),(4,1)) -> ((2,2),(2,4)):((16,8),(4,1))",
        "in all: 0 collectives, 0 elements of 4 bytes received, at most 16 held, 0 s",
    ]


def test_what_is_pending_stays_while_the_exchange_runs():
    plan = pending_plan((8, 9))
    source, target = 32, 32  # of a rank; a target's ranks hold nothing before, and receive it all
    assert plan.crossing.peak_elements == target + target
    assert plan.peak_elements == source + target + target > plan.steps[0].peak_elements
    alone = plan_exchange(plan.source, plan.target)
    assert alone.peak_elements == plan.crossing.peak_elements


def test_names_are_one_for_each_mesh_dim():
    with pytest.raises(
        ValueError, match=r"mesh_names=\('dp',\) does not fit the mesh \(2, 2\) of ranks 0"
    ):
        pending_plan().named(("dp",))
    with pytest.raises(
        ValueError, match=r"target_names=\('a', 'b'\) does not fit the mesh \(3,\) of"
    ):
        pending_plan().named(None, ("a", "b"))
