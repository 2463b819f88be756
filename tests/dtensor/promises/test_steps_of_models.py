"""Whole training steps of models, with SGD, compute what one device does: the programs of
benchmarks.steps, over gloo.
"""

import pytest
import torch
from gloo import run
from torch.distributed.device_mesh import init_device_mesh

import benchmarks.steps_of_torch as programs
import cute_sharding
from benchmarks.training_steps import STEPS, names_of, numbers


def compare(name, sizes):
    """Runs on each rank: the loss, the gradient of each weight, and the loss after a step."""
    training = getattr(programs, name)
    given = {
        key: x.double() if x.is_floating_point() else x
        for key, x in ((key, torch.from_numpy(x)) for key, x in numbers(training.step).items())
    }
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names_of(sizes))
    single = {
        key: x.clone().requires_grad_(key in training.step.weights) for key, x in given.items()
    }
    shared = training.operands_on(mesh, given)
    wanted, step = training.once(single), training.once(shared)
    with cute_sharding.enabled(redistribution=True, movement=True):
        for _ in range(2):
            assert torch.allclose(step(), wanted()), name
            for key in training.step.weights:
                found = shared[key].grad.full_tensor()
                assert torch.allclose(found, single[key].grad), (name, key)


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_steps_compute_what_one_device_does(sizes, tmp_path):
    run(4, tmp_path, *[(compare, step.name, sizes) for step in STEPS])
