"""Weights that fully_shard shards once more, over tensor parallelism: each rank of drawn ones as a
fake process group has it; and four processes that read them, and that train.
"""

import pickle

import composed_programs
import pytest
import torch
from gloo import run, spawn
from torch.distributed.tensor import Replicate, Shard, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.door.composed import sharded_again
from cute_sharding.dtensor.replaced.tensor_specs import unbound_spec
from cute_sharding.layout.layout import row_major


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("world", [4, 6])
def test_rows_are_what_placements_say(world, share, tmp_path):
    spawn(composed_programs.as_each_rank, world, world, share(300, 5), str(tmp_path))
    every = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(world)]
    assert all(found == every[0] for found in every)
    assert every[0].count("refused") < len(every[0]) // 4


def spec(shape, placements, sizes, names):
    """On a mesh that is a part of one of ranks 0, 1 and so on."""
    found = unbound_spec(shape, sizes, placements)
    found.mesh._mesh_dim_names = names
    meta = TensorMeta(torch.Size(shape), row_major(shape), torch.float32)
    return DTensorSpec(found.mesh, tuple(placements), meta)


@pytest.mark.parametrize(
    "rows, tp, sizes, found",
    [
        # One part: torch's label is right, also where sizes do not divide.
        (16, Shard(0), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        (7, Shard(0), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        (16, Replicate(), (2, 2), (Shard(0), Replicate())),
        # Whole parts for each device of dp.
        (16, _StridedShard(0, split_factor=2), (2, 2), (Shard(0), Shard(0))),
        (
            24,
            _StridedShard(0, split_factor=4),
            (2, 2),
            (Shard(0), _StridedShard(0, split_factor=2)),
        ),
        # Shares of parts.
        (
            24,
            _StridedShard(0, split_factor=3),
            (2, 2),
            (_StridedShard(0, split_factor=-2), _StridedShard(0, split_factor=3)),
        ),
        (
            32,
            _StridedShard(0, split_factor=2),
            (4, 2),
            (_StridedShard(0, split_factor=-2), _StridedShard(0, split_factor=2)),
        ),
        # One device.
        (16, _StridedShard(0, split_factor=3), (1, 2), None),
    ],
)
def test_placements(rows, tp, sizes, found):
    torchs = _StridedShard(0, split_factor=2) if tp != Replicate() else Shard(0)
    whole = spec((rows, 3), [tp], sizes[1:], ("tp",))
    composed = spec((rows, 3), [torchs, tp], sizes, ("dp", "tp"))
    again = sharded_again(whole, composed, 0, 0)
    assert again.placements == (composed.placements if found is None else found)


REDISTRIBUTION, ALL = (
    {"views": False, "redistribution": True},
    {"redistribution": True, "movement": True},
)


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("settings", [{}, REDISTRIBUTION, ALL])
def test_readers(settings, share, tmp_path):
    run(4, tmp_path, (composed_programs.all_readers_are_right, 0, share(250, 30), settings))


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("settings", [{}, REDISTRIBUTION, ALL])
def test_training(settings, share, tmp_path):
    run(4, tmp_path, (composed_programs.training, settings, share(84, 8)))


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_settings_change_before_training(tmp_path):
    """What torch alone trains, trains under each flag, and with all off again; and torch alone
    refuses to read what it would read wrongly.
    """
    pairs = [(by, by) for by in ({"ops": False}, REDISTRIBUTION, {"movement": True})]
    pairs += [({}, None), ({}, REDISTRIBUTION), (REDISTRIBUTION, {})]
    run(4, tmp_path, (composed_programs.switched_before_it_trains, pairs))


@pytest.mark.parametrize("sizes, rows", [((2, 2), 24), ((2, 2), 7), ((4, 1), 9), ((1, 3), 5)])
def test_random_values_start_at_shards(sizes, rows):
    """An accelerator's random op starts at a multiple of the first rank's number of elements."""
    cut = _StridedShard(0, split_factor=3)
    last = spec((rows, 3), [_StridedShard(0, split_factor=-sizes[1]), cut], sizes, ("dp", "tp"))
    stock = _random._calc_first_shard_size
    plain = spec((rows, 3), [Shard(0), cut], sizes, ("dp", "tp"))
    with cute_sharding.enabled(views=False, redistribution=True):
        assert _random._calc_first_shard_size(plain) == stock(plain)
        found = _random._calc_first_shard_size(last)
    whole = torch.arange(rows)
    of_tp = torch.cat([piece.chunk(sizes[1])[0] for piece in whole.chunk(3)])
    assert found == [len(of_tp.chunk(sizes[0])[0]), 3]
