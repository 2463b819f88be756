"""Who holds what, as boxes, and what two devices hold both: the very elements that counting finds,
in boxes whose number does not grow with the tensor.
"""

import random
from itertools import product

import numpy as np
import pytest
from enumeration import devices, held, rows_of

from cute_sharding.sharding import Box, Partial, Replicate, Shard, Sharding, intersection
from cute_sharding.sharding.boxes import runs_of

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2), (2, 1, 3), (3, 2, 2)]
SHAPES = [(), (0,), (1,), (7,), (12,), (31,), (4, 6), (5, 1), (13, 9), (8, 0), (3, 4, 5), (24, 10)]


def drawn(rng, shape, mesh=None):
    mesh = mesh or rng.choice(MESHES)
    split_factors = [1, 1, 2, 3, 4, rng.randint(1, 9)]
    placements = [
        Shard(rng.randrange(len(shape)), rng.choice(split_factors))
        if shape and rng.random() < 0.8
        else rng.choice([Replicate(), Partial()])
        for _ in mesh
    ]
    return Sharding(shape, mesh, tuple(placements))


def counted(sharding, device):
    return held(sharding.shape, sharding.mesh, sharding.cuts, device)


def indices(runs):
    """What the docstring of Box says of each dim: (global rows, local rows), in that order."""
    found = []
    for run in runs:
        turns = product(*(range(count) for count, _, _ in run.loops))
        steps = [
            tuple(sum(i * loop[side] for i, loop in zip(turn, run.loops)) for side in (1, 2))
            for turn in turns
        ]
        pairs = [(run.x + x + j, run.y + y + j) for x, y in steps for j in range(run.length)]
        found.append(tuple(zip(*pairs)) if pairs else ((), ()))
    return [rows for rows, _ in found], [rows for _, rows in found]


def put_into(local, box, tensor):
    """The elements of a box, one by one, from the global tensor into the local one."""
    theirs, mine = indices(runs_of(box))
    assert (local[np.ix_(*mine)] == -1).all(), "an element is in two boxes"
    local[np.ix_(*mine)] = tensor[np.ix_(*theirs)]


def numbered(shape):
    return np.arange(int(np.prod(shape))).reshape(shape)


def cases(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        yield rng, drawn(rng, rng.choice(SHAPES))


def test_boxes_are_what_a_device_holds():
    uneven = 0
    for _, s in cases(0, 600):
        for device in devices(s.mesh):
            expected = counted(s, device)
            boxes = s.boxes(device)
            local = np.full(expected.shape, -1)
            for box in boxes:
                put_into(local, box, numbered(s.shape))
                assert box.elements == np.prod(box.size) > 0
            assert (local == expected).all(), (str(s), device)
            assert sum(box.elements for box in boxes) == expected.size
            uneven += len(boxes) > 1
    assert uneven > 100


def test_contiguous_boxes_are_slices():
    for _, s in cases(1, 400):
        for device in devices(s.mesh):
            local = np.full(s.local_shape(device), -1)
            for box in s.boxes(device):
                parts = list(box.contiguous())
                assert len(parts) == box.count
                assert [part.is_contiguous for part in parts] == [True] * len(parts)
                assert all(part.size == box.length for part in parts)
                for part in parts:
                    assert (local[part.local_slices] == -1).all()
                    local[part.local_slices] = numbered(s.shape)[part.global_slices]
            assert (local == counted(s, device)).all(), (str(s), device)


def strided(array, view):
    sizes, strides, offset = view
    flat = array.reshape(-1)[offset:]
    return np.lib.stride_tricks.as_strided(flat, sizes, [s * flat.itemsize for s in strides])


def test_a_strided_box_is_a_view_of_either_side():
    """So that a copy of it is one."""
    for _, s in cases(2, 300):
        for device in devices(s.mesh):
            expected = counted(s, device)
            local, full = np.full(expected.shape, -1), numbered(s.shape)
            for box in s.boxes(device):
                mine, theirs = (
                    view([step // a.itemsize for step in a.strides])
                    for view, a in ((box.local_view, local), (box.global_view, full))
                )
                assert mine[0] == theirs[0]
                strided(local, mine)[...] = strided(full, theirs)
            assert (local == expected).all(), (str(s), device)


def test_boxes_of_both():
    """Of shardings on meshes of their own: the elements that both hold, each once, and where."""
    met = strided_ones = 0
    for rng, one in cases(3, 250):
        other = drawn(rng, one.shape)
        for a, b in product(devices(one.mesh), devices(other.mesh)):
            mine, its = counted(one, a), counted(other, b)
            found = np.full(its.shape, -1)
            pairs = intersection(one.boxes(a), other.boxes(b))
            for of_one, of_other in pairs:
                rows, places = indices(runs_of(of_one))
                same_rows, its_places = indices(runs_of(of_other))
                assert rows == same_rows, (str(one), str(other), a, b)
                assert (found[np.ix_(*its_places)] == -1).all(), "an element is in two boxes"
                found[np.ix_(*its_places)] = mine[np.ix_(*places)]
                strided_ones += not of_one.is_contiguous
            expected = np.where(np.isin(its, mine), its, -1)
            assert (found == expected).all(), (str(one), str(other), a, b)
            met += bool(pairs)
    assert met > 500 and strided_ones > 100


def test_boxes_that_a_program_has_of_its_own():
    """As of a checkpoint: with local offsets of its own, also beyond the global ones."""
    rng = random.Random(4)
    for _ in range(300):
        shape = rng.choice([(31,), (13, 9)])
        s = drawn(rng, shape)
        start = tuple(rng.randrange(n) for n in shape)
        size = tuple(rng.randint(0, n - at) for n, at in zip(shape, start))
        shift = tuple(rng.choice([0, 5, 100]) for _ in shape)
        chunk = Box(start, size, shift)
        for device in devices(s.mesh):
            rows = rows_of(s.shape, s.mesh, s.cuts, device)
            expected = [
                [(row, at, row - a + up) for at, row in enumerate(r) if a <= row < a + n]
                for r, a, n, up in zip(rows, start, size, shift)
            ]
            found = []
            for a, b in intersection(s.boxes(device), chunk):
                (theirs, mine), (again, chunks) = indices(runs_of(a)), indices(runs_of(b))
                assert theirs == again
                found += product(*(zip(*columns) for columns in zip(theirs, mine, chunks)))
            assert sorted(found) == list(product(*expected)), (str(s), device, chunk)
            assert intersection(chunk, s.boxes(device)) == tuple(
                [(b, a) for a, b in intersection(s.boxes(device), [chunk])]
            ) or any(not part.is_contiguous for part in s.boxes(device))


# -- cost: counted in boxes, so that it does not depend on the machine -----------------------------


@pytest.mark.parametrize(
    "rows, placements, most",
    [
        (2**40, (Shard(0), Shard(0)), 1),
        (2**40, (Shard(0, 2**20), Shard(0)), 1),
        (2**40, (Shard(0, 2**10), Shard(0, 2**9)), 2),
        (10**12, (Shard(0, 30), Shard(0)), 2),
        (10**12 + 7, (Shard(0, 1000), Shard(0, 7)), 12),
        (10**12 + 7, (Shard(0, 7), Shard(0, 1000)), 6),
    ],
)
def test_few_boxes_of_a_huge_tensor(rows, placements, most):
    """On 131,072 devices."""
    s = Sharding((rows, 4), (512, 256), placements)
    other = Sharding((rows, 4), (8, 4), (Shard(0, 2**7), Shard(1)))
    for device in ((0, 0), (5, 17), (511, 255)):
        found = s.boxes(device)
        assert 0 < len(found) <= most
        assert sum(box.elements for box in found) == np.prod(s.local_shape(device))
        both = [intersection(found, other.boxes((k, 1))) for k in range(8)]
        assert all(len(pairs) <= 4 * most for pairs in both)
        met = sum(box.elements for pairs in both for box, _ in pairs)
        assert met == sum(box.elements for box in found) // 4


def test_no_box_of_billions_is_counted_out():
    (box,) = Sharding((2**40,), (2,), (Shard(0, 2**30),)).boxes((1,))
    assert box.count == 2**30
    first = next(iter(box.contiguous()))
    assert (first.global_offset, first.size, first.local_offset) == ((512,), (512,), (0,))


# -- edges -----------------------------------------------------------------------------------------


def test_scalars_and_nothing():
    assert Sharding((), (2,), (Replicate(),)).boxes((1,)) == (Box((), (), ()),)
    assert list(Box((), (), ()).contiguous()) == [Box((), (), ())]
    assert Box((), (), ()).local_slices == () and Box((), (), ()).local_view(()) == ((), (), 0)
    assert intersection(Box((), (), ()), Box((), (), ())) == ((Box((), (), ()),) * 2,)
    assert Sharding((8, 0), (2,), (Shard(0),)).boxes((1,)) == ()
    assert Sharding((2,), (4,), (Shard(0),)).boxes((3,)) == ()
    assert intersection((), Box((0,), (4,), (0,))) == ()
    assert intersection(Box((0,), (4,), (0,)), Box((4,), (4,), (0,))) == ()
    assert intersection(Box((0,), (0,), (0,)), Box((0,), (4,), (0,))) == ()


def test_what_is_pending_is_said_of_the_boxes():
    s = Sharding((4,), (2, 2, 1), (Partial("max"), Shard(0), Partial()))
    (box,) = s.boxes((1, 1, 0))
    assert (box.global_offset, box.size, box.pending) == ((2,), (2,), ("max",))
    ((mine, its),) = intersection(box, Box((0,), (3,), (0,)))
    assert (mine.pending, its.pending) == (("max",), ())


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Box((0,), (4, 4), (0, 0)), "one entry for each tensor dim"),
        (lambda: Box((-1,), (4,), (0,)), "all numbers must be 0 or more"),
        (lambda: Box((0,), (5,), (0,), (((2, 4, 4),),)), "the product of the counts, 2, must"),
        (lambda: Box((0,), (4,), (0,), (((0, 4, 4),),)), "each count must be 1 or more"),
        (lambda: Box((0,), (4,), (0,), (((2, 1, 2),),)), ": use larger steps"),
        (lambda: Box((0,), (4,), (0,), (((2, 2, 1),),)), ": use larger steps"),
        (lambda: intersection(Box((), (), ()), Box((0,), (4,), (0,))), "0 and 1 dims"),
        (lambda: Box((0,), (4,), (0,), (((2, 4, 2),),)).local_slices, "is not contiguous"),
        (lambda: Sharding((4,), (2,), (Shard(0),)).boxes((2,)), "not on the mesh"),
    ],
)
def test_what_is_no_box(make, words):
    with pytest.raises(ValueError, match=words):
        make()
