"""Ops that draw numbers, on cuts that only views make: as one device would, or apart where torch
keeps ranks in step; and weights begin as on stock.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from op_programs import S, values
from simulation import assert_holds, distribute, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: x.clone().exponential_(),
        lambda x: x.clone().cauchy_(),
        lambda x: x.clone().uniform_(),
        torch.rand_like,
        lambda x: torch.bernoulli(x.abs().clamp(max=1.0)),
    ],
)
def test_on_cpus_ranks_draw_as_one_device_and_go_on_alike(draw):
    """As on stock, where these would be replicas: with a generator for each rank, and no way to go
    on from another place, ranks that draw less would draw other numbers from then on.
    """
    for shape, sharded, target, mesh in (((4, 6), 1, (8, 3), 2), ((2, 6, 4), 2, (2, 2, 12), 2)):
        with plain():
            torch.manual_seed(0)
            expected, after = draw(values(*shape).view(target)), torch.rand(3)
        with ranks_of((mesh,)), cute_sharding.enabled(redistribution=True):
            torch.manual_seed(0)
            x = distribute(values(*shape), (mesh,), [Shard(sharded)]).view(target)
            assert isinstance(x.placements[0], _StridedShard)
            assert_holds(draw(x).redistribute(placements=[Replicate()]), expected)
            again = torch.rand_like(distribute(values(3), (mesh,), [Replicate()]))
            assert_holds(again, after)


def test_ranks_that_would_draw_different_amounts_draw_as_one_device():
    """Of strided shards of different sizes. Else replicas would differ from then on."""
    with plain():
        torch.manual_seed(0)
        expected, after = torch.rand(5, 10), torch.rand(3)
    # Of ten columns in four blocks the first device has seven.
    for placement in (S(0), _StridedShard(1, split_factor=4)):
        with ranks_of((2,)), cute_sharding.enabled():
            torch.manual_seed(0)
            drawn = torch.rand_like(distribute(values(5, 10), (2,), [placement]))
            assert_holds(drawn.redistribute(placements=[Replicate()]), expected)
            assert_holds(torch.rand_like(distribute(values(3), (2,), [Replicate()])), after)


@pytest.mark.parametrize("rows", [8, 10])
def test_on_accelerators_torch_draws_what_it_lists_apart(monkeypatch, rows):
    """From where the op's first argument as it was given says: so that is not to be made a replica.
    Of ops that it does not list all would draw alike.
    """
    real = op_schemas.draws_apart
    monkeypatch.setattr(
        op_schemas, "draws_apart", lambda op, mesh: real(op, SimpleNamespace(device_type="cuda"))
    )
    with plain():
        torch.manual_seed(0)
        expected = torch.empty(2, rows).exponential_()
    with ranks_of((2,)), cute_sharding.enabled():
        distribute(values(4, 6), (2,), [Shard(1)]).view(8, 3)  # for which torch would gather
        x = distribute(values(2, 2, rows // 2), (2,), [Shard(2)]).view(2, rows)
        assert x.placements == torch.rand_like(x).placements == (S(1),)
        torch.manual_seed(0)
        assert_holds(x.clone().exponential_().redistribute(placements=[Replicate()]), expected)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_what_is_noted_beside_a_result_is_drawn_with_it(mesh):
    """rrelu writes its slopes to a tensor that its gradient reads."""
    with plain():
        torch.manual_seed(0)
        full = (values(8, 6) - 0.1).requires_grad_()
        expected = F.rrelu(full.view(2, 24), training=True)
        (gradient,) = torch.autograd.grad(expected.square().sum(), full)
    placements = [Shard(1), Replicate()][: len(mesh)]
    with ranks_of(mesh), cute_sharding.enabled():
        torch.manual_seed(0)
        x = distribute(full.detach(), mesh, placements, requires_grad=True)
        y = F.rrelu(x.view(2, 24), training=True)
        (found,) = torch.autograd.grad(y.square().sum(), x)
        for got, wanted in ((y.detach(), expected.detach()), (found, gradient)):
            assert_holds(got.redistribute(placements=[Replicate()] * len(mesh)), wanted)


@pytest.mark.parametrize("begin", [torch.nn.init.normal_, torch.nn.init.kaiming_uniform_])
def test_weights_begin_as_on_stock(begin):
    """Those of fully_shard over tensor parallelism are strided in torch's hands as well, where each
    rank draws its own part from the same seed.
    """
    drawn = []
    for enabled in (nullcontext(), cute_sharding.enabled(redistribution=True)):
        with ranks_of((2, 2)), enabled, CommDebugMode() as collectives:
            torch.manual_seed(0)
            weight = distribute(values(8, 6), (2, 2), [S(0), Shard(0)], requires_grad=True)
            began = begin(torch.empty_like(weight))
            assert began.placements == (S(0), Shard(0)) and not collectives.get_total_counts()
            drawn.append(began._local_tensor._local_tensors)
    stock, ours = drawn
    with plain():
        assert all(torch.equal(part, ours[rank]) for rank, part in stock.items())


@pytest.mark.parametrize("viewed", [True, False])
def test_plain_shards_of_different_sizes_are_drawn_as_one_device(viewed):
    """Replicas would differ from then on."""
    with plain():
        torch.manual_seed(0)
        expected, after = torch.rand(21), torch.rand(3)
    with ranks_of((4,)), cute_sharding.enabled():
        if viewed:
            x = distribute(values(7, 3), (4,), [Shard(0)]).view(21)
        else:
            x = distribute(values(21), (4,), [Shard(0)])
        assert list(x.placements) == [Shard(0)]
        torch.manual_seed(0)
        drawn = torch.rand_like(x)
        assert drawn.placements == (Replicate(),)
        assert_holds(drawn, expected)
        assert_holds(torch.rand_like(distribute(values(3), (4,), [Replicate()])), after)
