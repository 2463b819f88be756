"""Strided placements that say the same left to right and as an order of shards are understood
whichever of the two a spec names: autograd makes specs of gradients anew, which name the order.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.door.cuts import are_read_as_order, are_understood


def spec_of(mesh, shape, placements, as_order):
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=as_order)


def test_what_agrees_goes_with_either():
    mesh = init_device_mesh("cpu", (4,))
    one = spec_of(mesh, (192, 64), (_StridedShard(0, split_factor=3),), True)
    other = spec_of(mesh, (64, 64), (_StridedShard(0, split_factor=4),), False)
    assert are_understood([one, other]) and not are_read_as_order([one, other])


def test_what_does_not_agree_is_told_apart():
    mesh = init_device_mesh("cpu", (4, 2))
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    specs = [spec_of(mesh, (9, 4), placements, as_order) for as_order in (True, False)]
    assert not are_understood(specs)
    assert are_read_as_order(specs[:1]) and not are_read_as_order(specs[1:])


@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_of_a_fused_weight_is_exchanged_by_its_signature(bias):
    """Sequence parallel, a fused weight and chunk: not more than PyTorch's rules would receive."""
    mesh = init_device_mesh("cpu", (4,))

    def made(local, placement):
        return DTensor.from_local(torch.ones(local), mesh, [placement]).requires_grad_()

    x = DTensor.from_local(torch.ones(4, 4, 64), mesh, [Shard(1)])
    with cute_sharding.enabled(redistribution=True, movement=True):
        w, b = made((48, 64), Shard(0)), made((48,), Shard(0)) if bias else None
        q, k, v = F.linear(x, w, b).chunk(3, -1)
        cute_sharding.stats(reset=True)
        (q * k * v).sum().backward()
        counted = cute_sharding.stats()
    assert "gate" not in counted["mm.default"] and counted["mm.default"]["signature"]
    assert tuple(x.placements) == (Shard(1),) and Replicate() not in w.grad.placements
