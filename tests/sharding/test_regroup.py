"""The same devices under another mesh, device by device, against the reference."""

from itertools import product

import pytest
from enumeration import devices, held

from cute_sharding.sharding.sharding import regrouped

MESHES = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
CUTS = [None, (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


def all_hold(shape, mesh, cuts):
    return [held(shape, mesh, cuts, device).tolist() for device in devices(mesh)]


@pytest.mark.parametrize("shape", [(24, 8), (6, 4), (7, 2), (0, 8)])
@pytest.mark.parametrize("count", MESHES)
def test_every_device_holds_what_it_held(shape, count):
    answered = 0
    for mesh, other in product(MESHES[count], repeat=2):
        for cuts in product(CUTS, repeat=len(mesh)):
            found = regrouped(shape, cuts, mesh, other)
            if found is not None:
                answered += 1
                assert all_hold(shape, mesh, cuts) == all_hold(shape, other, found), (mesh, cuts)
    assert answered


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_of_even_blocks_no_answer_is_left_out(count):
    """Where it has none, no cuts of these kinds are one."""
    shape = (24, 8)
    for mesh, other in product(MESHES[count], repeat=2):
        for cuts in product(CUTS[:4], repeat=len(mesh)):
            if regrouped(shape, cuts, mesh, other) is None and divides(shape, mesh, cuts):
                holding = all_hold(shape, mesh, cuts)
                for others in product(CUTS[:4], repeat=len(other)):
                    assert all_hold(shape, other, others) != holding, (mesh, cuts, other, others)


def divides(shape, mesh, cuts):
    rows = list(shape)
    for cut, n in zip(cuts, mesh, strict=True):
        if cut is not None:
            if rows[cut[0]] % (cut[1] * n):
                return False
            rows[cut[0]] //= n
    return True


def test_what_is_pending_is_pending_on_all():
    assert regrouped((4,), ("sum",), (4,), (2, 2)) == ("sum", "sum")
    assert regrouped((4,), ("avg", "avg", None), (2, 2, 3), (4, 3)) == ("avg", None)
    assert regrouped((4,), ("sum", "max"), (2, 2), (4,)) is None
    assert regrouped((4,), ("sum", None), (2, 2), (4,)) is None


def test_sizes_that_have_no_common_refinement():
    assert regrouped((24,), ((0, 1), (0, 1)), (4, 6), (6, 4)) == ((0, 1), (0, 1))
    assert regrouped((24,), ((0, 1), None), (4, 6), (6, 4)) is None
    assert regrouped((24,), (None,), (4,), (2,)) is None
