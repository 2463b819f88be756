"""The cells of a picture say of each element who holds it: against counting it out."""

import random
from math import prod

import numpy as np
import pytest
from enumeration import cuts_on, devices, held, rows_after
from reading_pictures import devices_of, holders

from cute_sharding import draw
from cute_sharding.propagation.views import carry
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding
from cute_sharding.sharding.rows import chains_of
from cute_sharding.tools.drawing.holding import run_at, runs_shown

NAMES = ("dp", "cp", "tp")


def counted(shape, mesh, cuts):
    """Of each element, the devices that hold it."""
    found = {tuple(map(int, index)): set() for index in np.ndindex(*shape)}
    for rank, device in enumerate(devices(mesh)):
        for flat in held(shape, mesh, cuts, device).reshape(-1):
            found[tuple(map(int, np.unravel_index(flat, shape)))].add(rank)
    return found


def placements_of(cuts, pending=()):
    return tuple(
        Shard(*cut) if cut is not None else Partial() if m in pending else Replicate()
        for m, cut in enumerate(cuts)
    )


def drawn_case(rng):
    ndim = rng.randint(0, 4)
    shape = tuple(rng.choice((1, 2, 3, 4, 5, 7, 12)) for _ in range(ndim))
    mesh = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 3)))
    cuts = tuple(rng.choice(cuts_on(shape)) for _ in mesh)
    return shape, mesh, cuts


@pytest.mark.parametrize("seed", range(20))
def test_the_cells_of_small_tensors(seed):
    rng = random.Random(seed)
    complete = 0
    for _ in range(15):
        shape, mesh, cuts = drawn_case(rng)
        pending = {m for m, cut in enumerate(cuts) if cut is None and rng.random() < 0.3}
        sharding = Sharding(shape, mesh, placements_of(cuts, pending))
        names = NAMES[: len(mesh)]
        picture = draw(sharding, names=names)
        expected = counted(shape, mesh, cuts)
        meant = devices_of(picture, mesh, names)
        found = holders(picture.sections[0], meant, len(shape))
        assert found.items() <= expected.items(), f"{sharding}"
        complete += len(found) == len(expected)
    assert complete >= 5


@pytest.mark.parametrize("seed", range(10))
def test_the_run_around_a_row(seed):
    """Whose a row is, and how far that goes, cut after cut."""
    rng = random.Random(seed)
    for _ in range(100):
        n = rng.randint(1, 40)
        cuts = [(m, rng.randint(1, n + 1), rng.randint(1, 4)) for m in range(rng.randint(0, 3))]
        parts = [size for _, _, size in cuts]
        owner = {}
        for device in devices(parts):
            steps = tuple((f, size, c) for (_, f, size), c in zip(cuts, device))
            owner.update(dict.fromkeys(rows_after(n, steps), device))
        for row in range(n):
            found = run_at(n, cuts, row)
            assert found.owner == owner[row]
            inside = range(found.start, found.stop)
            assert row in inside and {owner[r] for r in inside} == {owner[row]}
            for beyond in (found.start - 1, found.stop):
                assert not 0 <= beyond < n or owner[beyond] != owner[row]


def test_runs_cover_the_dim_or_say_what_they_leave_out():
    for n, factor, parts in ((24, 1, 2), (1000, 1, 8), (1000, 250, 2), (999, 7, 5)):
        shown = runs_shown(n, [(0, factor, parts)], 16, singly=True)
        assert len(shown) <= 16
        assert [run.stop for run in shown[:-1]] == [run.start for run in shown[1:]]
        assert (shown[0].start, shown[-1].stop) == (0, n)
    assert [run.owner for run in shown].count(None) == 1  # 35 blocks are more than 16


@pytest.mark.parametrize("seed", range(10))
def test_before_and_after_a_view_devices_hold_the_same(seed):
    rng = random.Random(seed)
    drawn = refused = 0
    while drawn < 8 or not refused:
        shape = rng.choice(((4, 6), (2, 3, 4), (12,), (5, 4), (2, 2, 6), (3, 8)))
        target = rng.choice(((prod(shape),), (2, prod(shape) // 2), (prod(shape) // 4, 2, 2)))
        mesh = rng.choice(((2,), (3,), (2, 2), (2, 3)))
        cuts = tuple(rng.choice(cuts_on(shape)) for _ in mesh)
        if prod(target) != prod(shape):
            continue
        carried = carry(BY_OP["Tensor.view"].view(shape, target), cuts, mesh)
        names = NAMES[: len(mesh)]
        picture = draw(Sharding(shape, mesh, placements_of(cuts)), view=target, names=names)
        if carried.blocked is not None:
            assert "not free" in picture.captions[0]
            refused += 1
        meant = devices_of(picture, mesh, names)
        before, *rest = (
            holders(section, meant, ndim)
            for section, ndim in zip(picture.sections, (len(shape), len(target)))
        )
        assert before == counted(shape, mesh, cuts)
        if carried.blocked is not None and not rest:
            continue  # an output of more cells than are drawn one by one
        (after,) = rest
        flat = {np.ravel_multi_index(i, shape): devices for i, devices in before.items()}
        assert {np.ravel_multi_index(i, target) for i in after} == set(flat)
        assert all(devices == flat[np.ravel_multi_index(i, target)] for i, devices in after.items())
        drawn += 1


def test_a_mesh_dim_of_one_device_cuts_nothing():
    picture = draw(Sharding((4,), (1, 2), (Shard(0), Shard(0))), names=("dp", "tp"))
    assert [cell.label for cell in picture.sections[0].panels[0].cells[0]] == ["0", "0", "1", "1"]
    assert chains_of(((0, 1), (0, 1)), 1, (1, 2)) == (((1, 1),),)
