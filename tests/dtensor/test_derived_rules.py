"""Ops without a rule of their own: torch derives one by tracing the op's decomposition on a
stand-in mesh of one device.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from op_programs import assert_close
from simulation import distribute, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

OPS = {
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "group_norm": lambda x: F.group_norm(x, 4),
}


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("name", OPS)
def test_what_is_right_on_one_device_is_not_taken_for_right_on_four(name, dim):
    full = torch.arange(4.0 * 16 * 8 * 8).reshape(
        4, 16, 8, 8
    )  # rows of 2 on each device: torch's own rule needs them whole
    want = OPS[name](full)

    def run():
        with ranks_of((4,)):
            result = OPS[name](distribute(full, (4,), (Shard(dim),)))
            return result.placements, result.full_tensor().reconcile()

    stock, _ = run()
    with cute_sharding.enabled():
        ours, values = run()
    assert ours == stock
    torch.testing.assert_close(values, want)


@pytest.mark.parametrize("movement", [False, True])
def test_a_squeezed_copy_loses_dims_of_the_tensor_alone(movement):
    """Not those that have one row on some device; and it is in memory of its own."""
    full = torch.arange(25.0).reshape(5, 1, 5, 1)
    cuts = [Replicate(), Shard(0), Shard(2), Shard(3), _StridedShard(0, split_factor=3)]
    squeezes = [
        torch.squeeze_copy,
        lambda x: torch.squeeze_copy(x, 1),
        lambda x: torch.squeeze_copy(x, (1, 3)),
    ]
    for placements in product(cuts, [*cuts[:4]]):
        for squeeze in squeezes:
            with ranks_of((2, 2)), cute_sharding.enabled(movement=movement, redistribution=True):
                x = distribute(full, (2, 2), placements).requires_grad_()
                result = squeeze(x)
                (gradient,) = torch.autograd.grad((result * result).sum(), x)
                with torch.no_grad():
                    copied = squeeze(x).mul_(2)
                for found, wanted in (
                    (result, squeeze(full)),
                    (gradient, 2 * full),
                    (copied, 2 * squeeze(full)),
                    (x.detach(), full),
                ):
                    assert_close(found.detach(), wanted, str(placements))
