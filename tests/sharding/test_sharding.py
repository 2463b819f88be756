"""A Sharding against the reference and torch, device by device; as a layout, and read back from
one.
"""

import random
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from enumeration import cuts_on, devices, held, rows_of, shapes_of, signature
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from cute_sharding.layout import Layout, LayoutError
from cute_sharding.sharding import (
    Partial,
    Replicate,
    Shard,
    Sharding,
    format_placements,
    parse_placements,
)

MESHES = [
    (1,),
    (2,),
    (3,),
    (5,),
    (2, 2),
    (2, 3),
    (3, 2),
    (1, 2),
    (2, 1),
    (2, 2, 2),
    (2, 1, 3),
    (2, 4),
    (4, 2),
]


def torch_placements(cuts):
    return [
        TorchReplicate()
        if c is None
        else TorchShard(c[0])
        if c[1] == 1
        else _StridedShard(c[0], split_factor=c[1])
        for c in cuts
    ]


def placements_of(cuts):
    return tuple(Replicate() if cut is None else Shard(*cut) for cut in cuts)


def drawn(
    seed,
    count,
    shapes=(
        (),
        (1,),
        (0,),
        (7,),
        (12,),
        (16,),
        (0, 3),
        (3, 0),
        (4, 6),
        (5, 3),
        (1, 8),
        (2, 1, 5),
        (3, 4, 2),
        (2, 3, 2),
    ),
):
    """Shapes and meshes with sizes 0 and 1, more devices than rows, and all of a mesh's dims on one
    tensor dim every other time.
    """
    rng = random.Random(seed)
    for i in range(count):
        shape, mesh = rng.choice(shapes), rng.choice(MESHES)
        one = rng.randrange(len(shape)) if shape else -1
        cuts = []
        for _ in mesh:
            dim = one if i % 2 else rng.randrange(-1, len(shape))
            cuts.append(
                None if dim < 0 else (dim, rng.choice((1, 1, 2, 3, rng.randint(1, shape[dim] + 2))))
            )
        yield shape, mesh, tuple(cuts)


# -- the reference itself --------------------------------------------------------------------------


def test_the_reference_is_torchs_split():
    """What torch cuts an actual tensor into, mesh dim by mesh dim."""
    for shape, mesh, cuts in drawn("reference", 300):
        flat = torch.arange(prod(shape)).reshape(shape)
        for device in devices(mesh):
            local = flat
            for placement, parts, coordinate in zip(
                torch_placements(cuts), mesh, device, strict=True
            ):
                if not isinstance(placement, TorchReplicate):
                    local = placement._split_tensor(
                        local, parts, with_padding=False, contiguous=True
                    )[0][coordinate]
            expected = held(shape, mesh, cuts, device)
            assert local.shape == expected.shape
            assert (local.numpy() == expected).all(), (shape, mesh, cuts, device)


# -- on one device ---------------------------------------------------------------------------------


def test_what_a_device_holds():
    for shape, mesh, cuts in drawn("holds", 600):
        sharding = Sharding(shape, mesh, placements_of(cuts))
        assert sharding.cuts == cuts
        for device in devices(mesh):
            expected = held(shape, mesh, cuts, device)
            assert sharding.local_shape(device) == expected.shape
            assert list(sharding.flat_indices(device)) == expected.reshape(-1).tolist()
            for dim, rows in enumerate(rows_of(shape, mesh, cuts, device)):
                intervals = sharding.rows(dim, device)
                assert [row for start, stop in intervals for row in range(start, stop)] == list(
                    rows
                )
                assert all(a[1] < b[0] for a, b in pairwise(intervals)), (
                    "touching intervals are one"
                )
                assert [sharding.row_at(dim, device, i) for i in range(len(rows))] == list(rows)


def test_local_shape_and_offset_are_torchs():
    compared = 0
    for shape, mesh, cuts in drawn("torch", 600):
        sharding = Sharding(shape, mesh, placements_of(cuts))
        for device in devices(mesh):
            local_shape, offset = _compute_local_shape_and_global_offset(
                shape, mesh, list(device), torch_placements(cuts)
            )
            assert sharding.local_shape(device) == local_shape, (shape, mesh, cuts, device)
            expected = list(offset)
            for dim in range(len(shape)):
                # Torch says 0 for a dim that nothing shards, and n for one that nothing is left of;
                # an empty unsharded dim is both.
                if shape[dim] == 0 or local_shape[dim] == 0:
                    expected[dim] = shape[dim]
            assert sharding.global_offset(device) == tuple(expected), (shape, mesh, cuts, device)
            compared += 1
    assert compared > 1000


def test_every_element_is_held_once_replicas_aside():
    for shape, mesh, cuts in drawn("once", 200):
        copies = prod(n for n, cut in zip(mesh, cuts, strict=True) if cut is None)
        sharding = Sharding(shape, mesh, placements_of(cuts))
        everything = sorted(i for device in devices(mesh) for i in sharding.flat_indices(device))
        assert everything == sorted(list(range(prod(shape))) * copies)


@pytest.mark.parametrize("device", [(), (0,), (2, 0), (0, 3), (-1, 0), (0, 0, 0)])
def test_devices_that_are_not_on_the_mesh(device):
    sharding = Sharding((4, 6), (2, 3), (Shard(0), Shard(1)))
    for ask in (
        sharding.local_shape,
        sharding.global_offset,
        sharding.flat_indices,
        lambda d: sharding.rows(0, d),
    ):
        with pytest.raises(ValueError, match="is not on the mesh"):
            list(ask(device))


def test_large_meshes_cost_nothing():
    sharding = Sharding((10**12 + 1, 3), (10**6, 10**5), (Shard(0), Shard(0)))
    assert sharding.local_shape((0, 0)) == (11, 3)
    assert sharding.local_shape((10**6 - 1, 10**5 - 1)) == (0, 3)
    assert sharding.global_offset((0, 1)) == (11, 0)


# -- as a layout -----------------------------------------------------------------------------------


def is_strided(values):
    """Whether a list of values is a layout: a mode of equal steps, repeated by a layout."""
    if len(values) <= 1:
        return values in ([], [0])
    step = values[1]
    run = next((i for i, v in enumerate(values) if v != step * i), len(values))
    if run == len(values):
        return True
    if len(values) % run:
        return False
    starts = values[::run]
    return all(
        values[i] == starts[i // run] + step * (i % run) for i in range(len(values))
    ) and is_strided(starts)


def has_layout(shape, mesh, cuts):
    """By brute force: local tensors of one shape, indices that are sums over coordinates, and each
    term of the sum a layout.
    """
    parts = {device: held(shape, mesh, cuts, device) for device in devices(mesh)}
    local = {part.shape for part in parts.values()}
    if len(local) > 1:
        return False
    zero = parts[(0,) * len(mesh)]
    if not zero.size:
        return True
    first = {device: int(part.reshape(-1)[0]) for device, part in parts.items()}
    for device, part in parts.items():
        terms = [
            first[tuple(c if j == m else 0 for j in range(len(mesh)))] - first[(0,) * len(mesh)]
            for m, c in enumerate(device)
        ]
        if not (part == zero + sum(terms)).all():
            return False
    modes = [
        [
            first[tuple(c if j == m else 0 for j in range(len(mesh)))] - int(zero.reshape(-1)[0])
            for c in range(n)
        ]
        for m, n in enumerate(mesh)
    ]
    for dim, n in enumerate(zero.shape):
        line = np.moveaxis(zero, dim, -1).reshape(-1, n)[0]
        modes.append((line - line[0]).tolist())
    return int(zero.reshape(-1)[0]) == 0 and all(map(is_strided, modes))


def test_the_layout_is_what_devices_hold():
    seen = {True: 0, False: 0}
    for shape, mesh, cuts in drawn("layout", 1200):
        sharding = Sharding(shape, mesh, placements_of(cuts))
        exists = has_layout(shape, mesh, cuts)
        seen[exists] += 1
        if not exists:
            with pytest.raises(LayoutError) as error:
                sharding.layout
            assert "mesh dim" in str(error.value) and str(sharding) in str(error.value)
            continue
        layout = sharding.layout
        assert layout.rank == 2
        assert len(layout[0].shape) == len(mesh) and len(layout[1].shape) == len(shape)
        if not prod(shape):
            continue
        for device in devices(mesh):
            expected = held(shape, mesh, cuts, device).reshape(-1).tolist()
            base = sum(mode(c) for mode, c in zip(layout[0], device, strict=True))
            assert [base + layout[1](i) for i in range(layout[1].size)] == expected, (
                sharding,
                device,
            )
    assert min(seen.values()) > 100


def test_layouts_of_the_documented_cases():
    assert str(Sharding((8,), (2,), (Shard(0),)).layout) == "((2,),(4,)):((4,),(1,))"
    assert str(Sharding((8,), (2,), (Shard(0, 2),)).layout) == "((2,),((2,2),)):((2,),((4,1),))"
    assert (
        str(Sharding((4, 6), (2, 2), (Replicate(), Shard(1))).layout)
        == "((2,2),(4,3)):((0,3),(6,1))"
    )


# -- and back --------------------------------------------------------------------------------------


def regular(seed, count):
    for shape, mesh, cuts in drawn(
        seed, count, [s for n in (4, 6, 8, 12, 16, 24) for s in shapes_of(n, 3)]
    ):
        if has_layout(shape, mesh, cuts):
            yield Sharding(shape, mesh, placements_of(cuts))


def test_read_undoes_layout():
    done = 0
    for sharding in regular("round trip", 1500):
        read = Sharding.read(sharding.layout, sharding.shape)
        assert (read.shape, read.mesh) == (sharding.shape, sharding.mesh)
        assert signature(read.shape, read.mesh, read.cuts) == signature(
            sharding.shape, sharding.mesh, sharding.cuts
        ), (sharding, read)
        # No mesh dim says _StridedShard where a Shard, or one with a smaller split factor, would
        # do.
        for mesh_dim, cut in enumerate(read.cuts):
            if cut is not None and cut[1] > 1:
                upto = mesh_dim + 1
                wanted = signature(read.shape, read.mesh[:upto], read.cuts[:upto])
                for simpler in [
                    *((dim, 1) for dim in range(len(read.shape))),
                    *((cut[0], f) for f in range(2, cut[1])),
                ]:
                    assert (
                        signature(read.shape, read.mesh[:upto], (*read.cuts[:mesh_dim], simpler))
                        != wanted
                    ), (sharding, read)
        # Reading is a normal form: equal distributions read alike.
        assert Sharding.read(read.layout, read.shape) == read
        done += 1
    assert done > 300


def test_read_a_shard_across_an_earlier_split():
    """Four devices share what every second pair of rows is: one placement, though its device mode
    has two sub-modes.
    """
    sharding = Sharding((8,), (2, 4), (Shard(0, 2), Shard(0)))
    assert sharding.layout[0][1] == Layout((2, 2), (4, 1))
    assert Sharding.read(sharding.layout, (8,)) == sharding


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 4)], ids=str)
def test_what_cannot_be_read_cannot_be_said(mesh):
    """A sharding's layout, read under another shape: an error only where no placements of that
    shape hold the same.
    """
    rng = random.Random(str(mesh))
    seen = {"read": 0, "unreadable": 0}
    for n in (8, 12):
        shapes = shapes_of(n, 3)
        for _ in range(300):
            source, target = rng.choice(shapes), rng.choice(shapes)
            cuts = tuple(rng.choice(cuts_on(source)) for _ in mesh)
            if not has_layout(source, mesh, cuts):
                continue
            wanted = signature(source, mesh, cuts)
            try:
                read = Sharding.read(Sharding(source, mesh, placements_of(cuts)).layout, target)
            except LayoutError as error:
                assert "mesh dim" in str(error)
                for other in product(cuts_on(target), repeat=len(mesh)):
                    assert signature(target, mesh, other) != wanted, (source, target, cuts, other)
                seen["unreadable"] += 1
                continue
            assert signature(target, mesh, read.cuts) == wanted
            seen["read"] += 1
    assert seen["read"] > 20 and seen["unreadable"] > 3


@pytest.mark.parametrize(
    "layout, shape, message",
    [
        (
            "((2),(3,4)):((4),(8,1))",
            (4, 6),
            "mesh dim 0, device mode 2:4: no placement divides tensor dim 0 into blocks of 4",
        ),
        (
            "(((2,2),),(2,3)):(((12,3),),(6,1))",
            (4, 6),
            "mode (2,2):(12,3): one placement cannot describe the 2 sub-modes",
        ),
        ("(((2,2),),4):(((4,0),),1)", (8,), "mesh dim 0, device mode (2,2):(4,0): one placement"),
        ("((2),(4)):((4),(2))", (8,), "must hold each of the 8 elements"),
        ("((2),(4)):((4),(1))", (9,), "must hold each of the 9 elements"),
        ("((2),(4)):((0),(1))", (8,), "must hold each of the 8 elements"),
        ("((2),(4),(1)):((4),(1),(0))", (8,), "has two modes, (devices, local)"),
        ("((2),(0)):((0),(1))", (0, 2), "no elements"),
    ],
)
def test_layouts_that_no_placements_say(layout, shape, message):
    with pytest.raises(LayoutError) as error:
        Sharding.read(Layout.parse(layout), shape)
    assert message in str(error.value)


# -- placements ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, placements",
    [
        ("", ()),
        ("R", (Replicate(),)),
        ("S(0),S(1)", (Shard(0), Shard(1))),
        ("_S(0, 2), R", (Shard(0, 2), Replicate())),
        (
            "Shard(dim=1), Replicate(), _StridedShard(dim=0, sf=3), Partial(avg)",
            (Shard(1), Replicate(), Shard(0, 3), Partial("avg")),
        ),
        ("_StridedShard(dim=0, split_factor=12)", (Shard(0, 12),)),
        ("P, P(max)", (Partial("sum"), Partial("max"))),
        (" S( 1 ) ", (Shard(1),)),
        ("[S(0), R]", (Shard(0), Replicate())),
        ("(Shard(dim=1),)", (Shard(1),)),
        ("Partial('max')", (Partial("max"),)),
    ],
)
def test_parse_placements(text, placements):
    assert parse_placements(text) == placements
    assert parse_placements(format_placements(placements)) == placements


def test_torchs_own_texts_are_read():
    for cuts in ([(0, 1), None], [(1, 3), (0, 2)]):
        for show in (str, repr):
            assert parse_placements(", ".join(map(show, torch_placements(cuts)))) == placements_of(
                cuts
            )


@pytest.mark.parametrize(
    "text", ["S", "S(-1)", "S(0", "X(0)", "S(0),,S(1)", "S(0) S(1)", "_S(0)", "R()R()", "S(0,1,2)"]
)
def test_parse_errors_quote_the_placement(text):
    with pytest.raises(ValueError, match="cannot read the placement"):
        parse_placements(text)


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: Shard(-1), ValueError, "count tensor dims from 0"),
        (lambda: Shard(0, 0), ValueError, "split factor 0"),
        (lambda: Sharding((4,), (2, 2), (Shard(0),)), ValueError, "placement for each mesh dim"),
        (
            lambda: Sharding((4,), (2,), (Shard(1),)),
            ValueError,
            "is for tensor dim 1, but the shape (4,) has only 1 dim",
        ),
        (lambda: Sharding((), (2,), (Shard(0),)), ValueError, "has only 0 dims"),
        (lambda: Sharding((-4,), (2,), (Shard(0),)), ValueError, "negative size"),
        (lambda: Sharding((4,), (0,), (Shard(0),)), ValueError, "at least one device"),
        (lambda: Sharding((4,), (2,), (TorchShard(0),)), TypeError, "is not a placement"),
        (lambda: Sharding((4,), (2,), ("S(0)",)), TypeError, "is not a placement"),
    ],
)
def test_constructor_errors(build, error, message):
    with pytest.raises(error) as raised:
        build()
    assert message in str(raised.value)


def test_shardings_are_values():
    a, b = Sharding([4, 6], [2], [Shard(0)]), Sharding((4, 6), (2,), (Shard(0),))
    assert a == b and hash(a) == hash(b) and a.shape == (4, 6)
    assert str(a) == "(4, 6) on mesh (2,) as [S(0)]"
    with pytest.raises(AttributeError):
        a.shape = (1,)
