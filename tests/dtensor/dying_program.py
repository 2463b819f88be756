"""A plan of which one rank dies half way, as test_reshard.py runs it."""

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from reshard_programs import ids
from reshard_worker import mesh_of
from torch.distributed.tensor import Shard, distribute_tensor

import cute_sharding
from cute_sharding.dtensor.run import runner


def one_dies_half_way(rank, world, rendezvous, folder):
    """The last rank dies before it has the second of several buckets. The others get an error
    within the backend's timeout, and each tensor is as it was or has moved wholly, as that says.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=10),
    )
    line, full = mesh_of((world,), range(world)), ids(64, 64)
    state = {f"w{i}": distribute_tensor(full + i, line, [Shard(0)]) for i in range(8)}
    plan = cute_sharding.plan_reshard(state, "S(1)", memory_limit=12 * full.nbytes // world)
    assert len(plan.packed) > 3
    plan.run(dict(state))  # connections are made
    dist.barrier()
    land, landed = runner.Flight.land, []

    def dying(flight, arrived):
        landed.append(flight)
        if len(landed) == 2 and rank == world - 1:
            os._exit(0)
        land(flight, arrived)

    begin, failed = time.monotonic(), None
    with patch.object(runner.Flight, "land", dying):
        try:
            plan.run(state)
        except RuntimeError as error:
            failed = error
    took = time.monotonic() - begin
    for i, (name, x) in enumerate(state.items()):
        d = 1 if name in failed.moved else 0
        assert x.placements == (Shard(d),)
        assert torch.equal(x.to_local(), (full + i).chunk(world, d)[rank])
    assert {*failed.moved, *failed.left} == {*state} and failed.left
    Path(folder, str(rank)).write_text(f"{type(failed).__name__} {took < 20} {bool(failed.moved)}")
    os._exit(0)  # what is left of the group cannot be taken down in order
