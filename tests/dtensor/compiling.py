"""Programs that are compiled, and what comes of them beside what they give eagerly."""

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from simulation import mesh_of
from torch.distributed.tensor import distribute_tensor

import cute_sharding

MESH = (4,)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing from an earlier test or an earlier run."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        cute_sharding.enabled(),
    ):
        yield
    torch._dynamo.reset()


def sharded(shape, placements, mesh=MESH, grad=False):
    return distribute_tensor(
        torch.arange(float(torch.Size(shape).numel())).reshape(shape),
        mesh_of(mesh),
        placements,
        src_data_rank=None,
    ).requires_grad_(grad)


def compiled(program, dynamic=True, backend="aot_eager"):
    return torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)


def assert_same(actual, expected):
    assert (actual.placements, actual.shape) == (expected.placements, expected.shape)
    assert torch.equal(actual.to_local(), expected.to_local())


def flatten(x):
    return x.view(x.shape[0] * x.shape[1], x.shape[2])
