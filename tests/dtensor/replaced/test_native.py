"""Redistributions that backends have a collective for are that collective, as torch's compiler
looks for it: torch overlaps these with matrix products (async tensor parallelism).
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_sharding

R = Replicate()
PROGRAMS = {
    "gather of rows, then a product": (
        (64, 32),
        [Shard(0)],
        lambda x, w: x.redistribute(placements=[R]) @ w,
    ),
    "gather of columns, then a product": (
        (64, 32),
        [Shard(1)],
        lambda x, w: x.redistribute(placements=[R]) @ w,
    ),
    "a product, then a reduce-scatter of rows": (
        (64, 32),
        [Shard(1)],
        lambda x, w: (x @ w.redistribute(placements=[Shard(0)])).redistribute(
            placements=[Shard(0)]
        ),
    ),
    "a product, then a reduce-scatter of columns": (
        (64, 32),
        [Shard(1)],
        lambda x, w: (x @ w.redistribute(placements=[Shard(0)])).redistribute(
            placements=[Shard(1)]
        ),
    ),
}


def found(program, shape, before):
    """(all-gathers, reduce-scatters) that the pass finds in the graph."""
    from torch._inductor.fx_passes import micro_pipeline_tp

    counts = []

    def look(graph):
        counts.append(
            (
                len(micro_pipeline_tp.find_all_gather_patterns(graph)),
                len(micro_pipeline_tp.find_reduce_scatter_patterns(graph)),
            )
        )

    mesh = DeviceMesh("cpu", torch.arange(4))
    local = torch.randn(
        [n // 4 if p == Shard(d) else n for d, n in enumerate(shape) for p in before][: len(shape)]
    )
    x = DTensor.from_local(local, mesh, before, run_check=False)
    w = DTensor.from_local(torch.randn(32, 16), mesh, [R], run_check=False)
    torch._dynamo.reset()
    with torch._inductor.config.patch(post_grad_custom_post_pass=look, force_disable_caches=True):
        torch.compile(program, fullgraph=True)(x, w)
    return counts


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pass_finds_what_it_finds_in_torchs_graphs(name):
    shape, before, program = PROGRAMS[name]
    stock = found(program, shape, before)
    with cute_sharding.enabled(redistribution=True):
        ours = found(program, shape, before)
    assert ours == stock and sum(map(sum, stock)) == 1


@pytest.mark.parametrize("before, after", [([Shard(0)], [R]), ([Partial()], [Shard(0)])])
@pytest.mark.parametrize("rows", [8, 4099])
def test_blocks_that_differ_by_little_are_padded(rows, before, after, monkeypatch):
    """On backends that have the collective; of gloo see test_processes.py."""
    mesh = DeviceMesh("cpu", torch.arange(8))
    seen = []
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        packet = getattr(torch.ops._c10d_functional, name)
        monkeypatch.setattr(
            packet,
            "default",
            lambda *args, op=packet.default, name=name: (seen.append(name), op(*args))[1],
        )
    local = torch.zeros((-(-rows // 8) if before == [Shard(0)] else rows), 3)
    with cute_sharding.enabled(redistribution=True):
        DTensor.from_local(
            local, mesh, before, run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
        ).redistribute(placements=after)
    assert seen == ["all_gather_into_tensor" if after == [R] else "reduce_scatter_tensor"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.uint16, torch.bool])
def test_dry_runs_of_all_dtypes(dtype):
    """A rank with nothing to send, and one with nothing to receive."""
    mesh = DeviceMesh("cpu", torch.arange(8))
    with cute_sharding.enabled(redistribution=True):
        for shape in ((3, 16), (16, 3)):
            for before, after in (
                ([Shard(0)], [Shard(1)]),
                ([Shard(1)], [Shard(0)]),
                ([Shard(0)], [R]),
            ):
                rows = [-(-n // 8) if before == [Shard(d)] else n for d, n in enumerate(shape)]
                tensor = DTensor.from_local(
                    torch.zeros(rows, dtype=dtype),
                    mesh,
                    before,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=(shape[1], 1),
                )
                assert tensor.redistribute(placements=after).to_local().dtype == dtype
    assert dist.get_rank() == 0
