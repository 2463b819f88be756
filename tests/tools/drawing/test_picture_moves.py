"""The matrices of a redistribution: who sends how much to whom, against counting it out."""

import random

import pytest
from enumeration import cuts_on, devices, held

from cute_sharding import draw
from cute_sharding.exchange import Mesh
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding, parse_placements
from cute_sharding.tools.drawing.pictures import amount_text
from cute_sharding.tools.inputs import planned


def placements_of(cuts):
    return tuple(Replicate() if cut is None else Shard(*cut) for cut in cuts)


def matrix_of(section):
    (panel,) = section.panels
    return [
        [int(cell.label.strip("()") or 0) if cell.label != "." else 0 for cell in row]
        for row in panel.cells
    ]


@pytest.mark.parametrize("seed", range(15))
def test_each_receives_what_it_needs_and_has_not(seed):
    rng = random.Random(seed)
    checked = 0
    for _ in range(15):
        shape = rng.choice(((4, 6), (5, 7), (12,), (3, 2, 4), (1, 8), ()))
        mesh = rng.choice(((2,), (3,), (2, 2), (4, 2)))
        before, after = (tuple(rng.choice(cuts_on(shape)) for _ in mesh) for _ in range(2))
        source = Sharding(shape, mesh, placements_of(before))
        target = Sharding(shape, mesh, placements_of(after))
        steps = planned(source, Mesh.numbered(mesh), target, Mesh.numbered(mesh)).steps
        picture = draw(source, to=target)
        assert len(picture.sections) == 2 + len(steps)
        if len(steps) != 1:
            continue
        matrix = matrix_of(picture.sections[2])
        everywhere = devices(mesh)
        has, needs = (
            [{*map(int, held(shape, mesh, cuts, device).reshape(-1))} for device in everywhere]
            for cuts in (before, after)
        )
        for j in range(len(everywhere)):
            sent = [matrix[i][j] for i in range(len(everywhere)) if i != j]
            assert sum(sent) == len(needs[j] - has[j]), f"{source} -> {target}"
            assert matrix[j][j] == len(needs[j] & has[j])
            for i in range(len(everywhere)):
                assert matrix[i][j] <= len(has[i] & needs[j])
        received = [sum(column) - column[j] for j, column in enumerate(zip(*matrix))]
        assert steps[0].received_elements == max(received)
        checked += 1
    assert checked >= 2


def test_an_all_to_all():
    picture = draw(Sharding((4, 6), (3,), (Shard(0),)), to="S(1)")
    assert matrix_of(picture.sections[2]) == [[4, 4, 4], [4, 4, 4], [0, 0, 0]]
    assert picture.sections[2].title == "step 1: all-to-all on mesh0"
    assert picture.captions[-1] == (
        "in all 1 collective: the busiest rank receives 8 elements; it needs 8 that it does not "
        "hold"
    )


@pytest.mark.parametrize(
    "target, row, kind",
    [("S(0)", [2, 2, 2, 2], "reduce-scatter (sum)"), ("R", [8, 4, 4, 4], "all-reduce (sum)")],
)
def test_reductions(target, row, kind):
    picture = draw(Sharding((8,), (4,), (Partial(),)), to=target)
    (section,) = picture.sections[2:]
    assert section.title == f"step 1: {kind} on mesh0"
    assert matrix_of(section)[0] == row
    ends = (Sharding((8,), (4,), p) for p in ((Partial(),), parse_placements(target)))
    plan = planned(next(ends), Mesh.numbered((4,)), next(ends), Mesh.numbered((4,)))
    assert plan.received_elements == sum(row[1:])


def test_nothing_to_send():
    picture = draw(Sharding((8, 4), (2,), (Replicate(),)), to="S(0)")
    assert picture.sections[2].title == "step 1: local slice"
    assert picture.sections[2].captions[0] == "every rank has what it needs: nothing is sent"
    assert picture.captions[-1] == "nothing is sent"
    same = draw(Sharding((8, 4), (2,), (Shard(0),)), to="S(0)")
    assert len(same.sections) == 2 and same.captions[-1] == "nothing is sent"


def test_a_reduction_that_stays_pending():
    picture = draw(Sharding((8, 4), (2, 2), (Partial(), Shard(0))), to="P(sum),S(1)")
    assert [section.title for section in picture.sections] == [
        "before: [P(sum), S(0)]",
        "after: [P(sum), S(1)]",
        "step 1: all-to-all on mesh1",
    ]
    assert picture.sections[1].panels[0].cells[0][0].label == "0+2"


def test_amounts_are_short():
    numbers = (0, 99_999, 100_000, 999_499, 999_500, 123_456_789, 10**12, 10**30)
    texts = ["0", "99999", "100k", "999k", "1M", "123M", "1T", "1e+12E"]
    assert [amount_text(n) for n in numbers] == texts
