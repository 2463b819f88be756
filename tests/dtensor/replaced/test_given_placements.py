"""Functions of torch that raise for placements other than they are told: given what slices and
views leave cut here, and torch's own replicate, they go on as on torch.
"""

import given_placements_worker
import pytest
import torch
from gloo import run
from op_programs import values
from simulation import assert_holds, distribute, mesh_of, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_sharding

pytestmark = pytest.mark.processes


def test_loss_parallel_of_next_tokens(tmp_path):
    run(4, tmp_path, (given_placements_worker.next_tokens,))


def test_local_map_of_what_stays_cut(tmp_path):
    run(4, tmp_path, (given_placements_worker.mapped,))


def test_local_map_of_uneven_shards(tmp_path):
    run(4, tmp_path, (given_placements_worker.mapped_unevenly,))


def test_distributing_what_stays_cut():
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(12, 3), (4,), [Shard(0)])
        rows = x[1:10]
        assert rows.placements == (Shard(0),)
        for placements in (None, [Replicate()]):
            replica = distribute_tensor(rows, x.device_mesh, placements)
            assert replica.placements == (Replicate(),)
            assert_holds(replica, values(12, 3)[1:10])
        assert distribute_tensor(rows, x.device_mesh, [Shard(0)]) is rows
        with pytest.raises(ValueError, match="different placements"):
            distribute_tensor(rows, x.device_mesh, [Shard(1)])


def test_distributing_what_stays_cut_in_a_compiled_program():
    """Dynamo follows the code of distribute_tensor."""
    mesh = mesh_of((4,))
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    with cute_sharding.enabled():
        program = torch.compile(
            lambda x: distribute_tensor(x, mesh, [Replicate()]) + 1, backend="eager", fullgraph=True
        )
        assert program(x).placements == (Replicate(),)
    torch._dynamo.reset()
