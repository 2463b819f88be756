"""In-place ops on slices, selects and views of a DTensor reach it on every rank, as on one device,
also where the view could not be had without communication.
"""

import random
import sys

import pytest
import torch
from drawing import draw_placements
from simulation import assert_holds, distribute, mesh_of, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.run import moving, ops
from cute_sharding.dtensor.run.ops import StaleView


def assign(x):
    x[1:3] = x[1:3] * 0 - 1


def several(x):
    for i, part in enumerate(x.unbind(0)):
        part.mul_(i + 2)


def out(x):
    if isinstance(x, DTensor):
        torch.add(x[1], x[1], out=x[1])
    else:
        torch.add(x[1].clone(), x[1].clone(), out=x[1])


def overlapping(x):
    a, c = x[0:3], x[:, 1:]
    a.add_(1.0)
    x[1:4].mul_(2.0)
    x[0:3].sub_(x[1:4][0].clone())
    del a, c


def one_after_the_other(x):
    for _ in range(2):
        x[2:].add_(1.0)
        x.mul_(2.0)


# What is written to x, of shape (4, 6).
WRITES = {
    "slice": lambda x: x[1:3].add_(7.0),
    "slice of columns": lambda x: x[:, ::2].mul_(3.0),
    "select": lambda x: x.select(0, 1).add_(1.0),
    "an element": lambda x: x[2, 3].fill_(5.0),
    "assignment": assign,
    "split": lambda x: x.split(2, 1)[1].neg_(),
    "unbind": several,
    "transpose": lambda x: x.t()[2:4].add_(2.0),
    "view of a view": lambda x: x.view(2, 2, 6)[1][:, 1:4].zero_(),
    "diagonal": lambda x: x.diagonal().fill_(9.0),
    "narrow, twice": lambda x: (
        x.narrow(0, 1, 3).narrow(1, 2, 2).copy_(x.narrow(0, 1, 3).narrow(1, 2, 2) * 10)
    ),
    "all": lambda x: x.add_(1.0),
    "filled with an element": lambda x: x[1:3].fill_(x[0, 1].clone()),
    "detached": lambda x: x[1:3].detach().add_(7.0),
    "data": lambda x: x[:, 2].data.mul_(2.0),
    "part of a slice": lambda x: x[1:4].t()[2:].detach()[:, 1].zero_(),
    "overlapping": overlapping,
    "one after the other": one_after_the_other,
}


@pytest.mark.parametrize("movement", [False, True], ids=["views", "movement"])
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_what_is_viewed(name, mesh, movement):
    rng = random.Random(f"{name} {mesh}")
    with plain():
        expected = number((4, 6))
        WRITES[name](expected)
    with ranks_of(mesh), cute_sharding.enabled(movement=movement):
        for _ in range(4):
            x = distribute(number((4, 6)), mesh, draw_placements(rng, mesh, (4, 6)))
            case = x.placements
            try:
                WRITES[name](x)
                assert_holds(x, expected)
            except Exception as error:
                raise AssertionError(f"{name} of {case} on {mesh}") from error


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_parts_of_replicas_reach_the_others(name, mesh):
    """A slice may cut replicas."""
    test_writes_reach_what_is_viewed(name, mesh, True)


def test_slices_cut_replicas_where_writes_can_reach_the_others(monkeypatch):
    """It takes a process group over the mesh dims that are cut then."""
    full, placements = number((16, 5, 6)), [Shard(0), Replicate(), Replicate()]

    def cut(x):
        return {m for m, p in enumerate(x.placements) if p.is_shard()}

    with ranks_of((2, 2, 2)), cute_sharding.enabled(movement=True):
        x = distribute(full.clone(), (2, 2, 2), placements)
        part = x[7:]
        assert cut(part) - {0}
        part.mul_(2.0)
        with plain():
            expected = torch.cat([full[:7], full[7:] * 2.0])
        assert_holds(x, expected)
    # Of another slice: the answers of before are kept.
    monkeypatch.setattr(moving, "dims_of_group", lambda mesh, dims: dims if len(dims) < 2 else None)
    with ranks_of((2, 2, 2)), cute_sharding.enabled(movement=True):
        assert cut(distribute(full, (2, 2, 2), placements)[6:]) == {0}


@pytest.mark.parametrize("movement", [False, True], ids=["views", "movement"])
def test_gradients_of_writes(movement):
    with plain():
        single = number((4, 6)).requires_grad_()
        y = single * 2
        y[1:3].mul_(5.0)
        (expected,) = torch.autograd.grad(y.sum(), single)
        written = y.detach()
    with ranks_of((2,)), cute_sharding.enabled(movement=movement):
        x = distribute(number((4, 6)), (2,), [_StridedShard(0, split_factor=2)], requires_grad=True)
        y = x * 2
        y[1:3].mul_(5.0)
        assert_holds(y.detach(), written)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        with cute_sharding.enabled(redistribution=True):
            assert_holds(gradient.redistribute(placements=[Replicate()]), expected)


def test_after_a_view_that_is_free_here_alone():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(number((2, 4)), (2,), [Shard(1)]).view(4, 2)
        assert list(x.placements) == [_StridedShard(0, split_factor=2)]
        x[1:3].add_(7.0)
        with plain():
            expected = number((4, 2))
            expected[1:3] += 7
        assert_holds(x, expected)


def test_it_is_so_however_often_it_is_switched():
    """C++ keeps the function that ends such ops."""
    for on in (False, True, False, True):
        with ranks_of((2,)):
            x = distribute(number((4, 2)), (2,), [Shard(0)])
            if on:
                with cute_sharding.enabled():
                    x[1:3].add_(7.0)
            else:
                x[1:3].add_(7.0)
            with plain():
                expected = number((4, 2))
                expected[1:3] += 7
            if on:
                assert_holds(x, expected)
            else:  # torch's own
                assert_holds(x, number((4, 2)))


def test_what_is_pending_stays_pending():
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute(number((4, 2)), (2, 2), [Shard(0), Partial()])
        x[1:3].zero_()
        with plain():
            expected = number((4, 2)) * 2  # each device has all of it
            expected[1:3] = 0
        assert list(x.placements) == [Shard(0), Partial()]
        assert_holds(x.redistribute(placements=[Replicate()] * 2), expected)


def test_several_in_one_memory_that_is_pending_are_written_to_one_after_the_other():
    def program(x):
        sums, other = x.sum(0), x[1:].sum(0)
        torch._foreach_add_([sums, sums[1:], sums], [1.0, 2.0, 3.0])
        torch._foreach_addcmul_([sums, other, sums], [other, sums, other], [other, other, sums])
        return sums, other

    with plain():
        expected = program(number((4, 3)))
    with ranks_of((2,)), cute_sharding.enabled():
        for got, wanted in zip(program(distribute(number((4, 3)), (2,), [Shard(0)])), expected):
            assert_holds(got.redistribute(placements=[Replicate()]), wanted)


def test_lists_of_parts_of_one_view():
    """They have no row in common, and each write reaches the tensor."""

    def program(x):
        parts = x.split(2)
        torch._foreach_add_(list(parts), 5.0)
        torch._foreach_mul_([parts[1], parts[0]], [2.0, 4.0])

    with plain():
        expected = number((5, 3))
        program(expected)
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True, movement=True):
            x = distribute(number((5, 3)), (2, 2), placements)
            program(x)
            assert_holds(x, expected)


@pytest.mark.parametrize("cut", [Shard(0), Shard(2)], ids=str)
def test_sources_that_are_turned_in_place(cut):
    """What was taken of them before is of them as they were."""

    def program(x):
        rows = x[1:3]
        x.squeeze_()
        x.transpose_(0, 1).unsqueeze_(0)
        rows.add_(1.0)
        return x[:, 0:2] + 0

    with plain():
        expected = program(number((4, 1, 3)))
    with ranks_of((2,)), cute_sharding.enabled():
        assert_holds(program(distribute(number((4, 1, 3)), (2,), [cut])), expected)


def test_what_is_drawn_is_drawn_once():
    for movement in (False, True):
        with ranks_of((2,)), cute_sharding.enabled(movement=movement):
            x = distribute(number((4, 2)), (2,), [Shard(0)])
            x.mul_(2.0)
            part = x[0:3]
            part.uniform_()
            drawn = part.full_tensor().reconcile()
            with plain():
                expected = number((4, 2)) * 2
                expected[0:3] = drawn
                assert bool((drawn < 1).all())
            assert_holds(x, expected)


@pytest.mark.parametrize("which", ["a view", "the tensor", "a view of a view"])
def test_a_tensor_and_its_views_are_not_written_to_in_one_call(which):
    """Each would miss the other's write. Nobody reads what was written to the views."""
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(number((6, 2)), (2,), [Shard(0)])
        part = x[1:]
        other = {"a view": lambda: x[3:], "the tensor": lambda: x}.get(which, lambda: part[2:])()
        with pytest.raises(RuntimeError, match="Write to one at a time"):
            torch._foreach_add_([part, other], 1.0)
        with pytest.raises(StaleView):
            part + 1
        if which != "the tensor":
            assert_holds(x, number((6, 2)))


def test_plain_tensors_that_are_written_to_put_copies_out_of_step():
    with cute_sharding.enabled():
        x = DTensor.from_local(torch.ones(4, 2), mesh_of((2,)), [Shard(0)])
        old = x[0:2]
        x.to_local().mul_(2.0)
        with pytest.raises(RuntimeError, match="Take the view again"):
            old.add_(1.0)


def test_complex_numbers_by_their_parts():
    def program(x):
        torch.view_as_real(x[1:3])[..., 1].add_(1.0)
        torch.view_as_real(x)[2:].mul_(2.0)

    with plain():
        expected = torch.complex(number((4, 2)), number((4, 2)) + 1)
        program(expected)
        full = torch.complex(number((4, 2)), number((4, 2)) + 1)
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [Shard(0)])
        program(x)
        assert_holds(x, expected)


def test_in_inference_mode():
    with plain():
        expected = number((4, 2))
        expected[1:3] += 7
    with ranks_of((2,)), cute_sharding.enabled(), torch.inference_mode():
        x = distribute(number((4, 2)), (2,), [Shard(0)]) * 1
        x[1:3].add_(7.0)
        assert_holds(x, expected)


def test_copies_cost_nothing_once_they_are_gone():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(number((4, 2)), (2,), [Shard(0)])
        before = len(ops.LIVE)
        part = x[1:3]
        alias = part.detach()
        assert len(ops.LIVE) == before + 1
        del part, x
        alias.add_(1.0)  # of what is no more
        assert len(ops.LIVE) == before + 1
        del alias
        assert len(ops.LIVE) == before


def test_views_may_go_while_another_one_goes():
    """Python collects, and other threads run, at calls of functions: here at any on the way."""
    with plain():
        expected = number((4, 2)) + 1
    for event in range(16):
        with ranks_of((2,)), cute_sharding.enabled():
            x = distribute(number((4, 2)), (2,), [Shard(0)])
            stale = x[1:3]
            x.add_(1.0)
            fresh, calls = [x[1:3, :1], x[1:3, 1:]], []

            def collect(frame, kind, _, fresh=fresh, calls=calls, event=event):
                if kind in ("call", "c_call") and len(fresh) == 1:
                    calls.append(kind)
                    if len(calls) > event:
                        fresh.clear()

            sys.setprofile(collect)
            fresh.pop()
            sys.setprofile(None)
            fresh.clear()
            assert_holds(x, expected)
            with pytest.raises(StaleView):
                stale.clone()


def test_without_a_graph():
    with ranks_of((2,)), cute_sharding.enabled(), torch.no_grad():
        x = distribute(number((4, 2)), (2,), [Shard(0)], requires_grad=True)
        x[1:3] = x[1:3] * 0
        with plain():
            expected = number((4, 2))
            expected[1:3] = 0
        assert_holds(x.detach(), expected)


def listed(name):
    def write(x, y):
        getattr(torch, name)([x], [y])

    return write


# What is written to x by means of y, both of one shape, of two dims.
WRITES_BY_ANOTHER = {
    "copy": lambda x, y: x.copy_(y),
    "add": lambda x, y: x.add_(y),
    "a row": lambda x, y: x.mul_(y[0]),
    "a column": lambda x, y: x.sub_(y.mean(1, keepdim=True)),
    "where": lambda x, y: x.masked_fill_(y > 2, 1.0),
    "three": lambda x, y: x.addcmul_(y, y),
    "a list": listed("_foreach_add_"),
    "out": lambda x, y: torch.mul(y, 2.0, out=x),
    "into itself": lambda x, y: torch.add(x, y, out=x),
    "a product": lambda x, y: x.addmm_(y[:, :1], y[:1]),
    "at an index": lambda x, y: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "a row filled": lambda x, y: x.index_fill_(0, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("name", WRITES_BY_ANOTHER)
def test_what_is_written_keeps_its_cut(name, shape):
    """As on stock with x replicated; torch itself raises where a cut is strided or smaller than the
    mesh.
    """
    cuts = [
        _StridedShard(0, split_factor=2),
        _StridedShard(1, split_factor=2),
        _StridedShard(0, split_factor=3),
    ]
    others = [Replicate(), Shard(0), Shard(1), cuts[0], _StridedShard(1, split_factor=3)]
    with plain():
        expected, other = number(shape), number(shape) + 1
        WRITES_BY_ANOTHER[name](expected, other)
    with ranks_of((3,)), cute_sharding.enabled():
        for cut in cuts:
            for placement in others:
                x, y = distribute(number(shape), (3,), [cut]), distribute(other, (3,), [placement])
                WRITES_BY_ANOTHER[name](x, y)
                assert list(x.placements) == [cut]
                assert_holds(x, expected)


def test_small_shards_take_replicas():
    """Views give shards of fewer rows than there are devices, where torch replicates."""
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(number((3, 2)), (4,), [Shard(0)])
        y = distribute(number((3, 2)), (4,), [Replicate()])
        with plain():
            expected = number((3, 2)) * 2
        assert_holds(x.add_(y), expected)
        assert list(x.placements) == [Shard(0)]
        nothing = distribute(number((0, 2)), (4,), [Shard(0)])
        assert list(nothing.add_(distribute(number((0, 2)), (4,), [Replicate()])).placements) == [
            Shard(0)
        ]
