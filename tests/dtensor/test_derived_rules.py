"""Ops without a rule of their own: torch derives one by tracing the op's decomposition on a
stand-in mesh of one device.
"""

import pytest
import torch
import torch.nn.functional as F
from simulation import distribute, ranks_of
from torch.distributed.tensor import Shard

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
