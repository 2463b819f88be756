"""Python's operators on bits, which torch's dispatcher takes for ops in place, by the ends of their
names.
"""

import operator

import pytest
import torch
from simulation import assert_holds, distribute, mesh_of, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_sharding

R, S = Replicate(), Shard
NAMES = ("and_", "or_", "xor", "lshift", "rshift")
MODES = {"gradients": torch.enable_grad, "inference": torch.inference_mode}
LAID = [([S(0)], [S(0)]), ([S(0)], [S(1)]), ([R], [S(1)]), ([S(1)], [R])]


def bits(*shape):
    with plain():
        return (torch.arange(shape[0] * shape[1]) * 7 % 23 - 9).to(torch.int32).reshape(shape)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placements", LAID, ids=str)
def test_values_are_those_of_one_device(placements, mode):
    mesh, left, right = (3,), bits(5, 4), bits(5, 4).abs() % 4
    with ranks_of(mesh), cute_sharding.enabled(), MODES[mode]():
        x, y = (distribute(t, mesh, p) for t, p in zip((left, right), placements))
        for name in NAMES:
            run, in_place = getattr(operator, name), getattr(operator, "i" + name.strip("_"))
            for other, full in ((y, right), (2, 2)):
                with plain():
                    wanted = run(left, full)
                written = in_place(x.clone(), other)
                assert written.placements == x.placements
                for found in (run(x, other), written):
                    finished = found.redistribute(placements=[R])
                    assert_holds(finished, wanted)
        assert_holds(x, left)


@pytest.mark.one_in(1)
def test_what_is_pending_is_finished():
    mesh, full = (2,), bits(4, 4)
    with ranks_of(mesh), cute_sharding.enabled():
        x = distribute(full, mesh, [Partial()])
        with plain():
            wanted = (full * 2) >> 1
        assert_holds((x >> 1).redistribute(placements=[R]), wanted)


@pytest.mark.one_in(1)
def test_slices_that_are_copies_are_written_through():
    mesh, full = (3,), bits(5, 4)
    with ranks_of(mesh), cute_sharding.enabled(movement=True):
        x = distribute(full, mesh, [S(0)])
        x[1:4] <<= 1
        x[1:4] |= 1
        with plain():
            wanted = full.clone()
            wanted[1:4] <<= 1
            wanted[1:4] |= 1
        assert_holds(x, wanted)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode):
    """As rank 0 of two: nothing is moved."""
    local, mesh = bits(4, 6), mesh_of((2,))
    with cute_sharding.enabled(), MODES[mode]():
        x = DTensor.from_local(local, mesh, [S(0)], run_check=False)
        found = torch.compile(lambda x: ((x >> 1) & 3) ^ x, backend="aot_eager")(x)
    with plain():
        assert torch.equal(found.to_local(), ((local >> 1) & 3) ^ local)
