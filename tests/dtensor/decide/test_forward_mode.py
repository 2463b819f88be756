"""Derivatives in forward mode of functions of DTensors are those of one device."""

import forward_worker
import torch
from gloo import spawn
from torch.autograd import forward_ad

import cute_sharding


def test_forward_mode_over_gloo(tmp_path):
    spawn(forward_worker.several, 4, 4, str(tmp_path / "rendezvous"))


def test_zeros_of_plain_tensors_stay_torchs():
    with cute_sharding.enabled(), forward_ad.dual_level():
        zeros, ones = torch._efficientzerotensor((2, 3)), torch.ones(2, 3)
        assert (zeros * ones)._is_zerotensor()
        assert torch.equal(torch.cat([zeros, ones]), torch.cat([0 * ones, ones]))
        assert torch.equal(zeros + ones, ones)
        assert torch.equal(zeros @ ones.T, torch.zeros(2, 2))
        assert torch.equal(ones.clone().copy_(zeros), 0 * ones)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "ZeroTensor")
