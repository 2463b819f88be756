"""Movement ops on sharded dims: values and gradients as on one device; what is received is what is
missing, in one collective; what is free is a view; what is off is torch's.
"""

import logging
import random

import pytest
import torch
import torch.nn.functional as F
from beside_one_device import compare
from drawing import draw_placements
from movement_programs import MESHES, PROGRAMS, draw
from op_programs import S, assert_close, values
from simulation import distribute, most_received, plain, ranks_of, watched_wire
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

DRAWS = 4


@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_drawn_programs_forward_and_backward(name, world):
    rng = random.Random(f"{name} {world}")
    with ranks_of((world,)):
        for _ in range(DRAWS):
            drawn, shape, program = draw(rng, name)
            mesh = rng.choice(MESHES[world])
            placements = draw_placements(rng, mesh, shape, pending="sum", chance=0.1)
            case = f"{name} {drawn} of {shape} on {mesh}: {placements}"
            compare(program, values(*shape), mesh, placements, case)


# -- what is on the wire ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shape", "placements", "after", "received"),
    [
        (lambda x: x[1:], (16, 3), [Shard(0)], [Shard(0)], 3),
        (lambda x: x[:-1], (16, 3), [Shard(0)], [Shard(0)], 0),
        (lambda x: x.roll(1, 0), (16, 3), [Shard(0)], [Shard(0)], 3),
        (lambda x: x.flip(0), (16, 3), [Shard(0)], [Shard(0)], 12),
        (lambda x: F.pad(x, (0, 0, 2, 0)), (18, 3), [Shard(0)], [Shard(0)], 6),
        (lambda x: x.unfold(0, 3, 1), (18, 2), [Shard(0)], [Shard(0)], 6),
        (lambda x: x.chunk(2, 1)[1], (3, 16), [S(1)], [Shard(1)], 0),
        (lambda x: x[:, 5], (3, 16), [Shard(1)], [Shard(0)], 1),
        (
            lambda x: torch.cat([x, x], 1),
            (3, 16),
            [Shard(1)],
            [S(1)],
            0,
        ),
    ],
)
def test_what_is_missing_is_received(function, shape, placements, after, received, monkeypatch):
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(*shape), (4,), placements)
        with watched_wire(monkeypatch) as wire, CommDebugMode() as communicated:
            result = function(x)
        assert list(result.placements) == after
        assert most_received(wire) == received
        assert communicated.get_total_counts() == (received > 0)


def test_an_op_is_one_collective_at_the_most():
    rng = random.Random(5)
    ops = ["slice", "select", "roll of all dims", "flip", "pad", "unfold", "unbind", "tensor_split"]
    with ranks_of((8,)):
        for _ in range(60):
            name = rng.choice(ops)
            mesh = rng.choice(MESHES[8])
            drawn, shape, program = draw(rng, name)
            placements = draw_placements(rng, mesh, shape)
            with cute_sharding.enabled(movement=True), CommDebugMode() as communicated:
                program(distribute(values(*shape), mesh, placements))
            assert communicated.get_total_counts() <= 1, (name, drawn, shape, mesh, placements)


def test_the_gradient_of_windows_that_are_cut_within_is_one_collective():
    with plain():
        full = values(9, 4).requires_grad_()
        windows = full.unfold(0, 3, 2)
        gradient = values(*windows.shape) + 0.5
        (wanted,) = torch.autograd.grad(windows, full, gradient)
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(9, 4), (4,), [Shard(0)], requires_grad=True)
        result = x.unfold(0, 3, 2)
        given = distribute(gradient, (4,), [Shard(2)])
        with CommDebugMode() as communicated:
            (found,) = torch.autograd.grad(result, x, given)
        assert_close(found, wanted, "gradient")
        assert communicated.get_total_counts() == 1


# -- views and copies ------------------------------------------------------------------------------


def test_what_is_free_is_a_view_of_the_local_tensor():
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        full = values(4, 12)
        x = distribute(full, (2,), [S(1)])
        x.chunk(2, 1)[1].zero_()
        with plain():
            full = full.clone()
            full[:, 6:] = 0
        assert_close(x, full, "written through a chunk")


def test_writes_to_copies_reach_what_they_are_of(monkeypatch):
    """Where torch gathers, they go to a copy, and are lost without a word."""
    with ranks_of((4,)):
        full = values(16, 3)
        x = distribute(full, (4,), [Shard(0)])
        x[1:].zero_()
        assert_close(x, full, "torch loses the write")
        with cute_sharding.enabled(movement=True):
            part = x[1:]
            with watched_wire(monkeypatch) as wire:
                part.mul_(2.0)
            with plain():
                expected = full.clone()
                expected[1:] *= 2
            assert_close(x, expected, "written through")
            assert most_received(wire) == 3, "the row that came in goes back, and no other"


def test_writes_to_windows_are_refused():
    """On a plain tensor it depends on the order in which the elements are written."""
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        full = values(8, 3)
        x = distribute(full, (2,), [Shard(0)])
        with pytest.raises(RuntimeError, match="cannot write in place to the result of unfold"):
            x.unfold(0, 3, 1).zero_()
        x.unfold(0, 3, 1).clone().zero_()
        rows = distribute(values(8, 1), (2,), [Shard(0)]).expand(8, 3)
        with pytest.raises(RuntimeError, match="parts of an expanded tensor"):
            rows[1:].zero_()
        assert_close(x, full, "nothing is written")


def test_programs_that_redistribute_explicitly_alone():
    """As on stock, where something is sent; and where nothing is, nothing is redistributed."""
    with ranks_of((4,)):
        x = distribute(values(16, 3), (4,), [Shard(0)])
        for settings in (None, {"movement": True}):
            cute_sharding.disable()
            if settings is not None:
                cute_sharding.enable(**settings)
            for strict in (False, True):
                with ExplicitRedistributionContext(strict=strict):
                    for function in (lambda x: x[1:], lambda x: x.flip(0), lambda x: x.roll(1, 0)):
                        with pytest.raises(RuntimeError, match=r"[Ii]mplicit redistribution"):
                            function(x)
                    if settings is not None:
                        x[:-1]
                    x[:, 1:]
            with ExplicitRedistributionContext(mode="warn"):
                x[1:]
            with ExplicitRedistributionContext(), ExplicitRedistributionContext(enable=False):
                x[1:]


# -- what is counted, and switched -----------------------------------------------------------------


def test_counts_and_the_log(caplog):
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(16, 3), (4,), [Shard(0)])
        cute_sharding.stats(reset=True)
        with caplog.at_level(logging.DEBUG, "cute_sharding"):
            x[1:], x[:-1], x.roll(1, 0)
        stats = cute_sharding.stats()
    assert stats["slice.Tensor"]["exchanged"] == stats["slice.Tensor"]["free"] == 1
    assert stats["roll.default"]["exchanged"] == 1
    said = [message for message in caplog.messages if message.startswith("roll.default")]
    assert said == [
        "roll.default of (16, 3): [S(0)] -> [S(0)], 3 elements received on mesh dims (0,)"
    ]


def test_off_is_as_before():
    for settings in ({}, {"redistribution": True}):
        with ranks_of((4,)), cute_sharding.enabled(**settings):
            x = distribute(values(16, 3), (4,), [Shard(0)])
            assert list(x[1:].placements) == [Replicate()]
            windows = x.unfold(0, 3, 1)
            assert list(windows.placements) == [Replicate()]
            assert_close(windows, values(16, 3).unfold(0, 3, 1), "unfold")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dim", [0, 1])
def test_windows_and_their_gradient_without_the_setting(dim):
    full = values(7, 6)
    one = full.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(one.unfold(1, 2, 1).square().sum(), one)
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(full, (4,), [Shard(dim)], requires_grad=True)
        y = x.unfold(1, 2, 1)
        assert_close(y.detach(), full.unfold(1, 2, 1), "windows")
        (found,) = torch.autograd.grad(y.square().sum(), x)
        assert_close(found, wanted, "gradient")


def test_it_needs_views_and_ops():
    for lacking in ("views", "ops"):
        with pytest.raises(ValueError, match=f"with {lacking}=False, .* Pass {lacking}=True"):
            cute_sharding.enable(movement=True, **{lacking: False})


def test_dims_that_are_not_cut_are_left_to_what_runs_now():
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(values(4, 6), (2,), [Shard(0)])
        cute_sharding.stats(reset=True)
        x[:, 1:], x.roll(1, 1), x.flip(1)
        counted = cute_sharding.stats()
    assert not any(of["free"] or of["exchanged"] or of["stock"] for of in counted.values())


def test_pending_sums_stay_pending():
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(8, 4), (2, 2), [Partial(), Shard(0)])
        for function in (lambda x: x[1:], lambda x: x.roll(1, 0), lambda x: F.pad(x, (0, 0, 1, 1))):
            assert list(function(x).placements) == [Partial(), Shard(0)]
        padded = F.pad(x, (0, 0, 1, 1), value=3.0)
        with plain():
            full = F.pad(2 * values(8, 4), (0, 0, 1, 1), value=3.0)
        assert_close(padded, full, "what is filled in is filled in once")
        assert isinstance(padded, DTensor)


def test_windows_that_are_copies_share_no_memory():
    """A view that is legal by the strides of windows, which overlap, is not by those of a copy: it
    raised on some ranks, and ran on those with one row.
    """
    with ranks_of((3,)), cute_sharding.enabled(movement=True):
        windows = distribute(values(1, 6, 2), (3,), [S(1)]).unfold(1, 2, 1)
        with plain():
            full = values(1, 6, 2).unfold(1, 2, 1)
            vector = torch.arange(2.0)
        assert full.stride() == (12, 2, 1, 2) and windows.stride() == (12, 4, 1, 2)
        assert_close(windows @ distribute(vector, (3,), [Replicate()]), full @ vector, "windows")
        assert_close(windows.reshape(10, 2), full.reshape(10, 2), "reshaped")


def test_cat_leaves_out_what_is_of_shape_0():
    """torch's own rule looks for the dim that is joined in it as well, and raises."""
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(8, 6), (4,), [Shard(1)])
        nothing = distribute(values(0), (4,), [Shard(0)])
        joined = torch.cat([nothing, x, nothing, x])
        with plain():
            full = torch.cat([values(8, 6), values(8, 6)])
        assert list(joined.placements) == [Shard(1)]
        assert_close(joined, full, "joined")
