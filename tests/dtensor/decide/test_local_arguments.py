"""What kernels find in memory is what autograd takes for it, by the strides of the whole tensor;
and devices without rows are given to none that refuses them.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from op_programs import S, assert_close, far_from_singular, values
from simulation import distribute, plain, ranks_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding


@pytest.mark.parametrize("placements", [[Shard(0), S(3)], [Replicate(), Shard(0)]], ids=str)
@pytest.mark.parametrize("after", [Shard(0), Replicate()], ids=str)
def test_gradients_of_group_norms_of_channels_last(placements, after):
    """What comes of a redistribution lies otherwise than torch says of the whole, by which autograd
    sees to the format that the kernel trusts.
    """
    full, weights = values(4, 4, 6, 8), values(6, 4, 4, 8).permute(1, 2, 0, 3)
    with plain():
        alone = full.contiguous(memory_format=torch.channels_last).requires_grad_()
        (F.group_norm(alone, 2) * weights).sum().backward()
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute(full, (2, 2), placements).contiguous(memory_format=torch.channels_last)
        x = x.detach().requires_grad_()
        y = F.group_norm(x, 2).redistribute(placements=[Replicate(), after])
        (y * distribute(weights, (2, 2), [Replicate()] * 2)).sum().backward()
        assert_close(x.grad, alone.grad, "gradient")


@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_what_stands_in_for_sizes_has_their_memory_format(pool):
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute(values(4, 4, 6, 8), (2, 2), [Shard(0), S(3)])
        x = x.contiguous(memory_format=torch.channels_last).detach().requires_grad_()
        result = pool(x, 2)
        result.backward(torch.ones_like(result))
        for part in x.grad._local_tensor._local_tensors.values():
            assert part.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_gradients_of_a_bias_are_of_the_channels_at_hand(mode):
    """A convolution's gradient is told the size of its bias. The kernel does not read it, and what
    stands for it in graphs and on fake tensors does.
    """
    mesh = init_device_mesh("cpu", (2, 4))
    given = [(torch.ones(4, 8, 12), [Shard(0), Replicate()])]
    given += [(x, [Replicate()] * 2) for x in (torch.ones(16, 8, 3), torch.ones(16))]
    with cute_sharding.enabled(), mode():
        x, weight, bias = (
            DTensor.from_local(torch.ones(full.shape), mesh, placements).requires_grad_()
            for full, placements in given
        )
        result = F.conv1d(x, weight, bias)
        gradient = torch.ones(4, 4, 10)
        result.backward(DTensor.from_local(gradient, mesh, [Shard(0), Shard(1)]))
    assert bias.grad.placements[1] == Shard(0) and bias.grad.to_local().shape == (4,)
    assert weight.grad.to_local().shape == (4, 8, 3)


@pytest.mark.parametrize(
    "op",
    [
        torch.linalg.det,
        lambda x: torch.linalg.slogdet(x).logabsdet,
        lambda x: torch.linalg.solve(x, x.detach()),
    ],
    ids=["det", "slogdet", "solve"],
)
@pytest.mark.parametrize("placement", [Shard(0), Shard(2), S(1)], ids=str)
def test_gradients_of_factorized_matrices(op, placement):
    """Of transposes: gathered, these lie in another order than torch says of the whole. On stock
    such gradients are wrong.
    """
    full = values(4, 4, 4)
    with plain():
        alone = full.clone().requires_grad_()
        expected = op(far_from_singular(alone).mT)
        expected.sum().backward()
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [placement], requires_grad=True)
        result = op(far_from_singular(x).mT)
        result.sum().backward()
        assert_close(result, expected, "result")
        assert_close(x.grad, alone.grad, "gradient")


def test_no_device_is_left_without_rows_by_choice():
    """torch's kernel gives back an empty image as it is."""
    with plain():
        full = values(8, 8, 2, 4)
        expected = F.pixel_unshuffle(full, 2)
    with ranks_of((2, 3)), cute_sharding.enabled():
        for placement in (Shard(1), S(1)):
            x = distribute(full, (2, 3), [Replicate(), placement])
            assert_close(F.pixel_unshuffle(x, 2), expected, placement)


def test_kernels_that_refuse_nothing_are_given_something():
    """Four channels on three devices, of which the last has none; on stock that raises."""
    full = values(8, 4, 4)
    with plain():
        alone = full.clone().requires_grad_()
        F.adaptive_avg_pool2d(alone, 2).sum().backward()
    with ranks_of((3,)), cute_sharding.enabled():
        x = distribute(full[None], (3,), [Shard(2)], requires_grad=True)
        y = F.adaptive_avg_pool2d(x.view(8, 4, 4), 2)
        y.backward(distribute(torch.ones(8, 2, 2), (3,), [Replicate()]))
        assert_close(x.grad, alone.grad[None], "gradient")


def test_some_gradients_of_group_norms_on_replicas():
    """Where there is no bias torch, without a rule, counts the gradients and raises."""
    full, weight = values(4, 2, 3), values(2)
    with plain():
        alone = [full.clone().requires_grad_(), weight.clone().requires_grad_()]
        (F.group_norm(alone[0], 1, alone[1]) * full).sum().backward()
    with ranks_of((2,)), cute_sharding.enabled():
        x, w = (distribute(t, (2,), [Replicate()], requires_grad=True) for t in (full, weight))
        (F.group_norm(x, 1, w) * distribute(full, (2,), [Replicate()])).sum().backward()
        assert_close(x.grad, alone[0].grad, "x")
        assert_close(w.grad, alone[1].grad, "weight")


def test_strided_shards_that_are_read_in_two_ways_have_a_signature_once_gathered():
    full, weight = values(4, 2, 3), values(2, 1)
    with plain():
        alone = full.clone().requires_grad_()
        (F.group_norm(alone, 1, weight.view(2)) * full).sum().backward()
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [S(0)], requires_grad=True)
        w = distribute(weight, (2,), [Shard(1)])
        (F.group_norm(x, 1, w.view(2)) * distribute(full, (2,), [Replicate()])).sum().backward()
        assert_close(x.grad, alone.grad, "x")
