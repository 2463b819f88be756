"""Where a compiled program's graph breaks, ops run between graphs: what stands in for torch's own
functions is run there and never compiled, as torch's own is.
"""

import graph_breaks_worker
import pytest
import torch
from gloo import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


@pytest.mark.processes
@pytest.mark.costly
def test_none_of_ours_is_compiled(tmp_path):
    run(2, tmp_path, (graph_breaks_worker.programs,))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_redistribution_that_breaks_the_graph(backend):
    """torch moves this one and asks a tensor for a number, as far as no plan is wanted."""
    mesh = init_device_mesh("cpu", (8,))

    def program(x):
        return x.redistribute(placements=[Replicate()]) * 2

    placements = [_StridedShard(0, split_factor=2)]
    x = DTensor.from_local(torch.arange(8.0).reshape(4, 2), mesh, placements, run_check=False)
    with cute_sharding.enabled():
        torch._dynamo.reset()
        found = torch.compile(program, backend=backend, dynamic=False)(x)
        wanted = program(x)
        assert found.placements == wanted.placements
        assert torch.equal(found.to_local(), wanted.to_local())
