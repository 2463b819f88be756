"""In-place ops on slices, selects and views of a DTensor reach it on every rank, as on one device,
also where the view could not be had without communication.
"""

import random

import pytest
import torch
from drawing import draw_placements
from simulation import assert_holds, distribute, mesh_of, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor import writes


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
    a, b, c = x[0:3], x[1:4], x[:, 1:]
    a.add_(1.0)
    b.mul_(2.0)
    a.sub_(b[0].clone())
    del c


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
    "detached": lambda x: x[1:3].detach().add_(7.0),
    "data": lambda x: x[:, 2].data.mul_(2.0),
    "part of a slice": lambda x: x[1:4].t()[2:].detach()[:, 1].zero_(),
    "overlapping": overlapping,
    "one after the other": one_after_the_other,
}


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_what_is_viewed(name, mesh):
    rng = random.Random(f"{name} {mesh}")
    with plain():
        expected = number((4, 6))
        WRITES[name](expected)
    with ranks_of(mesh), cute_sharding.enabled(implicit_redistribution=True):
        for _ in range(4):
            x = distribute(number((4, 6)), mesh, draw_placements(rng, mesh, (4, 6)))
            case = x.placements
            try:
                WRITES[name](x)
                assert_holds(x, expected)
            except Exception as error:
                raise AssertionError(f"{name} of {case} on {mesh}") from error


def test_gradients_of_writes():
    with plain():
        single = number((4, 6)).requires_grad_()
        y = single * 2
        y[1:3].mul_(5.0)
        (expected,) = torch.autograd.grad(y.sum(), single)
        written = y.detach()
    with ranks_of((2,)), cute_sharding.enabled():
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


def test_views_that_were_taken_before_a_write():
    def program(x):
        rows, columns = x[0:2], x[:, 1:]
        x.mul_(2.0)
        rows.add_(1.0)
        rows[1].mul_(3.0)
        columns.detach().sub_(rows[:, 1:].sum())
        torch.add(rows, 1.0, out=rows)
        torch._foreach_mul_([rows, columns[1:]], 2.0)
        torch._foreach_add_([x[0:1], x[1:2], x[2:], x], [x[3:], x[2:3], x[:2], x])

    with plain():
        expected = number((4, 3))
        program(expected)
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True):
            x = distribute(number((4, 3)), (2, 2), placements)
            program(x)
            assert_holds(x, expected)


def test_what_is_drawn_is_not_drawn_again():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(number((4, 2)), (2,), [Shard(0)])
        old = x[0:2]
        x.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"uniform_.*Take them again"):
            old.uniform_()


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
        before = len(writes.LIVE)
        part = x[1:3]
        alias = part.detach()
        assert len(writes.LIVE) == before + 1
        del part, x
        alias.add_(1.0)  # of what is no more
        assert len(writes.LIVE) == before + 1
        del alias
        assert len(writes.LIVE) == before


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


def test_norms_of_devices_without_elements():
    with ranks_of((2,)), cute_sharding.enabled():
        for order in (float("inf"), float("-inf"), 2.0, -1.0):
            for placement in (_StridedShard(0, split_factor=5), Shard(0)):
                x = distribute(number((1, 3)) + 1, (2,), [placement])
                with plain():
                    expected = torch.linalg.vector_norm(number((1, 3)) + 1, order)
                with cute_sharding.enabled(redistribution=True):
                    assert_holds(
                        torch.linalg.vector_norm(x, order).redistribute(placements=[Replicate()]),
                        expected,
                    )
        assert distribute(number((1,)) + 2, (2,), [_StridedShard(0, split_factor=3)]).item() == 2.0


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
                assert write(y) is y and list(y.placements) == [Replicate()]
                assert_holds(y.detach(), expected.detach())
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
        assert list(pending.placements) == [Replicate()]
        x = DTensor.from_local(torch.empty(4, 2, device="meta"), mesh, [Shard(0)], run_check=False)
        x[1:3].add_(7.0)
        assert not writes.LIVE


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
