"""Carrying is exact and complete: what it answers is right on every device, and where it gives up
no placements exist.
"""

import random
import sys
from itertools import product
from math import prod

import pytest
from enumeration import cuts_on, devices, held, shapes_of, signature

from cute_sharding.layout import LayoutError, composition, make_layout, right_inverse
from cute_sharding.propagation.views import carry
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import permute, reshape, view_of
from cute_sharding.sharding import Replicate, Shard, Sharding

# Elements, with the meshes small enough to write down every placement.
CASES = [
    *((n, (m,)) for n in (4, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24) for m in (1, 2, 3, 4, 5, 8)),
    *(
        (n, mesh)
        for n in (4, 6, 7, 8, 9, 10, 12)
        for mesh in ((2, 2), (2, 3), (3, 2), (1, 2), (2, 1))
    ),
    *((n, mesh) for n in (4, 6, 8) for mesh in ((2, 2, 2), (2, 3, 2), (1, 2, 2))),
    *((n, (2, 2)) for n in (16, 18)),
    (12, (2, 2, 2)),
    (12, (4, 2)),
    *((n, (m,)) for n in (36, 48, 60, 64) for m in (2, 3, 7)),
]


def draw_cuts(rng, shape, mesh):
    """Plain shards half of the time: they are the common case, and rare among all split factors."""
    result = []
    for _ in mesh:
        dim = rng.randrange(-1, len(shape))
        result.append(
            None if dim < 0 else (dim, rng.choice((1, rng.randint(1, max(shape[dim], 1)))))
        )
    return tuple(result)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("n, mesh", CASES, ids=str)
def test_carry_answers_where_placements_exist_and_nowhere_else(n, mesh):
    rng = random.Random(f"{n} {mesh}")
    shapes = shapes_of(n, 4 if len(mesh) < 3 or n <= 6 else 3)
    if len(shapes) > 24 and len(mesh) > 1:
        shapes = rng.sample(shapes, 24 if len(mesh) == 2 else 10)
    # What each target shape can say at all: written down once, looked up for every view to it.
    sayable = {
        shape: {signature(shape, mesh, cuts) for cuts in product(cuts_on(shape), repeat=len(mesh))}
        for shape in rng.sample(shapes, min(len(shapes), 10))
    }
    answered = blocked = 0
    for _ in range(1500):
        source, target = rng.choice(shapes), rng.choice(list(sayable))
        cuts = draw_cuts(rng, source, mesh)
        view = view_of(source, reshape(source, target))
        carried = carry(view, cuts, mesh)
        wanted = signature(source, mesh, cuts)
        if carried.blocked is None:
            assert len(carried.cuts) == len(mesh)
            assert signature(target, mesh, carried.cuts) == wanted, (source, target, cuts, carried)
            answered += 1
        else:
            assert wanted not in sayable[target], (source, target, cuts, carried)
            # The cuts before the blocked mesh dim hold what the prefix of the input's cuts holds.
            t = carried.blocked
            assert signature(target, mesh[:t], carried.cuts) == signature(
                source, mesh[:t], cuts[:t]
            ), (source, target, cuts, carried)
            blocked += 1
    assert answered > 100


@pytest.mark.parametrize("mesh", [(2,), (3,), (4, 2), (2, 3, 2)], ids=str)
def test_the_short_way_of_even_blocks_is_the_deal(mesh, monkeypatch):
    rng = random.Random(f"even {mesh}")
    module = sys.modules["cute_sharding.propagation.views"]
    short_way, taken = module._place_even, []

    def noted(*args):
        found = short_way(*args)
        taken.append(found is not None)
        return found

    for _ in range(2000):
        shapes = shapes_of(rng.choice((24, 36, 48, 60)), 3)
        source, target = rng.choice(shapes), rng.choice(shapes)
        view, cuts = view_of(source, reshape(source, target)), draw_cuts(rng, source, mesh)
        answers = []
        for way in (noted, lambda *args: None):
            monkeypatch.setattr(module, "_place_even", way)
            answers.append(carry(view, cuts, mesh))
        assert answers[0] == answers[1], (source, target, cuts)
    assert 100 < sum(taken) < len(taken) - 100


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (5, 2)], ids=str)
def test_carry_of_one_element_and_of_none(mesh):
    """Sizes 0 and 1, and scalars, where most devices hold nothing."""
    shapes = [(), (1,), (1, 1)]
    empty = [(0,), (0, 3), (3, 0), (1, 0, 2), (0, 0)]
    for group in (shapes, empty):
        for source, target in product(group, repeat=2):
            view = view_of(source, reshape(source, target))
            for cuts in product(cuts_on(source), repeat=len(mesh)):
                carried = carry(view, cuts, mesh)
                if carried.blocked is None:
                    assert signature(target, mesh, carried.cuts) == signature(source, mesh, cuts), (
                        source,
                        target,
                        cuts,
                        carried,
                    )
                else:
                    wanted = signature(source, mesh, cuts)
                    assert all(
                        signature(target, mesh, c) != wanted
                        for c in product(cuts_on(target), repeat=len(mesh))
                    ), (source, target, cuts, carried)


def test_carry_to_a_scalar_of_a_sharded_one_is_blocked():
    # Device 0 has the element, device 1 has not; a scalar cannot say so.
    assert carry(view_of((1,), reshape((1,), ())), [(0, 1)], [2]).blocked == 0
    assert carry(view_of((1,), reshape((1,), ())), [(0, 1)], [1]).cuts == (None,)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_carry_of_permutations(mesh):
    rng = random.Random(str(mesh))
    for _ in range(200):
        shape = rng.choice(shapes_of(rng.choice((6, 8, 12, 24))))
        order = rng.sample(range(len(shape)), len(shape))
        cuts = draw_cuts(rng, shape, mesh)
        carried = carry(view_of(shape, permute(shape, order)), cuts, mesh)
        assert carried.blocked is None
        for device in devices(mesh):
            output = tuple(shape[d] for d in order)
            # Both arrays name elements of their own tensor: put the input's through the op's map of
            # indices.
            expected = (
                held(shape, mesh, cuts, device).transpose(order)
                if shape
                else held(shape, mesh, cuts, device)
            )
            got = held(output, mesh, carried.cuts, device)
            assert got.shape == expected.shape
            index = held(shape, (), (), ()).transpose(order).reshape(-1)
            assert (index[got] == expected).all()


BITS = "Tensor.view, of a dtype"


def draw_op(rng, shape):
    """An op of the table other than reshape, with arguments that fit."""
    ndim = len(shape)
    ops = [
        (
            "Tensor.expand",
            tuple(rng.choice((n, -1)) if n != 1 else rng.choice((1, 2, 3)) for n in shape),
        ),
        (
            "Tensor.expand",
            (rng.choice((1, 2)), *(n if n != 1 else rng.choice((1, 4)) for n in shape)),
        ),
        ("Tensor.repeat", tuple(rng.choice((1, 1, 2, 3)) for _ in shape)),
        ("Tensor.repeat", (2, *(rng.choice((1, 2)) for _ in shape))),
        ("torch.unsqueeze", rng.randint(-ndim - 1, ndim)),
        ("torch.squeeze",),
        ("torch.atleast_3d",),
        ("torch.view_as_real",),
        ("torch.flatten",),
    ]
    if ndim:
        ops += [
            ("torch.squeeze", rng.randrange(ndim)),
            ("torch.transpose", rng.randrange(ndim), rng.randrange(-ndim, 0)),
            ("torch.movedim", rng.randrange(ndim), rng.randrange(-ndim, 0)),
        ]
        ops += [(BITS, 4, 2)]
        if shape[-1] == 2:
            ops += [("torch.view_as_complex",)] * 3
        ops += [(BITS, 1, k) for k in (2, 4) if shape[-1] % k == 0]
    return rng.choice(ops)


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2), (3, 2)], ids=str)
def test_carry_of_every_op(mesh):
    """A device's output is made of all positions that read an element it holds; and where carry
    gives up, no placements hold those.
    """
    rng = random.Random(str(mesh))
    counts = {"answered": 0, "blocked": 0}
    for _ in range(600):
        shape = rng.choice(
            [
                (),
                (1,),
                (2,),
                (3,),
                (4,),
                (1, 2),
                (2, 1),
                (3, 2),
                (1, 5),
                (4, 2),
                (6, 1),
                (2, 3),
                (1, 3, 2),
                (2, 1, 2),
                (2, 2, 2),
                (3, 1, 1),
            ]
        )
        name, *args = draw_op(rng, shape)
        view = BY_OP[name].view(shape, *args)
        cuts = draw_cuts(rng, shape, mesh)
        reads = [view.layout(i) for i in range(view.layout.size)]
        wanted = tuple(
            sum(1 << i for i, source in enumerate(reads) if mask >> source & 1)
            for mask in signature(shape, mesh, cuts)
        )
        carried = carry(view, cuts, mesh)
        if carried.blocked is None:
            counts["answered"] += 1
            assert all(cut is None or cut[0] < view.rank for cut in carried.cuts)
            assert signature(tuple(view.target), mesh, carried.cuts) == wanted, (
                name,
                args,
                shape,
                cuts,
                carried,
            )
        else:
            counts["blocked"] += 1
            for other in product(cuts_on(view.output_shape), repeat=len(mesh)):
                assert signature(tuple(view.target), mesh, other) != wanted, (
                    name,
                    args,
                    shape,
                    cuts,
                    other,
                )
    assert min(counts.values()) >= 10


# -- a second derivation, by the layout algebra ----------------------------------------------------


def shardings(rng, count):
    """Shardings whose blocks are all of one size, so that each is a layout."""
    while count:
        n, mesh = (
            rng.choice((8, 12, 16, 24, 36)),
            rng.choice(((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2))),
        )
        shape = rng.choice(shapes_of(n))
        sharding = Sharding(
            shape,
            mesh,
            tuple(Replicate() if c is None else Shard(*c) for c in draw_cuts(rng, shape, mesh)),
        )
        try:
            sharding.layout
        except LayoutError:
            continue
        count -= 1
        yield rng, n, sharding


def test_reshape_is_composition_with_the_identity():
    rng = random.Random(0)
    agreed = 0
    for rng, n, sharding in shardings(rng, 1500):
        target = rng.choice(shapes_of(n))
        view = view_of(sharding.shape, reshape(sharding.shape, target))
        carried = carry(view, sharding.cuts, sharding.mesh)
        try:
            read = Sharding.read(composition(right_inverse(view.layout), sharding.layout), target)
        except LayoutError:
            continue
        assert carried.blocked is None, (sharding, target, read)
        assert (
            signature(target, sharding.mesh, carried.cuts)
            == signature(target, sharding.mesh, read.cuts)
            == signature(sharding.shape, sharding.mesh, sharding.cuts)
        )
        agreed += 1
    assert agreed > 500


def test_permute_is_composition_with_the_inverse_of_its_strides():
    rng = random.Random(1)
    agreed = 0
    for rng, _, sharding in shardings(rng, 1000):
        order = rng.sample(range(len(sharding.shape)), len(sharding.shape))
        target = tuple(sharding.shape[d] for d in order)
        view = view_of(sharding.shape, permute(sharding.shape, order))
        carried = carry(view, sharding.cuts, sharding.mesh)
        moved = composition(right_inverse(view.layout), sharding.layout)
        # The local modes still stand in the input's order of dims; the local tensor of the output
        # reads them in its own.
        local = [moved[1][d] for d in order] if len(order) > 1 else list(moved[1])
        try:
            read = Sharding.read(make_layout(moved[0], make_layout(*local)), target)
        except LayoutError:
            continue
        assert signature(target, sharding.mesh, carried.cuts) == signature(
            target, sharding.mesh, read.cuts
        ), (sharding, order)
        agreed += 1
    assert agreed > 500


# -- cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, mesh",
    [
        ((1_000_003, 5000), (64, 32, 8)),
        ((10**9 + 7, 10**6 + 3), (1000, 99, 98)),
        ((6, 10**9 + 7), (10**4, 10**3, 10**3)),
    ],
    ids=str,
)
def test_work_grows_with_neither_elements_nor_devices(shape, mesh):
    """Function calls are counted, for time is no test: devices are told apart only by their local
    shapes, of which there are few.
    """
    view = view_of(shape, reshape(shape, (prod(shape),)))
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        carried = carry(view, [(1, 1)] * 3, mesh)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 2000
    # Every row is a piece, on each mesh dim; nothing divides.
    assert carried.cuts == ((0, shape[0]),) * 3 and carried.traced


def test_huge_flattens_are_answered():
    shape, mesh = (1_000_003, 4096), (64, 32, 8)
    view = view_of(shape, reshape(shape, (prod(shape),)))
    whole = 1_000_003  # every row is one piece
    assert carry(view, [None, (1, 1), (1, 1)], mesh).cuts == (None, (0, whole), (0, whole))
    # 4096 columns over 64 * 32 * 8 devices: a quarter of them hold something.
    assert carry(view, [(1, 1), (1, 1), (1, 1)], mesh) == (
        ((0, whole), (0, whole), (0, whole)),
        None,
        True,
    )
    # Rows do not divide, and chunks of elements are not chunks of rows: ceil(1000003 / 64) * 4096 >
    # ceil(1000003 * 4096 / 64).
    assert carry(view, [(0, 1), None, None], mesh) == ((), 0, True)
    # Sizes that divide: plain shards.
    shape = (2**20, 4096)
    assert carry(view_of(shape, reshape(shape, (2**32,))), [(0, 1), (0, 1), (1, 1)], mesh).cuts == (
        (0, 1),
        (0, 1),
        (0, 512),
    )
