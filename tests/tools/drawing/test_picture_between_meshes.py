"""Pictures of a tensor's way from one mesh to another, by rank number, against counting it out."""

import random
from math import prod

import numpy as np
import pytest
from enumeration import cuts_on, devices, held
from reading_pictures import devices_of, holders

from cute_sharding import draw
from cute_sharding.exchange import Exchange, Mesh, Placed, identity
from cute_sharding.exchange.meshes import plan_exchange
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding, parse_placements
from cute_sharding.tools.drawing.picture import GAP
from cute_sharding.tools.inputs import planned


def between(source, mesh, target, other):
    """The exchange, also where the meshes are one."""
    return plan_exchange(Placed.of(source, mesh.ranks), Placed.of(target, other.ranks))


def drawn_side(rng, shape, world=10):
    """Some sharding of a tensor, on some ranks in some order; and the flat indices of each."""
    sizes = rng.choice(((1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 4)))
    start = rng.randrange(world - prod(sizes) + 1)
    in_a_row = range(start, start + prod(sizes))
    ranks = in_a_row if rng.random() < 0.5 else rng.sample(range(world), prod(sizes))
    cuts = [rng.choice(cuts_on(shape)) for _ in sizes]
    placements = tuple(Replicate() if cut is None else Shard(*cut) for cut in cuts)
    held_by = {
        rank: {*map(int, held(shape, sizes, cuts, device).reshape(-1))}
        for rank, device in zip(ranks, devices(sizes))
    }
    return Sharding(shape, sizes, placements), Mesh(sizes, ranks), held_by


def amounts_of(section):
    """By sender and receiver, as it is drawn; whether it is in brackets."""
    (panel,) = section.panels
    assert (panel.row_axis, panel.column_axis) == ("sender", "receiver")
    found = {}
    for i, cells in zip(panel.rows, panel.cells, strict=True):
        for j, cell in zip(panel.columns, cells, strict=True):
            if GAP in (i, j):
                assert cell.label == GAP
                continue
            assert cell.label.startswith("(") == (i == j and cell.label != "")
            found[int(i), int(j)] = int(cell.label.strip("(.)") or 0)
    return found


SHAPES = ((4, 6), (5, 7), (12,), (3, 2, 4), (1, 8), ())


@pytest.mark.parametrize("seed", range(15))
def test_each_rank_receives_what_it_needs_and_has_not(seed):
    rng = random.Random(seed)
    for _ in range(15):
        shape = rng.choice(SHAPES)
        (source, mesh, has), (target, other, needs) = (drawn_side(rng, shape) for _ in range(2))
        plan = between(source, mesh, target, other)
        picture = draw(plan)
        assert len(picture.sections) == 3
        amounts = amounts_of(picture.sections[2])
        senders, receivers = ({ranks[k] for ranks in amounts} for k in (0, 1))
        assert (senders, receivers) == ({*mesh.ranks}, {*other.ranks})
        for receiver in receivers:
            got = sum(amounts[sender, receiver] for sender in senders - {receiver})
            assert got == len(needs[receiver] - has.get(receiver, set())), (source, target)
            for sender in senders:
                common = has[sender] & needs[receiver]
                if sender == receiver:
                    assert amounts[sender, receiver] == len(common)
                assert amounts[sender, receiver] <= len(common)
        exchange = amounts_of(draw(plan.exchange).sections[2])
        assert exchange == amounts


@pytest.mark.parametrize("seed", range(10))
def test_cells_name_the_ranks_that_hold_them(seed):
    rng = random.Random(seed)
    for _ in range(15):
        shape = rng.choice(SHAPES)
        sharding, mesh, has = drawn_side(rng, shape)
        names = ("dp", "tp")[: len(mesh.sizes)]
        picture = draw(Placed.of(sharding, mesh.ranks), names=names)
        meant = devices_of(picture, mesh.sizes, names)
        drawn = holders(picture.sections[0], meant, len(shape))
        assert len(drawn) == prod(shape)
        for element, places in drawn.items():
            flat = int(np.ravel_multi_index(element, shape)) if shape else 0
            assert {mesh.ranks[k] for k in places} == {r for r, of in has.items() if flat in of}
        for key in picture.legend:  # in its labels and in words, where they are not too many
            said = {int(n) for n in key.label.split(",") if n.isdigit()}
            assert said <= {mesh.ranks[k] for k in meant[key.label]}
            assert key.text.startswith("rank")


def test_the_picture_in_words():
    source = Sharding((4, 6), (2,), (Shard(0),))
    plan = between(source, Mesh((2,), (0, 1)), *by("S(1)", (3,), (1, 2, 3)))
    picture = draw(plan.named(("dp",), ("gen",)))
    assert picture.text(90).splitlines() == [
        "(4, 6): [S(0)] on mesh (dp=2) of ranks 0, 1 -> [S(1)] on mesh (gen=3) of ranks 1 to 3",
        "",
        "before: [S(0)] on mesh (dp=2) of ranks 0, 1",
        "",
        "down: dim 0 (4), on dp",
        "across: dim 1 (6)",
        "   0  1  2  3  4  5",
        "0  0  0  0  0  0  0",
        "1  0  0  0  0  0  0",
        "2  1  1  1  1  1  1",
        "3  1  1  1  1  1  1",
        "",
        "after: [S(1)] on mesh (gen=3) of ranks 1 to 3    step 1: exchange between meshes",
        "",
        "down: dim 0 (4)                                  down: sender",
        "across: dim 1 (6), on gen                        across: receiver",
        "   0  1  2  3  4  5                                  1    2    3",
        "0  1  1  2  2  3  3                              0   4    4    4",
        "1  1  1  2  2  3  3                              1  (4)   4    4",
        "2  1  1  2  2  3  3                              the busiest rank receives 8 elements; a",
        "3  1  1  2  2  3  3                              rank has at most 3 peers",
        "                                                 in brackets: what a rank keeps",
        "",
        " 0  rank 0 (dp=0): before, holds (2, 6)",
        " 1  rank 1 (dp=1): before, holds (2, 6)",
        " 1  rank 1 (gen=0): after, holds (4, 2)",
        " 2  rank 2 (gen=1): after, holds (4, 2)",
        " 3  rank 3 (gen=2): after, holds (4, 2)",
        "",
        "in all 1 collective: the busiest rank receives 8 elements; it needs 8 that it does not",
        "hold",
    ]
    colours = [key.device for key in picture.legend]
    assert colours == [0, 1, 1, 2, 3]  # one for each rank, on either mesh


def by(text, sizes, ranks, shape=(4, 6)):
    return Sharding(shape, sizes, parse_placements(text)), Mesh(sizes, ranks)


def test_what_is_pending_is_finished_on_its_own_mesh():
    source = Sharding((8, 6), (2, 2), (Partial(), Shard(1)))
    plan = planned(source, Mesh((2, 2), (4, 6, 5, 7)), *by("S(0)", (2,), (6, 9), (8, 6)))
    picture = draw(plan)
    before, after, reduced, exchanged = picture.sections
    assert before.title == ("before: [P(sum), S(1)] on mesh (mesh0=2, mesh1=2) of ranks 4, 6, 5, 7")
    assert before.panels[0].cells[0][0].label == "4+5"
    assert reduced.title == "step 1: reduce-scatter (sum) on mesh0"
    assert reduced.panels[0].rows == ("4", "6", "5", "7")
    assert amounts_of(reduced)[4, 5] == 12 and amounts_of(reduced)[4, 6] == 0
    assert exchanged.title == "step 2: exchange between meshes"
    assert sum(n for (i, j), n in amounts_of(exchanged).items() if i != j) == 36
    assert picture.captions[-1] == "in all 2 collectives: the busiest rank receives 36 elements"


def test_nothing_to_send():
    line, square = by("S(0)", (4,), range(4)), by("S(0), S(0)", (2, 2), range(4))
    picture = draw(between(*line, *square))
    assert picture.sections[2].title == "step 1: relabel"
    said = "every rank has what it needs: nothing is sent"
    assert picture.sections[2].captions == (said, "in brackets: what a rank keeps")
    assert picture.captions == ("nothing is sent",)


def test_a_sharding_to_a_mesh():
    sharding = Sharding((4, 6), (2,), (Shard(0),))
    far = Mesh((3,), (5, 6, 7))
    plan = between(sharding, Mesh((2,), range(2)), *by("S(1)", (3,), (5, 6, 7)))
    assert draw(sharding, to="S(1)", mesh=far) == draw(plan)
    assert draw(sharding, to=by("S(1)", (3,), range(3))[0], mesh=far) == draw(plan)
    assert "of ranks 0 to 2" in draw(sharding, to="S(1)", mesh=(3,)).title
    same = draw(sharding, to="S(1)", mesh=2)
    assert same.sections[2].title == "step 1: all-to-all on mesh0" and "rank 1" in str(same)


def test_a_relation_of_two_operands():
    """Two tensors on two meshes are joined on a third."""
    move = BY_OP["torch.cat"].move([(2, 6), (2, 6)], 0)
    sources = tuple(
        Placed.of(Sharding((2, 6), (2,), (Shard(1),)), ranks) for ranks in ((0, 1), (4, 5))
    )
    target = Placed.of(Sharding((4, 6), (2,), (Shard(0),)), (1, 7))
    picture = draw(Exchange(move, sources, (target,)))
    assert [section.title.partition(":")[0] for section in picture.sections] == [
        *("before, 0", "before, 1", "after", "exchange")
    ]
    assert "(2, 6): [S(1)] on mesh (mesh0=2) of ranks 0, 1 and (2, 6): " in picture.title
    assert {pair: n for pair, n in amounts_of(picture.sections[3]).items() if n} == {
        **{(0, 1): 6, (1, 1): 6, (4, 7): 6, (5, 7): 6}
    }


@pytest.mark.parametrize(
    "one, two",
    [
        (((64, 8), "S(0),S(1)", range(512)), ((128, 8), "S(1),R", range(512, 1536))),
        (((2048,), "S(0)", range(2048)), ((2048,), "S(1)", range(2048))),
        (((16, 16), "S(0),R", range(256)), ((300,), "S(0)", range(1000, 1300))),
        (((512,), "S(0)", range(511, -1, -1)), ((512,), "S(0)", range(512))),
    ],
)
def test_a_picture_of_many_ranks_is_small(one, two, monkeypatch):
    looked_at = []
    part, amount = Exchange.part, Exchange.amount
    for name, method in (("part", part), ("amount", amount)):
        monkeypatch.setattr(
            Exchange, name, lambda *of, method=method: looked_at.append(of) or method(*of)
        )
    shape = (1 << 20, 1 << 14)
    plan = between(
        *(side for sizes, text, ranks in (one, two) for side in by(text, sizes, ranks, shape))
    )
    picture = draw(plan)
    assert len(looked_at) <= 16 * 16 + 16
    (panel,) = picture.sections[-1].panels
    assert len(panel.rows) == len(panel.columns) == 17
    senders, receivers = len(one[2]), len(two[2])
    assert picture.sections[-1].captions[-2:] == (
        f"16 of {senders} ranks that send are shown; the others are left out",
        f"16 of {receivers} ranks that receive are shown; the others are left out",
    )
    # What is shown are ranks that have to do with one another.
    assert sum(cell.label not in (".", "", GAP) for row in panel.cells for cell in row) >= 2
    exchange = plan.exchange
    for (sender, receiver), n in amounts_of_large(panel).items():
        assert n == (exchange.amount(sender, receiver) > 0)


def amounts_of_large(panel):
    return {
        (int(i), int(j)): cell.label not in (".", "")
        for i, cells in zip(panel.rows, panel.cells)
        for j, cell in zip(panel.columns, cells)
        if GAP not in (i, j)
    }


def test_ranks_left_out_of_the_legend():
    shuffled = random.Random(0).sample(range(64), 64)
    one, two = (Placed.of(by("S(0)", (64,), range(64))[0], r) for r in (range(64, 128), shuffled))
    for placed in (one, two):
        (said,) = draw(placed).captions
        assert said.startswith("of 64 sets of ranks that hold the same, the first 15 and the last")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda plan, of: draw(plan, to="R"), "to= is for Sharding, DTensor"),
        (lambda plan, of: draw(plan.exchange, view=(24,)), "not for a Exchange"),
        (lambda plan, of: draw(plan, names=("dp",)), "not for a ExchangePlan: leave out names="),
        (lambda plan, of: draw(of, mesh=(3,)), "mesh= needs to="),
        (lambda plan, of: draw(of, view=(24,), mesh=(3,)), "mesh= needs to="),
        (lambda plan, of: draw(of, to="R", view=(24,), mesh=(3,)), "a picture shows only one"),
        (lambda plan, of: draw(of, to="P", mesh=(3,)), "a plan cannot create a Partial"),
        (lambda plan, of: draw(of, to="R, R", mesh=(3,)), "[R, R] has 2: "),
        (lambda plan, of: draw(of, to=of, mesh=(3,)), "give a mesh with the sizes (2,)"),
        (lambda plan, of: draw(plan.source, shape=(4, 6)), "shape= is for Layout, not for"),
    ],
)
def test_arguments_that_do_not_fit(make, message):
    of = Sharding((4, 6), (2,), (Shard(0),))
    plan = plan_exchange(Placed.of(of), Placed.of(of, (4, 5)))
    with pytest.raises(ValueError) as error:
        make(plan, of)
    assert message in str(error.value)


def test_shardings_of_two_tensors():
    one, other = Sharding((4, 6), (2,), (Shard(0),)), Sharding((4, 8), (2,), (Shard(0),))
    with pytest.raises(ValueError, match="must have the same shape"):
        draw(one, to=other, mesh=Mesh((2,), (4, 5)))
    mixed = Sharding((4, 6), (2, 2), (Partial("sum"), Partial("max")))
    with pytest.raises(ValueError, match="use one reduction for all Partial"):
        draw(mixed, to="R", mesh=Mesh((2,), (4, 5)))


def test_the_identity_is_drawn_as_a_redistribution():
    of = Placed.of(Sharding((4, 6), (2,), (Shard(0),)))
    title = draw(Exchange(identity((4, 6)), (of,), (of,))).title
    assert title == ("(4, 6) on mesh (mesh0=2) of ranks 0, 1: [S(0)] -> [S(0)]")
