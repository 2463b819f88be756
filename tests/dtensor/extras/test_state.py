"""Checkpoints, state dicts, local tensors and pictures of tensors of any placements, over gloo."""

import pytest
import state_worker
import torch
from gloo import run
from simulation import mesh_of
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

pytestmark = pytest.mark.processes


@pytest.mark.costly
@pytest.mark.parametrize("seed", [0, 1])
def test_checkpoints(seed, tmp_path):
    run(4, tmp_path, (state_worker.checkpoints, str(tmp_path), seed, 12))


def test_state_dicts(share, tmp_path):
    run(
        4,
        tmp_path,
        (state_worker.state_dicts, str(tmp_path)),
        (state_worker.on_meta, str(tmp_path)),
        (state_worker.round_trips, str(tmp_path), 0, share(20, 3)),
    )


def test_pictures(tmp_path):
    run(2, tmp_path, (state_worker.pictures, str(tmp_path)))


def test_pictures_have_a_box_for_each_run(monkeypatch):
    """Also of the function as a program has it by name; with rich, which is there for our own."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from torch.distributed.tensor.debug import _visualize_sharding, visualize_sharding

    drawn = []
    monkeypatch.setattr(
        _visualize_sharding, "_create_rich_table", lambda shape, shards, **_: drawn.append(shards)
    )
    with cute_sharding.enabled():
        x = DTensor.from_local(torch.ones(4), mesh_of((2,)), [_StridedShard(0, split_factor=2)])
        visualize_sharding(x, use_rich=True)
    column = 0, 0
    runs = [((0, 1), 0), ((4, 5), 0), ((2, 3), 1), ((6, 7), 1)]
    assert drawn == [[(rows, column, rank) for rows, rank in runs]]
