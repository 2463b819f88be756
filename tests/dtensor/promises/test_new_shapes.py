"""Programs whose shapes are new at every step keep no more than with PyTorch alone."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,))


def step(n):
    x = DTensor.from_local(torch.zeros(n, 8), mesh, [Shard(0)], run_check=False)
    torch.cat([x[1:], x]).sum()
    x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])


def objects():
    gc.collect()
    return len(gc.get_objects())


for n in range(5, 25):
    step(n)
before = objects()
for n in range(25, 25 + STEPS):
    step(n)
print(objects() - before)
"""


def kept(steps, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("STEPS", str(steps))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.costly
def test_new_shapes_keep_as_much_as_with_torch_alone():
    alone = kept(1000, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert alone > 50_000
    assert kept(1000, USE_CUTE_SHARDING="1") <= 1.1 * alone
