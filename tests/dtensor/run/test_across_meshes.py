"""Redistribution between meshes: on real processes, where each rank sees its own, and with all
ranks in one.
"""

import across_worker
import pytest
import torch
from gloo import run
from simulation import assert_holds, distribute, mesh_of, number, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_sharding


@pytest.mark.processes
@pytest.mark.parametrize("prepared", [False, True])
def test_drawn_pairs_of_meshes(prepared, share, tmp_path):
    run(4, tmp_path, (across_worker.across, 0, share(400, 10), prepared))


@pytest.mark.processes
@pytest.mark.parametrize("prepared", [False, True])
def test_within_the_least_memory(prepared, share, tmp_path):
    run(4, tmp_path, (across_worker.across, 1000, 1000 + share(100, 10), prepared, 0.2, True))


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_programs(tmp_path):
    run(4, tmp_path, *[(program,) for program in across_worker.PROGRAMS])


@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate()] * 2]
)
@pytest.mark.parametrize("before", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_all_ranks_in_one_process(before, placements):
    with ranks_of((4,)):
        full = number((7, 6))
        x = distribute(full, (4,), [before])
        moved = cute_sharding.redistribute(x, mesh_of((2, 2)), placements)
        assert_holds(moved, full * (4 if before == Partial() else 1))


def test_on_one_mesh_it_is_a_redistribution():
    with ranks_of((4,)):
        full = number((7, 6))
        moved = cute_sharding.redistribute(
            distribute(full, (4,), [Shard(0)]), mesh_of((4,)), "S(1)"
        )
        assert_holds(moved, full)
        assert moved.placements == (Shard(1),)


def test_what_does_not_move_is_not_copied():
    with ranks_of((4,)):
        x = distribute(number((8, 6)), (4,), [Shard(0)])
        cute_sharding.stats(reset=True)
        moved = cute_sharding.redistribute(x, mesh_of((2, 2)), [Shard(0), Shard(0)])
        for one, other in zip(*(t._local_tensor._local_tensors.values() for t in (x, moved))):
            assert one.data_ptr() == other.data_ptr()
        counts = cute_sharding.stats()["redistribute"]
        assert counts["plan"] == 1 and counts["collectives"] == 0


def test_the_order_of_memory_stays():
    with ranks_of((4,)):
        x = distribute(number((8, 6)), (4,), [Shard(0)]).t()
        moved = cute_sharding.redistribute(x, mesh_of((2, 2)), [Shard(1), Shard(0)])
        assert moved.stride() == x.stride() == (1, 6)
        assert all(t.stride(0) == 1 for t in moved._local_tensor._local_tensors.values())


def test_errors():
    with ranks_of((4,)):
        x, other = distribute(number((8, 6)), (4,), [Shard(0)]), mesh_of((2, 2))
        with pytest.raises(TypeError, match="takes a DTensor, not LocalTensor"):
            cute_sharding.redistribute(torch.ones(2), other, [Shard(0), Shard(0)])
        with pytest.raises(ValueError, match=r"1 placements .* for a mesh of 2 dims"):
            cute_sharding.redistribute(x, other, [Shard(0)])
        with pytest.raises(ValueError, match="give Shard or Replicate instead of a Partial"):
            cute_sharding.redistribute(x, other, [Shard(0), Partial()])
        with pytest.raises(ValueError, match="is for tensor dim 2"):
            cute_sharding.redistribute(x, other, [Shard(2), Shard(0)])
        wrong = DTensor(x._local_tensor[:1], x._spec, requires_grad=False)
        with pytest.raises(
            RuntimeError, match=r"local tensor has shape \(1, 6\).*give the shape \(2, 6\)"
        ):
            cute_sharding.redistribute(wrong, other, [Shard(1), Shard(0)])
