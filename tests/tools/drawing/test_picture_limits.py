"""However large tensor and mesh: a picture is small, takes as long, and says what it leaves out."""

import pytest

from cute_sharding import draw
from cute_sharding.layout import Layout
from cute_sharding.sharding import Sharding, parse_placements
from cute_sharding.tools.drawing import holding

LARGE = [
    ((1 << 40, 1 << 40), (1 << 10, 1 << 10), "S(0),S(1)"),
    ((10**12 + 7, 10**9 + 1), (1009, 64), "S(0),S(0)"),
    ((10**9,), (8,), "_S(0,100000)"),
    ((10**9,), (100_000,), "S(0)"),
    ((4096,) * 6, (8, 8, 8), "S(0),S(2),S(5)"),
    ((4096,) * 6, (100, 100), "R,P"),
    ((1 << 30, 16), (1 << 20,), "R"),
]


def cells_of(picture):
    return sum(
        len(row) for section in picture.sections for panel in section.panels for row in panel.cells
    )


@pytest.mark.parametrize("shape, mesh, placements", LARGE)
def test_a_large_picture_is_small(shape, mesh, placements, monkeypatch):
    looked_at = []
    run_at = holding.run_at
    monkeypatch.setattr(holding, "run_at", lambda *of: looked_at.append(of) or run_at(*of))
    picture = draw(Sharding(shape, mesh, parse_placements(placements)))
    assert cells_of(picture) <= holding.ROWS * holding.COLUMNS * 2
    assert len(picture.sections[0].panels) <= holding.PANELS
    assert len(picture.legend) <= holding.KEYS
    assert len(looked_at) <= 200
    assert len(picture.text().splitlines()) < 120


def test_what_is_left_out_is_named():
    picture = draw(Sharding((4096, 64), (512,), parse_placements("S(0)")))
    assert picture.sections[0].captions == ("dim 0: rows 112 to 4087 of 4096 go on alike",)
    assert picture.captions == (
        "of 512 sets of ranks that hold the same, the first 15 and the last are in the legend; the "
        "others are left out",
    )
    # 4095 rows on 512 devices: the last has fewer, so it is not said that all go on alike.
    uneven = draw(Sharding((4095, 64), (512,), parse_placements("S(0)")))
    assert uneven.sections[0].captions == ("dim 0: rows 112 to 4087 of 4095 are left out",)
    deep = draw(Sharding((64, 64, 2, 2), (32, 32), parse_placements("S(0),S(1)")))
    assert deep.sections[0].captions[-1] == "6 of 9 panels are shown; the others are left out"
    assert "dim 0: rows 4 to 61 of 64 go on alike" in deep.sections[0].captions


def test_what_goes_on_alike_does():
    """The pattern of the runs that are shown, continued, is that of the rows left out."""
    n, cuts = 4096, [(0, 8, 4)]
    shown = holding.runs_shown(n, cuts, 16, singly=True)
    period, length = 4, shown[0].stop
    for row in range(n):
        assert holding.run_at(n, cuts, row).owner == shown[row // length % period].owner


@pytest.mark.parametrize(
    "shape, mesh, source, target",
    [
        ((1 << 30, 1 << 20), (64, 8), "S(0),S(1)", "S(1),S(0)"),
        ((1 << 30, 1 << 20), (512,), "S(0)", "R"),
        ((1 << 30, 1 << 20), (512,), "P", "S(0)"),
        ((1 << 30, 1 << 20), (16, 8, 4), "P,S(0),S(1)", "R,R,R"),
    ],
)
def test_a_matrix_of_many_devices_is_small(shape, mesh, source, target):
    picture = draw(Sharding(shape, mesh, parse_placements(source)), to=target)
    for section in picture.sections[2:]:
        (panel,) = section.panels
        assert len(panel.rows) == len(panel.columns) <= 17
        assert "ranks that receive are shown; the others are left out" in section.captions[-1]
        # What is shown are devices that have to do with one another.
        assert sum(cell.share is not None for row in panel.cells for cell in row) >= 2


def test_ranks_are_left_out_of_a_matrix_only_where_it_says_so():
    for mesh, source, target in (((8, 4), "S(0),S(1)", "S(0),R"), ((32,), "S(0)", "S(1)")):
        picture = draw(Sharding((64, 64), mesh, parse_placements(source)), to=target)
        section = picture.sections[2]
        assert section.panels[0].rows[-3:] == ("14", "..", "31")
        assert (
            section.captions[-1] == "16 of 32 ranks that receive are shown; the others are left out"
        )
    whole = draw(Sharding((64, 64), (16,), parse_placements("S(0)")), to="S(1)").sections[2]
    assert len(whole.panels[0].rows) == 16 and "left out" not in str(whole.captions)


def test_a_large_layout_is_small():
    picture = draw(Layout((1 << 20, (1 << 10, 1 << 10), 1 << 20)))
    assert cells_of(picture) <= holding.ROWS * holding.COLUMNS * 2
    assert picture.sections[0].captions == (
        "mode 0: indices 2 to 1048574 of 1048576 are left out",
        "mode 1: indices 7 to 1048574 of 1048576 are left out",
        "mode 2: indices 15 to 1048574 of 1048576 are left out",
    )
