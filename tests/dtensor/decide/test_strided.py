"""as_strided of a DTensor as the views that it stands for; and stft, which calls it."""

import random

import pytest
import torch
from drawing import draw_placements
from simulation import assert_holds, distribute, placements_of, plain, ranks_of
from torch.distributed.tensor import Replicate

import cute_sharding

MESHES = [(1,), (4,), (2, 2), (2, 1, 2)]


def floats(*shape):
    with plain():
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def real(x):
    return torch.view_as_real(x) if x.is_complex() else x


def compare(program, operands, mesh, name):
    """With gradients, on replicas and on three drawn placements."""
    rng = random.Random(f"{name} {mesh}")
    with plain():
        ones = [x.clone().requires_grad_() for x in operands]
        expected = real(program(*ones))
        (expected * expected).sum().backward()
    with ranks_of(mesh), cute_sharding.enabled(movement=True):
        for k in range(4):
            placed = [
                draw_placements(rng, mesh, x.shape) if k else [Replicate()] * len(mesh)
                for x in ones
            ]
            given = [
                distribute(x, mesh, some).detach().requires_grad_()
                for x, some in zip(operands, placed)
            ]
            found = real(program(*given))
            assert torch.allclose(found.full_tensor().reconcile(), expected, atol=1e-5), placed
            (found * found).sum().backward()
            for one, other in zip(given, ones):
                assert torch.allclose(one.grad.full_tensor().reconcile(), other.grad, atol=1e-4)


STRIDED = {
    "the same": ((3, 8), (8, 1)),
    "turned": ((8, 3), (1, 8)),
    "flat": ((24,), (1,)),
    "windows": ((3, 2, 4), (8, 4, 1)),
    "windows that overlap": ((3, 3, 4), (8, 2, 1)),
    "every third": ((3, 2), (8, 3), 1),
    "a diagonal": ((2,), (9,)),
    "repeated": ((2, 3, 8), (0, 8, 1)),
    "across rows": ((4, 6), (5, 1)),
    "one element": ((), (), 5),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", STRIDED)
def test_as_strided(name, mesh):
    compare(lambda x: x.as_strided(*STRIDED[name]), [floats(3, 8)], mesh, name)


def test_dims_that_windows_do_not_leave_stay_sharded():
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(floats(4, 8), (2,), placements_of([(0, 1)]))
        y = x.as_strided((4, 3, 4), (8, 2, 1))
        assert y.placements == x.placements
        with plain():
            expected = floats(4, 8).as_strided((4, 3, 4), (8, 2, 1))
        assert_holds(y, expected)


STFT = {
    "plain": lambda x, w: torch.stft(x, 8, return_complex=True),
    "a window": lambda x, w: torch.stft(x, 8, 2, window=w, return_complex=True),
    "padded window": lambda x, w: torch.stft(x, 16, win_length=8, window=w, return_complex=True),
    "not centred": lambda x, w: torch.stft(x, 8, center=False, window=w, return_complex=True),
    "zeros around": lambda x, w: torch.stft(x, 8, pad_mode="constant", return_complex=True),
    "one signal": lambda x, w: torch.stft(x[0], 8, window=w, return_complex=True),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", STFT)
def test_stft(name, mesh):
    with plain():
        window = torch.hann_window(8)

    def program(x):
        w = window
        if hasattr(x, "placements"):
            w = distribute(window, mesh, [Replicate()] * len(mesh))
        return STFT[name](x, w)

    compare(program, [floats(3, 32)], mesh, name)


def test_what_is_no_window_is_refused():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(floats(4, 8), (2,), placements_of([(0, 1)]))
        with pytest.raises(RuntimeError, match="not a permutation, slice or window"):
            x.as_strided((4, 9), (8, 1))
