"""What docs/tensor-parallel.md says: the figures of examples/tensor_parallel.py on real processes,
and in this one what steps that are written otherwise do.
"""

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import environment
from simulation import mesh_of
from torch.distributed.tensor import Shard, distribute_tensor

import cute_sharding
from cute_sharding.dtensor.bookkeeping.versions import release
from cute_sharding.tools.profile.refusing import CommunicationError

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "examples"))
import tensor_parallel  # noqa: E402

# (change, with PyTorch alone, kB with cute_sharding, collectives)
ROW = r"^([^\d\n]+?) {2,}(raises|\d+ kB in \d+) +(\d+) kB in (\d+)$"


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_each_change_receives_less():
    """The program compares the losses with one device, and asserts what communicates."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(REPOSITORY / "examples" / "tensor_parallel.py")],
        env=environment(str(REPOSITORY), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(ROW, done.stdout, re.M)
    assert tuple(row[0] for row in rows) == tensor_parallel.CHANGES
    received = [int(row[2]) for row in rows]
    assert received == sorted(set(received), reverse=True)
    parts = tensor_parallel.CHANGES.index(tensor_parallel.PARTS)
    alone = [row[1] for row in rows]
    assert set(alone[:parts]) == {"raises"} and "raises" not in alone[parts:]
    alone = [int(each.split()[0]) for each in alone[parts:]]
    assert alone == sorted(set(alone), reverse=True)
    assert all(ours < theirs for ours, theirs in zip(received[parts:], alone))
    assert int(rows[-1][3]) == 5  # two outputs, two gradients, the modulation
    assert "Cannot unflatten unevenly sharded tensor" in done.stdout


# In one process, of a process group that sends nothing: values are not looked at.


def step_of(on, changes=tensor_parallel.CHANGES):
    if on:
        cute_sharding.enable(redistribution=True, movement=True)
    return tensor_parallel.training_step(mesh_of((8,)), changes)


def figures(on):
    step = step_of(on)
    step()
    with cute_sharding.profile() as p:
        step()
    return p.to_dict()["received_bytes"], p.to_dict()["collectives"]


def placed(monkeypatch, name, placement):
    before = tensor_parallel.placement

    def changed(layer, key, of_parts):
        return placement if layer.endswith(name) else before(layer, key, of_parts)

    monkeypatch.setattr(tensor_parallel, "placement", changed)


@pytest.mark.parametrize("on", [False, True])
def test_a_gathered_modulation_may_be_of_parts(on, monkeypatch):
    """A _StridedShard saves nothing where the output is gathered before the chunk."""
    expected = figures(on)
    placed(monkeypatch, "modulation", tensor_parallel._StridedShard(0, split_factor=6))
    assert figures(on) == expected


def test_the_gradient_of_a_pair_is_reduced_by_the_function():
    with pytest.raises(CommunicationError, match="native_layer_norm_backward"):
        step = step_of(True, tensor_parallel.CHANGES[:-1])
        with cute_sharding.no_communication(allow_explicit=True):
            step()
    with cute_sharding.no_communication(allow_explicit=True):
        step_of(True)()


@pytest.mark.parametrize("on", [False, True])
def test_plain_tensors_need_implicit_replication(on, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "implicit_replication", nullcontext)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        step_of(on)()


@pytest.mark.parametrize("on", [False, True])
def test_a_plain_trained_parameter_raises_in_the_optimizer(on, monkeypatch):
    def only_the_blocks(model, mesh, of_parts):
        before(model.block, mesh, of_parts)

    before = tensor_parallel.shard
    monkeypatch.setattr(tensor_parallel, "shard", only_the_blocks)
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        step_of(on)()
    assert any(entry.name == "step" for entry in raised.traceback)


def test_attention_on_cpus():
    """By its fastest kernel there, of which PyTorch takes half a minute to find a forward rule."""
    heads = distribute_tensor(torch.ones(2, 4, 4, 2), mesh_of((2,)), [Shard(1)]).requires_grad_()
    sums = distribute_tensor(torch.ones(2, 4, 4), mesh_of((2,)), [Shard(1)])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
        backward(*[heads.detach()] * 5, sums, 0.0, False)
    cute_sharding.enable()
    y = F.scaled_dot_product_attention(heads, heads, heads)
    y.sum().backward()
    assert heads.grad.placements == y.placements == (Shard(1),)


def test_outputs_of_a_fused_weight_in_one_shard():
    output = distribute_tensor(torch.ones(4, 16, 192), mesh_of((4,)), [Shard(2)])
    with pytest.raises(RuntimeError):
        output.view(4, 16, 3, 8, 8)
    with cute_sharding.profile() as alone:
        output.chunk(3, -1)
    cute_sharding.enable(redistribution=True, movement=True)
    with cute_sharding.profile() as viewed:
        assert output.view(4, 16, 3, 8, 8).placements == (Shard(3),)
    with cute_sharding.profile() as chunked:
        assert {each.placements for each in output.chunk(3, -1)} == {(Shard(2),)}
    kinds = [[each.op for each in p.collectives] for p in (alone, viewed, chunked)]
    assert kinds[1:] == [["all-to-all"], ["all-to-all"]]
    assert kinds[0] == ["all-gather"] or release() != (2, 13)
