"""Derivatives in forward mode of functions of DTensors are those of one device."""

import forward_worker
import pytest
import torch
from gloo import run
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import cute_sharding

ALL = {"redistribution": True, "movement": True}


@pytest.mark.costly
@pytest.mark.parametrize("flags", [{}, ALL], ids=["views", "all"])
def test_forward_mode_over_gloo(tmp_path, flags):
    run(4, tmp_path, (forward_worker.compare, flags))


def test_plain_tensors_in_a_distributed_program():
    """They stay plain, and are what they are without this package."""

    def f(x, w):
        y = torch.zeros(3, 2)
        y[1] = w
        return (x.T @ y) * x.sum(0) / 2 + w.floor() - w, (x * 2).add_(w).mul_(x[0])

    x, w, infinite = torch.randn(3, 2), torch.randn(2), torch.full((2,), float("inf"))
    calls = [
        lambda: torch.func.jvp(lambda x: f(x, w), (x,), (x,)),
        lambda: torch.func.jvp(f, (x, w), (x, w)),
        lambda: torch.func.jacfwd(f)(x, w),
        lambda: torch.func.jvp(lambda x: x * infinite + x.floor(), (x,), (x,)),
        lambda: torch.func.hessian(lambda x: (f(x, w)[0] ** 2).sum())(x),
    ]
    expected = [call() for call in calls]
    with cute_sharding.enabled():
        for call, wanted in zip(calls, expected):
            found = call()
            for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
                assert type(one) is torch.Tensor
                torch.testing.assert_close(one, other, equal_nan=True)


def test_plain_tensors_beside_dtensors_stay_refused():
    with cute_sharding.enabled():
        mesh = init_device_mesh("cpu", (8,))
        x = distribute_tensor(torch.randn(16, 3), mesh, [Shard(0)], src_data_rank=None)
        with pytest.raises(RuntimeError, match="got mixed"):
            torch.func.jvp(lambda x: x * torch.zeros(()).expand(3), (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="got mixed"):
            forward_ad.make_dual(x, torch.zeros(16, 3))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="got mixed"):
            forward_ad.make_dual(torch.zeros(16, 3), x)


def test_dtensors_begin_at_offset_0():
    with cute_sharding.enabled():
        mesh = init_device_mesh("cpu", (8,))
        full = torch.randn(16, 3) + 1j
        for local in (full[:, 1:], full.conj()[1:], full.conj().imag[:, 1:]):
            x = DTensor.from_local(local, mesh, [Shard(0)])
            for y in (x, x[:, :1], x.detach()):
                assert y.storage_offset() == 0 and y.to_local().storage_offset() > 0
                assert y.is_conj() == local.is_conj() and y.is_neg() == local.is_neg()
    assert not torch._C._is_view_replay_enabled()
