"""One rank of four of a compiled program whose graphs are kept on disk: ``graphs_on_disk.py RANK``.

It is switched on by the environment, before there is a process group.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANK, ROWS = int(sys.argv[1]), (2, 2, 2, 1)
# What else an empty cache would be filled with first takes far longer than the graph.
QUICK = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}

dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=4)
mesh = init_device_mesh("cpu", (4,))
local = torch.arange(ROWS[RANK] * 5.0).view(-1, 5)
x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(7, 5), stride=(5, 1))
with torch._inductor.config.patch(QUICK):
    result = torch.compile(lambda x: x * 2 + 1, dynamic=False)(x)
assert torch.equal(result.to_local(), local * 2 + 1)
