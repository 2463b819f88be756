"""benchmarks.steps: its steps compute the same as JAX's, PyTorch's column is that of torch without
the package, and what a program of XLA receives is read off its text.
"""

from math import prod

import pytest

from benchmarks.hlo import received_of
from benchmarks.sides import torch_alone
from benchmarks.steps import setting, values_of_torch
from benchmarks.training_steps import STEPS, names_of, operand

# The losses of benchmarks/steps_of_jax.py, as JAX 0.10.2 computes them.
LOSSES = {
    "diffusion_block": 10.425745,
    "language_model": 8.644089,
    "vocabulary_loss": 8.172372,
    "sequence_block": 4.197736,
    "norm_linear": 4.112172,
    "convolutions": 4.825360,
    "experts": 1.001801,
    "fused_mlp": 1.362032,
    "fused_attention": 1.034670,
    "gpt2": 8.746120,
    "residual_mlps": 6.050205,
    "cross_attention": 1.015858,
    "llama_block": 2.734504,
    "residual_network": 3.666367,
    "recurrent": 1.582307,
    "two_losses": 10.729252,
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_losses_are_those_of_jax(step):
    loss, changes = values_of_torch([step])[step.name]
    assert loss == pytest.approx(LOSSES[step.name], rel=1e-5)
    assert all(change > 0 for change in changes.values())


def test_an_operand_is_written_as_its_sizes():
    assert operand("8@dp@tp 3 64@tp") == ((8, 3, 64), (("dp", "tp"), (), ("tp",)), None)
    assert operand("5<7") == ((5,), ((),), 7)


def received(name, sizes):
    """Runs in a process that does not import the package."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    import benchmarks.steps_of_torch as programs
    from benchmarks.received import Received

    with LocalTensorMode(prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names_of(sizes))
        step = getattr(programs, name)(mesh)
        with Received() as counted:
            step()
    return counted.most, sum(counted.collectives.values())


@pytest.mark.costly
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_torch_without_flags_receives_what_torch_does(sizes):
    names = ["vocabulary_loss", "two_losses", "fused_mlp"]
    found = setting("PyTorch")([step for step in STEPS if step.name in names], sizes)
    with torch_alone(poses_as=(0, prod(sizes))) as alone:
        assert found == {name: alone.call(received, name, sizes)[0] for name in found}


# Two devices. A scalar and a matrix are reduced together, and of the matrix each keeps half; of
# another each keeps half in one place and all in another.
PROGRAM = """
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%half (whole: f32[8,4], device: s32[]) -> f32[4,4] {
  %whole = f32[8,4]{1,0} parameter(0)
  %turned = f32[8,4]{0,1} copy(%whole)
  %device = s32[] parameter(1)
  ROOT %own = f32[4,4]{1,0} dynamic-slice(%turned, %device, %device), dynamic_slice_sizes={4,4}
}

ENTRY %main (a: f32[8,4], b: f32[], c: f32[8,4]) -> (f32[4,4], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[] parameter(1)
  %c = f32[8,4]{1,0} parameter(2)
  %device = s32[] partition-id()
  %both = (f32[], f32[8,4]{1,0}) all-reduce(%b, %a), replica_groups={{0,1}}, to_apply=%add
  %loss = f32[] get-tuple-element(%both), index=0
  %matrix = f32[8,4]{1,0} get-tuple-element(%both), index=1
  %kept = f32[4,4]{1,0} fusion(%matrix, %device), kind=kLoop, calls=%half
  %other = f32[8,4]{1,0} all-reduce(%c), replica_groups={{0,1}}, to_apply=%add
  %used = f32[4,4]{1,0} fusion(%other, %device), kind=kLoop, calls=%half
  %all = f32[8,4]{1,0} negate(%other)
  ROOT %results = (f32[], f32[4,4], f32[4,4], f32[8,4]) tuple(%loss, %kept, %used, %all)
}
"""


def test_an_all_reduce_that_is_sliced_counts_as_a_reduce_scatter():
    matrix = 8 * 4 * 4
    assert received_of(PROGRAM) == (4 + matrix + matrix, 2)
    assert received_of(PROGRAM, scatters=True) == (4 + matrix // 2 + matrix, 2)
