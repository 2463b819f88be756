"""Programs on every rank at once: what each rank holds after an op is its slice of what one device
would compute.
"""

import random
from collections import Counter
from math import prod

import pytest
import torch
from enumeration import shapes_of
from simulation import assert_holds, distribute, mesh_of, number, placements_of, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.propagation.views import carry
from cute_sharding.relations.view import reshape, view_of

MESHES = [(2,), (3,), (8,), (2, 2), (2, 3), (1, 2), (2, 2, 2)]


def draw(rng, mesh):
    """A tensor's shape and cuts: uneven, strided, with more devices than rows, several mesh dims on
    one dim.
    """
    shape = rng.choice(shapes_of(rng.choice((1, 2, 4, 6, 7, 8, 12, 16, 18, 24, 30))))
    cuts = []
    for _ in mesh:
        dim = rng.randrange(-1, len(shape))
        cuts.append(None if dim < 0 else (dim, rng.choice((1, 1, rng.randint(1, shape[dim])))))
    return shape, tuple(cuts)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_view(mesh):
    rng = random.Random(f"view {mesh}")
    seen = Counter()
    with ranks_of(mesh), cute_sharding.enabled():
        for _ in range(60):
            shape, cuts = draw(rng, mesh)
            target = rng.choice(shapes_of(prod(shape)))
            full = number(shape)
            tensor = distribute(full, mesh, placements_of(cuts))
            is_free = carry(view_of(shape, reshape(shape, target)), cuts, mesh).blocked is None
            assert_holds(tensor.view(target), full.view(target))
            seen["free" if is_free else "redistributed"] += 1
    assert seen["free"] >= 30


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_view_that_is_not_free(mesh):
    """Its input is redistributed, and nothing is refused."""
    rng = random.Random(f"implicit {mesh}")
    done = 0
    with ranks_of(mesh), cute_sharding.enabled():
        while done < 20:
            shape, cuts = draw(rng, mesh)
            target = rng.choice(shapes_of(prod(shape)))
            if mesh == (1, 2):
                cuts = (cuts[1], cuts[1])
            if carry(view_of(shape, reshape(shape, target)), cuts, mesh).blocked is None:
                continue
            full = number(shape)
            assert_holds(
                distribute(full, mesh, placements_of(cuts)).view(target), full.view(target)
            )
            done += 1
        outcomes = cute_sharding.stats()["view.default"]
    assert outcomes["redistribution"] > 10 and outcomes["algebra"] == outcomes["tracing"] == 0


OPS = [
    "permute",
    "transpose",
    "movedim",
    "expand",
    "repeat",
    "tile",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "ravel",
    "view_as_real",
    "view_as_complex",
    "atleast",
]


def arguments(rng, name, shape):
    """Arguments that fit, or None where the op does not apply."""
    ndim = len(shape)
    if name == "permute":
        return (rng.sample(range(ndim), ndim),)
    if name in ("transpose", "movedim"):
        return (rng.randrange(ndim), rng.randrange(-ndim, 0)) if ndim else None
    if name == "expand":
        return (
            [
                *rng.choice(([], [2], [1, 3])),
                *(n if n > 1 else rng.choice((1, 2, 3)) for n in shape),
            ],
        )
    if name == "repeat":
        return ([*rng.choice(([], [2], [1, 2])), *(rng.choice((1, 1, 2, 3)) for _ in shape)],)
    if name == "tile":
        return ([rng.choice((1, 2)) for _ in range(rng.randint(1, ndim + 1))],)
    if name == "unsqueeze":
        return (rng.randint(-ndim - 1, ndim),)
    if name == "squeeze":
        return rng.choice([(), *((d,) for d in range(ndim)), (tuple(range(ndim)),)])
    if name == "unflatten":
        return (0, rng.choice([s for s in shapes_of(shape[0]) if s])) if ndim else None
    if name == "view_as_complex":
        return () if ndim > 1 and shape[-1] == 2 else None
    return ()


def run(name, tensor, args):
    if name in ("view_as_real", "view_as_complex"):
        return getattr(torch, name)(tensor)
    if name == "atleast":
        return torch.atleast_3d(torch.atleast_2d(torch.atleast_1d(tensor)))
    return getattr(tensor, name)(*args)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_op(name, mesh):
    rng = random.Random(f"{name} {mesh}")
    done = 0
    with ranks_of(mesh), cute_sharding.enabled():
        while done < 12:
            shape, cuts = draw(rng, mesh)
            if name == "view_as_complex" and rng.random() < 0.9:
                shape = (*shape[:2], 2)
                cuts = tuple(None if cut is None or cut[0] > 2 else cut for cut in cuts)
            args = arguments(rng, name, shape)
            if args is None:
                continue
            full = number(shape)
            if name == "view_as_real":
                full = torch.complex(full, full + 0.5)
            expected = run(name, full, args)
            result = run(name, distribute(full, mesh, placements_of(cuts)), args)
            assert_holds(result, expected)
            done += 1


WIDTHS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_view_as_another_dtype(mesh):
    """Each element becomes several along the last dim, or several become one; nothing is refused.
    (Which cuts are free: tests/propagation/test_carry.py.)
    """
    rng = random.Random(f"dtype {mesh}")
    with ranks_of(mesh), cute_sharding.enabled():
        for _ in range(40):
            before, after = rng.sample(WIDTHS, 2)
            k = max(after.itemsize // before.itemsize, 1)
            shape, cuts = draw(rng, mesh)
            shape = (*shape[:-1], shape[-1] * rng.choice((k, k, 2 * k))) if shape else (k,)
            if rng.random() < 0.2:  # the last devices are without rows, and blocks are whole
                shape, cuts = (2, k * (mesh[0] + 1)), ((1, 1), *[None] * (len(mesh) - 1))
            full = number(shape).to(before)
            viewed = distribute(full, mesh, placements_of(cuts)).view(after)
            assert viewed.dtype == after
            assert_holds(viewed, full.view(after))
        outcomes = cute_sharding.stats()["view.dtype"]
    assert outcomes["redistribution"] > 0


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_gradients(mesh):
    """The gradient of a view is the view back, whose placements exist: the input's."""
    rng = random.Random(f"gradients {mesh}")
    done = 0
    with ranks_of(mesh), cute_sharding.enabled():
        while done < 15:
            shape, cuts = draw(rng, mesh)
            target = rng.choice(shapes_of(prod(shape)))
            if carry(view_of(shape, reshape(shape, target)), cuts, mesh).blocked is not None:
                continue
            tensor = distribute(number(shape), mesh, placements_of(cuts)).detach().requires_grad_()
            viewed = tensor.view(target)
            gradient = number(target) + 0.25
            viewed.backward(distribute(gradient, mesh, viewed.placements))
            assert_holds(tensor.grad, gradient.view(shape))
            done += 1


@pytest.mark.parametrize("name", ["permute", "transpose", "unsqueeze", "squeeze", "expand"])
def test_gradients_of_other_ops(name):
    mesh = (2, 2)
    rng = random.Random(f"gradients {name}")
    done = 0
    with ranks_of(mesh), cute_sharding.enabled():
        while done < 10:
            shape, cuts = draw(rng, mesh)
            # Dims of one row stay whole: summing what was expanded is not a view's business, nor is
            # squeezing a dim that some ranks lack.
            cuts = tuple(
                None if cut is None or shape[cut[0]] == 1 or cut[1] > 1 else cut for cut in cuts
            )
            args = arguments(rng, name, shape)
            if args is None:
                continue
            tensor = distribute(number(shape), mesh, placements_of(cuts)).detach().requires_grad_()
            single = number(shape).requires_grad_()
            result, expected = run(name, tensor, args), run(name, single, args)
            gradient = torch.ones(expected.shape) * 2
            expected.backward(gradient)
            result.backward(distribute(gradient, mesh, result.placements))
            assert (tensor.grad.full_tensor().reconcile() == single.grad).all()
            done += 1


# -- pending reductions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, args",
    [
        ("view", (24,)),
        ("permute", ((1, 0),)),
        ("unsqueeze", (0,)),
        ("view_as_real", ()),
    ],
)
def test_a_pending_sum_is_carried(name, args):
    full = number((4, 6))
    if name == "view_as_real":
        full = torch.complex(full, full + 1)
    with ranks_of((2, 2)), cute_sharding.enabled():
        tensor = distribute(full, (2, 2), (Partial(), Shard(0)))
        result = run(name, tensor, args)
        assert result.placements[0] == Partial()
        # Both devices of the first mesh dim hold all of it: the sum is twice the tensor.
        assert (result.full_tensor().reconcile() == run(name, 2 * full, args)).all()


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
def test_bits_are_read_of_finished_values(reduce_op):
    full = number((4, 6))
    with ranks_of((2, 2)), cute_sharding.enabled():
        result = distribute(full, (2, 2), (Partial(reduce_op), Shard(1))).view(torch.int16)
        assert result.placements == (Replicate(), Shard(1))
        times = 2 if reduce_op == "sum" else 1
        with plain():
            expected = (times * full).view(torch.int16)
        assert_holds(result, expected)


@pytest.mark.parametrize(
    "reduce_op, carried", [("sum", True), ("avg", True), ("max", False), ("min", False)]
)
def test_complex_numbers_have_no_largest(reduce_op, carried):
    full = number((4, 3, 2))
    with ranks_of((2, 2)), cute_sharding.enabled():
        result = torch.view_as_complex(distribute(full, (2, 2), (Partial(reduce_op), Shard(0))))
        assert result.placements == (Partial(reduce_op) if carried else Replicate(), Shard(0))
        times = 2 if reduce_op == "sum" else 1
        assert (torch.view_as_real(result.full_tensor().reconcile()) == times * full).all()


@pytest.mark.parametrize("reduce_op, carried", [("sum", True), ("avg", True), ("product", False)])
def test_a_product_of_complex_numbers_is_none_of_their_parts(reduce_op, carried):
    full = torch.complex(number((4, 3)) + 1, number((4, 3)))
    with ranks_of((2, 2)), cute_sharding.enabled():
        pending = distribute(full, (2, 2), (Partial(reduce_op), Shard(0)))
        if not carried:  # which is finished first; torch reduces no such product
            with pytest.raises(Exception, match=r"(?i)complex|product|Invalid other op"):
                torch.view_as_real(pending)
            return
        result = torch.view_as_real(pending)
        assert result.placements == (Partial(reduce_op), Shard(0))
        times = 2 if reduce_op == "sum" else 1
        assert (result.full_tensor().reconcile() == times * torch.view_as_real(full)).all()


# -- corners ---------------------------------------------------------------------------------------


CORNERS = [
    ("more devices than rows", (3, 8), (24,), (8,), ((0, 1),)),
    ("a dim of one row", (1, 6), (6, 1), (2,), ((0, 1),)),
    ("a split factor that does not divide", (7, 4), (28,), (2,), ((0, 3),)),
    ("a split factor as large as the dim", (4, 6), (24,), (2,), ((1, 6),)),
    ("three mesh dims on a dim", (16, 3), (48,), (2, 2, 2), ((0, 1), (0, 1), (0, 1))),
    ("three mesh dims on a dim, uneven", (7, 1), (7,), (2, 2, 2), ((0, 1), (0, 1), (0, 1))),
    ("a mesh dim of one device", (4, 6), (24,), (1, 2), ((1, 5), (1, 1))),
    ("all shapes are scalars", (), (), (2,), (None,)),
    ("a scalar as a row", (), (1,), (2,), (None,)),
    ("an empty tensor", (0, 4), (2, 0), (2,), ((0, 1),)),
    ("an empty tensor of more dims", (3, 0), (0, 5, 2), (2, 2), ((0, 1), (1, 1))),
]


@pytest.mark.parametrize(
    "shape, target, mesh, cuts",
    [corner[1:] for corner in CORNERS],
    ids=[corner[0] for corner in CORNERS],
)
def test_corners(shape, target, mesh, cuts):
    full = number(shape)
    is_free = carry(view_of(shape, reshape(shape, target)), cuts, mesh).blocked is None
    with ranks_of(mesh), cute_sharding.enabled():
        viewed = distribute(full, mesh, placements_of(cuts)).view(target)
        assert_holds(viewed, full.view(target))
        outcomes = cute_sharding.stats()["view.default"]
        assert outcomes["redistribution"] == (not is_free)


@pytest.mark.parametrize(
    "shape, target",
    [((4, 8, 6), (32, 6)), ((4, 6), (-1,)), ((4, 6), (4, 3, 2)), ((7, 3), (21,)), ((4, 6), (4, 6))],
)
def test_reshape_reaches_its_own_row_in_inference_mode(shape, target):
    """Elsewhere it decomposes to view before it is dispatched; here it comes as it is, and may
    redistribute.
    """
    full = number(shape)
    with torch.inference_mode(), ranks_of((2,)), cute_sharding.enabled():
        cute_sharding.stats(reset=True)
        assert_holds(distribute(full, (2,), [Shard(1)]).reshape(target), full.reshape(target))
        assert set(cute_sharding.stats()) == {"reshape.default"}


@pytest.mark.parametrize("args", [(), (1,), ((1, 2),)], ids=str)
def test_squeeze_in_place(args):
    """On the first rank alone: it changes the tensor's own placements."""
    tensor = DTensor.from_local(
        torch.arange(8.0).reshape(4, 1, 2),
        mesh_of((2,)),
        [Shard(2)],
        run_check=False,
        shape=torch.Size((4, 1, 4)),
        stride=(4, 4, 1),
    )
    with cute_sharding.enabled():
        assert tensor.squeeze_(*args) is tensor
    assert tensor.shape == (4, 4) and tensor.placements == (Shard(1),)
    assert torch.equal(tensor.to_local(), torch.arange(8.0).reshape(4, 2))


def test_squeeze_in_place_of_replicas():
    """torch changes the local tensor alone, as the placements stay."""
    full = number((4, 1, 2))
    with ranks_of((2,)):
        assert distribute(full, (2,), [Replicate()]).squeeze_().shape == (4, 1, 2)
        with cute_sharding.enabled():
            assert distribute(full, (2,), [Replicate()]).squeeze_().shape == (4, 2)


TURNS = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapaxes_": lambda x: x.swapaxes_(1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), _StridedShard(1, split_factor=2)])
@pytest.mark.parametrize("name", TURNS)
def test_turns_in_place(name, placement):
    """torch has no rule for them (2.14 has one of `t_` for replicas, whose shape it leaves as it
    was). The spec and the local tensor go together, and what follows is right; without us they
    raise, as ever.
    """
    full = number((5, 6))
    with ranks_of((2,)):
        with pytest.raises(RuntimeError, match="strategy"):
            TURNS[name](distribute(full, (2,), [Shard(0)]))
        with cute_sharding.enabled():
            tensor = distribute(full, (2,), [placement])
            assert TURNS[name](tensor) is tensor
            with plain():
                expected = TURNS[name](full.clone())
            assert tensor.shape == expected.shape and tensor.stride() == expected.stride()
            assert_holds(tensor.redistribute(placements=[Replicate()]), expected)
            assert_holds((tensor + 1).redistribute(placements=[Replicate()]), expected + 1)


def test_a_dim_that_is_squeezed_away_must_be_whole():
    """A rank that holds nothing of a dim of size 1 has size 0 there, and cannot drop it."""
    full = number((1, 6))
    with ranks_of((2,)), cute_sharding.enabled():
        tensor = distribute(full, (2,), [Shard(0)])
        assert_holds(tensor.squeeze(0), full.squeeze(0))
        # All on the first device, as before.
        assert tensor.squeeze(0).placements == (_StridedShard(0, split_factor=6),)
        # A dim of several rows is not dropped, even where a rank has one row of it.
        assert_holds(distribute(number((2, 6)), (2,), [Shard(0)]).squeeze(), number((2, 6)))


def test_strided_shards_come_and_go():
    """Flatten makes a _StridedShard of a Shard of a later dim; the view back makes it a Shard
    again.
    """
    full = number((4, 8, 6))
    with ranks_of((4,)), cute_sharding.enabled():
        tensor = distribute(full, (4,), [Shard(1)])
        flat = tensor.view(32, 6)
        assert flat.placements == (_StridedShard(0, split_factor=4),)
        assert_holds(flat, full.view(32, 6))
        assert flat.view(4, 8, 6).placements == (Shard(1),)


@pytest.mark.parametrize("cut", [(1, 1), (1, 3), (2, 1)])
@pytest.mark.parametrize(
    "name, args",
    [
        ("repeat", (2, 3, 2)),
        ("expand", (0, 10, 5)),
        ("permute", ((2, 0, 1),)),
        ("view", (10, 0)),
        ("view", (0, 2, 5)),
    ],
)
def test_empty_tensors_have_the_local_shapes_that_the_local_op_makes(name, args, cut):
    full = number((0, 10, 1))
    with ranks_of((4,)), cute_sharding.enabled():
        assert_holds(
            run(name, distribute(full, (4,), placements_of((cut,))), args), run(name, full, args)
        )
