"""Ops that write to what is pending, or to ``out=``."""

import random
from itertools import product

import pytest
import torch
from drawing import draw_placements
from op_programs import assert_close
from simulation import assert_holds, distribute, mesh_of, number, plain, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.run import ops


def test_what_is_pending_is_finished_to_be_written():
    """As on stock, where the operands of the product are replicated: a view that is free here
    leaves the product pending.
    """
    writes = [
        lambda y: torch.relu_(y),
        lambda y: y.add_(1.0),
        lambda y: y.clamp_(-1.0, 1.0),
        lambda y: y.masked_fill_(y > 3, 0.0),
    ]
    for write in writes:
        for graph in (False, True):
            with plain():
                single, w = number((6, 4)).requires_grad_(graph), number((12, 3))
                expected = write(single.view(2, 12) @ w)
                gradient = torch.autograd.grad(expected.sum(), single)[0] if graph else None
            with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
                x = distribute(number((6, 4)), (2,), [Shard(1)], requires_grad=graph)
                y = x.view(2, 12) @ distribute(w, (2,), [Replicate()])
                assert list(y.placements) == [Partial()]
                assert write(y) is y and list(y.placements) == [Partial()], "others may see it"
                found = y.detach().redistribute(placements=[Replicate()])
                assert_holds(found, expected.detach())
                if graph:
                    (found,) = torch.autograd.grad(y.sum(), x)
                    assert_holds(found.redistribute(placements=[Replicate()]), gradient)


# What is written to ``out=``, of the shape of x, by means of x, of shape (6, 4), and w, (4, 4).
OUTS = {
    "product": lambda x, w, out: torch.mm(x, w, out=out),
    "sum with product": lambda x, w, out: torch.addmm(x, x, w, out=out),
    "pointwise": lambda x, w, out: torch.add(x, 1.0, out=out),
    "sorted": lambda x, w, out: torch.cumsum(x, 0, out=out),
    "together": lambda x, w, out: torch.cat([x[:2], x[2:]], out=out),
    "softmax": lambda x, w, out: torch.softmax(x, 1, out=out),
}


@pytest.mark.parametrize("name", OUTS)
def test_what_is_given_as_out(name):
    rng = random.Random(name)
    with plain():
        expected = torch.zeros(6, 4)
        OUTS[name](number((6, 4)), number((4, 4)), expected)
    for mesh in ((2,), (3,), (2, 2)):
        with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
            strided = [_StridedShard(1, split_factor=2), *[Shard(0) for _ in mesh[1:]]]
            pending = [*[Replicate() for _ in mesh[1:]], Partial()]
            for placements in (strided, strided[::-1], *([pending] if name == "pointwise" else [])):
                out = distribute(number((6, 4)), mesh, placements)
                x = distribute(number((6, 4)), mesh, draw_placements(rng, mesh, (6, 4)))
                OUTS[name](x, distribute(number((4, 4)), mesh, [Replicate()] * len(mesh)), out)
                assert_holds(out.redistribute(placements=[Replicate()] * len(mesh)), expected)


def test_two_outs():
    with plain():
        expected = torch.max(number((6, 4)), 0)
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        values, indices = (
            distribute(number((4,)), (2,), [_StridedShard(0, split_factor=2)]),
            distribute(number((4,)).long(), (2,), [_StridedShard(0, split_factor=2)]),
        )
        torch.max(distribute(number((6, 4)), (2,), [Shard(0)]), 0, out=(values, indices))
        assert_holds(values, expected.values)
        assert_holds(indices, expected.indices)


def test_lists_of_what_is_pending():
    with plain():
        x = number((6, 4))
        expected = [x.view(2, 12) @ x.view(12, 2) + 1, x.view(2, 12) * 2 + 1]
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        x = distribute(number((6, 4)), (2,), [Shard(1)]).view(2, 12)
        y = [x @ x.reshape(12, 2), x * 2]
        assert list(y[0].placements) == [Partial()]
        torch._foreach_add_(y, 1.0)
        for found, wanted in zip(y, expected):
            assert_holds(found.redistribute(placements=[Replicate()]), wanted)


# What is written to p, pending, of shape (2, 2); and what is read, that shares its memory.
ALIASES = {
    "data": lambda p: (p.data.add_(1.0), p),
    "detached": lambda p: (p.detach().clamp_(-1.0, 90.0), p),
    "detached before": lambda p: (p.add_(1.0), p.detach()),
    "an older alias": lambda p: (lambda d: (p.exp_(), d))(p.detach()),
    "an older row": lambda p: (lambda row: (p.div_(9.0).exp_(), row))(p[0]),
    "a row": lambda p: (p[1:].add_(1.0), p),
    "a view": lambda p: (p.view(-1).add_(1.0), p),
    "transposed": lambda p: (p.t()[0].relu_(), p),
    "diagonal": lambda p: (p.diagonal().add_(1.0), p),
    "out": lambda p: (torch.add(p, 1.0, out=p.detach()), p),
    "filled": lambda p: (p[0].fill_(3.0), p),
    "filled, all": lambda p: (p.fill_(3.0), p),
    "a list": lambda p: (torch._foreach_add_([p[0], p[1].detach()], 1.0), p),
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_of_what_is_pending(name):
    with plain():
        x = number((6, 4)).view(2, 12) / 10
        expected = ALIASES[name](x @ x.t())[1]
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        x = distribute(number((6, 4)) / 10, (2,), [Shard(1)]).view(2, 12)
        p = x @ x.t()
        assert list(p.placements) == [Partial()]
        found = ALIASES[name](p)[1].redistribute(placements=[Replicate()])
        with plain():
            for part in found._local_tensor._local_tensors.values():
                assert torch.allclose(part, expected)


def test_on_meta():
    mesh = mesh_of((2,))
    with cute_sharding.enabled(redistribution=True):
        pending = DTensor.from_local(
            torch.empty(4, 2, device="meta"), mesh, [Partial()], run_check=False
        )
        pending.add_(1.0)
        assert list(pending.placements) == [Partial()]
        x = DTensor.from_local(torch.empty(4, 2, device="meta"), mesh, [Shard(0)], run_check=False)
        x[1:3].add_(7.0)
        assert not ops.LIVE


def test_what_torch_would_move_to_write_to_it_is_written_back():
    """scatter_add_ along a dim that is cut: torch writes to a copy and calls the tensor a
    replica.
    """
    with plain():
        index, source = torch.tensor([[0, 3, 1, 1], [2, 2, 0, 3]]), number((2, 4)) + 1
        expected = number((6, 4)).scatter_add_(1, index, source)
    with ranks_of((2,)), cute_sharding.enabled():
        for cut in (Shard(1), Shard(0), _StridedShard(1, split_factor=2)):
            x = distribute(number((6, 4)), (2,), [cut])
            x.scatter_add_(
                1, distribute(index, (2,), [Replicate()]), distribute(source, (2,), [Replicate()])
            )
            assert list(x.placements) == [cut]
            assert_holds(x, expected)


def test_one_value_is_of_all_ranks():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(number((6, 4)), (2,), [Shard(1)])
        assert x.view(2, 12).sum().item() == float(number((6, 4)).sum())


def test_places_that_are_written_to_what_is_pending():
    """Integers, of which no half is part of a sum: one device has all of it."""
    full = torch.tensor([[3.0, 1.0, 2.0, 9.0], [5.0, 7.0, 6.0, 4.0]])
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [Shard(0)])
        largest = distribute(torch.zeros(2), (2,), [_StridedShard(0, split_factor=2)])
        places = distribute(torch.zeros(2, dtype=torch.int64), (2,), [Partial()])
        torch.max(x, 1, out=(largest, places))
        assert_close(places, full.max(1).indices, "places")
        assert_close(largest, full.max(1).values, "values")


def test_out_on_a_mesh_in_another_order_is_of_the_operands_mesh():
    """As torch has it of ``out=`` by that name: what was written lies as there."""
    full = number((4, 3)) + 1
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [Shard(0)])
        backward = DeviceMesh("cpu", [1, 0])
        out = DTensor.from_local(x.to_local() * 0, backward, [Shard(0)], run_check=False)
        torch.xlogy(x, 2.0, out=out)
        assert out.device_mesh == x.device_mesh
        assert_close(out, torch.xlogy(full, torch.tensor(2.0)), "xlogy")


# Writes by index to x, of shape (6, 4): of rows 2 and 0, where values have to do with several.
BY_INDEX = {
    "filled": lambda x, rows, values: x.index_fill_(0, rows, 3.0),
    "scattered": lambda x, rows, values: x.scatter_(1, rows.view(2, 1), 5.0),
    "scattered values": lambda x, rows, values: x.scatter_(0, rows.view(1, 2), values),
    "least": lambda x, rows, values: x.index_reduce_(0, rows, values[:2], "amin"),
    "put": lambda x, rows, values: x.index_put_((rows,), values[:2], accumulate=True),
    "assigned": lambda x, rows, values: x.__setitem__((slice(None), rows), values[:, :2]),
}


@pytest.mark.parametrize("name", BY_INDEX)
def test_what_torch_would_not_move_to_write_to(name):
    """For such a write torch says to use the op that returns a new tensor, because the op cannot
    keep the placement. Here the tensor is reduced or replicated, and the values are written back.
    """
    with plain():
        rows, values = torch.tensor([2, 0]), number((6, 4)) - 9
        expected = number((6, 4))
        BY_INDEX[name](expected, rows, values)
    placed = (Partial(), Shard(0), Shard(1), _StridedShard(0, split_factor=3))
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True, movement=True):
        for of_x, of_values in [*product(placed, placed[1:3]), (Partial(), Replicate())]:
            x = distribute(number((6, 4)) / (2 if of_x == Partial() else 1), (2,), [of_x])
            BY_INDEX[name](
                x, distribute(rows, (2,), [Replicate()]), distribute(values, (2,), [of_values])
            )
            assert x.placements == (of_x,)
            assert_close(x, expected, (name, of_x, of_values))
