"""Programs that run rightly on torch's own rules run rightly with every flag: views one after the
other, squeezes in place, redistributions between them, and their gradients.
"""

import random
import re
from contextlib import nullcontext

import pytest
import torch
from drawing import draw_cuts, draw_op, shapes
from simulation import (
    assert_holds,
    distribute,
    mesh_of,
    number,
    placement_of,
    placements_of,
    plain,
    ranks_of,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding._settings import Settings
from cute_sharding.dtensor.bookkeeping import stats
from cute_sharding.dtensor.decide.question import is_torchs
from cute_sharding.dtensor.replaced import tensor_specs

FLAGS = ({}, {"redistribution": True}, {"redistribution": True, "views": False})
R, S = Replicate(), Shard


def step(tensor, op):
    name, args = op
    if name == "pointwise":
        return tensor * 2 + 1
    if name == "squeeze_":
        return (tensor * 1).squeeze_(*args)
    if name == "redistribute":
        return tensor.redistribute(placements=args) if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, name)(*args)


def draw_step(rng, tensor, mesh):
    kind, ndim = rng.random(), tensor.dim()
    if kind < 0.2:
        return "pointwise", ()
    if kind < 0.3 and ndim:
        return "redistribute", [
            placement_of(cut and (cut[0], 1)) for cut in draw_cuts(rng, mesh, tuple(tensor.shape))
        ]
    if kind < 0.42 and ndim:
        return "squeeze_", rng.choice([(), (rng.randrange(-ndim, ndim),)])
    return draw_op(rng, tensor)


def draw_program(rng, tensor, mesh):
    program = []
    for _ in range(rng.choice((1, 2, 3, 4))):
        program.append(draw_step(rng, tensor, mesh))
        tensor = step(tensor, program[-1])
    return program, tensor


def run(single, mesh, placements, program, expected, gradient):
    tensor = distribute(single.detach(), mesh, placements, requires_grad=True)
    result = tensor
    for op in program:
        result = step(result, op)
    assert_holds(result, expected)
    result.backward(distribute(gradient, mesh, result.placements))
    assert_holds(tensor.grad, single.grad)


def fails_on_torch(error, placements, program):
    """Whether torch's own rules are known to fail so on such a program."""
    dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
    return (
        # A view that is not free to torch, in the words of its rules.
        re.search("[Pp]lease redistribute the (input|tensor)", str(error)) is not None
        # Torch reads these as an order of mesh dims, whatever the split factors are: it raises half
        # way, or gives others' elements.
        or any(isinstance(placement, _StridedShard) for placement in placements)
        # It squeezes the local tensor, and leaves the DTensor its shape.
        or (isinstance(error, AssertionError) and any(name == "squeeze_" for name, _ in program))
        # It looks at one mesh dim after the other, each as if it alone cut the tensor dim.
        or ("is invalid for input of size" in str(error) and len(dims) > len(set(dims)))
    )


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_drawn_programs(mesh):
    rng = random.Random(f"never worse {mesh}")
    right = 0
    for _ in range(30):
        shape = rng.choice(shapes(rng.choice((1, 6, 7, 8, 9, 12, 16, 24, 36))))
        placements = placements_of(
            cut if cut is None or rng.random() < 0.2 else (cut[0], 1)
            for cut in draw_cuts(rng, mesh, shape)
        )
        single = number(shape).requires_grad_()
        with plain():
            program, result = draw_program(rng, single, mesh)
            expected, gradient = result.detach(), number(result.shape) + 0.5
            result.backward(gradient)
        case = single, mesh, placements, program, expected, gradient
        with ranks_of(mesh):
            try:
                run(*case)
            except Exception as error:
                if not fails_on_torch(error, placements, program):
                    raise
                continue
            right += 1
            for flags in FLAGS:
                with cute_sharding.enabled(**flags):
                    try:
                        run(*case)
                    except Exception as error:
                        raise AssertionError(
                            f"{flags}: {shape} as {placements} on {mesh}: {program}"
                        ) from error
    assert right >= 8


# -- views that torch redistributes for ------------------------------------------------------------


def test_a_view_is_not_refused_that_comes_after_one_that_torch_redistributes_for():
    """Torch gathers for the first view, though it is free; after it the second is free on torch,
    and not here.
    """
    full = number((6, 4))
    with ranks_of((2,)):
        first = distribute(full, (2,), [S(1)]).view(2, 12)
        assert first.placements == (R,) and first.view(4, 3, 2).placements == (R,)
        for flags in ({}, {"redistribution": True}):
            with cute_sharding.enabled(**flags):
                first = distribute(full, (2,), [S(1)]).view(2, 12)
                assert first.placements == (_StridedShard(1, split_factor=3),), "free"
                assert_holds((first * 1).view(4, 3, 2), full.view(4, 3, 2))
                assert_holds(first.squeeze().view(4, 3, 2), full.view(4, 3, 2))


def clamped(x, low):
    return torch.clamp(x.view(5, 10, 5), low.view(5, 10, 5)).view(250)


def halved(x):
    return torch.nn.functional.glu(x.view(7, 7, 6)).view(49, 3)


def added_and_picked(x, index):
    y = x.index_add(1, index, torch.ones_like(x))
    return y.index_select(1, index).view(5, 2, 5, 5)


@pytest.mark.parametrize(
    ("program", "mesh", "shapes", "placements"),
    [
        # torch's first view says a _StridedShard of factor one, and its clamp finishes there.
        (clamped, (2, 2), [(250,), (5, 2, 5, 5)], [[R, R], [S(1), S(2)]]),
        # What is pending is reduced and scattered here, for less.
        (halved, (1, 2), [(49, 6)], [[Partial(), Partial()]]),
        # torch derives a rule for index_add, which cuts other rows.
        (added_and_picked, (3,), [(5, 10, 5), (10,)], [[R], [S(0)]]),
    ],
)
def test_strict_views_of_what_torch_may_have_laid_out_otherwise(program, mesh, shapes, placements):
    with plain():
        fulls = [number(shape) % 10 for shape in shapes]
        fulls = [full.long() if full.ndim == 1 and len(full) == 10 else full for full in fulls]
        expected = program(*fulls)
    with ranks_of(mesh):
        for flags in (None, {}, {"redistribution": True}):
            tensors = [
                distribute(full / 2 if Partial() in p else full, mesh, p)  # of two devices
                for full, p in zip(fulls, placements)
            ]
            with nullcontext() if flags is None else cute_sharding.enabled(**flags):
                result = program(*tensors)
                assert_holds(result.redistribute(placements=[R] * len(mesh)), expected)


@pytest.mark.parametrize("value", [True, False, "replicate", "cheapest", "error", "nearest"])
def test_the_setting_of_old_is_accepted_and_changes_nothing(value):
    full = number((4, 6))
    with (
        pytest.warns(FutureWarning, match="the argument implicit_redistribution has no effect"),
        ranks_of((2, 2)),
        cute_sharding.enabled(implicit_redistribution=value),
    ):
        assert cute_sharding.settings() == Settings()
        viewed = distribute(full, (2, 2), [S(0), S(1)]).view(4, 3, 2)
        assert_holds(viewed, full.view(4, 3, 2))
        assert viewed.placements != (S(0), R), "the cheapest"


# -- squeezes in place -----------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    ("shape", "placements", "mesh", "dims"),
    [
        ((4, 1, 8), [S(0)], (4,), (1,)),
        ((4, 1, 8), [S(2)], (4,), (-2,)),
        ((8, 1), [S(0)], (4,), ()),
        ((2, 1, 1, 7), [S(3)], (3,), ((1, 2),)),
        ((5, 1, 4), [S(0), S(2)], (2, 2), (1,)),
        ((1, 8), [_StridedShard(1, split_factor=2)], (2,), (0,)),
        ((8, 1), [Partial()], (2,), (1,)),
        ((8, 2), [S(0)], (2,), (1,)),
        ((), [R], (2,), ()),
    ],
    ids=str,
)
def test_squeezed_in_place(shape, placements, mesh, dims, flags):
    """Without the rules of views, as PyTorch alone: which may keep the old shape."""
    full = number(shape)
    with ranks_of(mesh):
        stock = distribute(full, mesh, placements).squeeze_(*dims)
    with ranks_of(mesh), cute_sharding.enabled(**flags):
        tensor = distribute(full, mesh, placements)
        result = tensor.squeeze_(*dims)
        expected = full.squeeze(*dims)
        if not flags.get("views", True):
            assert result is tensor and tensor._spec == stock._spec
            assert tensor.stride() == stock.stride() and tensor.shape == stock.shape
            return
        assert (
            result is tensor
            and tensor.shape == tensor._spec.shape == expected.shape
            and tensor.stride() == expected.stride()
        )
        if not any(isinstance(p, Partial) for p in placements):
            assert_holds(tensor, expected)
            assert_holds(tensor + 1, expected + 1)
            assert_holds(tensor.redistribute(placements=[R] * len(mesh)), expected)


@pytest.mark.parametrize("dims", [(), (0,), ((0, 1),)], ids=str)
def test_a_squeeze_in_place_moves_nothing(dims):
    """The local tensor would stay what it is, under the placements of another."""
    with ranks_of((2,)), cute_sharding.enabled():
        tensor = distribute(number((1, 1, 8)), (2,), [S(0)])
        with pytest.raises(RuntimeError, match="an in-place op cannot communicate"):
            tensor.squeeze_(*dims)
        assert tensor.placements == (S(0),)
        assert_holds(tensor, number((1, 1, 8)))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_vector_times_a_matrix(flags):
    """Torch squeezes in place here."""
    with ranks_of((4,)), cute_sharding.enabled(**flags):
        x, w = (
            distribute(number((8,)), (4,), [S(0)], requires_grad=True),
            distribute(number((8, 3)), (4,), [S(0)]),
        )
        product = x @ w
        assert product.shape == (3,)
        assert_holds((product + 1).redistribute(placements=[R]), number((8,)) @ number((8, 3)) + 1)
        product.sum().backward()
        assert_holds(x.grad, number((8, 3)).sum(1))


def test_a_tensor_that_torch_has_squeezed_can_be_moved():
    with ranks_of((2,)):
        tensor = distribute(number((4, 1, 6)), (2,), [S(0)])
        tensor.squeeze_(1)
        assert tensor.shape == (4, 1, 6), "torch's own"
        with cute_sharding.enabled(redistribution=True):
            assert_holds(tensor.redistribute(placements=[S(2)]), number((4, 1, 6)))


# -- redistributions with the view flag alone ------------------------------------------------------


@pytest.mark.parametrize(
    "shape, placements, target",
    [
        ((7, 2, 3), [S(1), R, R], (2, 21)),
        ((2, 8, 3), [S(2)] * 3, (2, 24)),
        ((5, 3, 4), [S(0), S(1), S(1)], (15, 4)),
    ],
    ids=str,
)
def test_what_torch_plans_apart_on_each_rank_is_moved_by_plan(shape, placements, target):
    mesh = (2, 2, 2)
    with ranks_of(mesh), cute_sharding.enabled():
        viewed = distribute(number(shape), mesh, placements).view(target)
        assert_holds(viewed.redistribute(placements=[R, R, R]), number(shape).view(target))


def test_what_is_left_to_torch():
    mesh = mesh_of((2, 2))

    def spec(*placements, order=False, shape=(12, 8)):
        return tensor_specs.with_shape(
            tensor_specs.DTensorSpec(
                mesh, tuple(placements), use_strided_shard_as_shard_order=order
            ),
            shape,
        )

    assert is_torchs(spec(S(0), S(0), shape=(8, 3)), spec(R, R, shape=(8, 3))), "nothing but Shard"
    assert is_torchs(spec(S(0), S(1), shape=(7, 3)), spec(R, R, shape=(7, 3)))
    for uneven in (7, 6, 1):  # which torch gathers in one, if the mesh has been flattened
        assert not is_torchs(spec(S(0), S(0), shape=(uneven, 3)), spec(R, R, shape=(uneven, 3)))
        assert not is_torchs(spec(R, R, shape=(uneven, 3)), spec(S(0), S(0), shape=(uneven, 3)))
    for strided in (
        spec(_StridedShard(0, split_factor=2), S(0), order=True),
        spec(_StridedShard(0, split_factor=3), S(0), order=True),
        spec(_StridedShard(0, split_factor=2), R),
    ):
        assert is_torchs(strided, strided)
        assert not is_torchs(strided, spec(R, R)) and not is_torchs(spec(R, R), strided)


def test_redistributions_are_counted():
    with ranks_of((2, 2)):
        tensor = distribute(number((6, 5)), (2, 2), [S(0), S(1)])
        with cute_sharding.enabled(redistribution=True):
            cute_sharding.stats(reset=True)
            for _ in range(2):
                tensor.redistribute(placements=[S(1), S(0)])
            plan = cute_sharding.plan_redistribution((6, 5), (2, 2), [S(0), S(1)], [S(1), S(0)])
            moved = cute_sharding.stats(reset=True)["redistribute"]
        assert {name: moved[name] for name in ("plan", "stock", "collectives")} == {
            "plan": 2,
            "stock": 0,
            "collectives": 2,
        }
        assert moved["received_elements"] == 2 * plan.received_elements
        assert cute_sharding.stats() == {}


def test_counts_of_many_kinds_are_added_up(monkeypatch):
    def moves():
        return stats.Moved(plan=1, collectives=1, received=stats.Received(3, 6))

    monkeypatch.setattr(stats, "MOST_KINDS", 4)
    for _ in range(7):
        stats.count_moves(stats.Kind(moves))
    moved = cute_sharding.stats(reset=True)["redistribute"]
    assert (moved["plan"], moved["collectives"], moved["received_elements"]) == (7, 7, 21)
