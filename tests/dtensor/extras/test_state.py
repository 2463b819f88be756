"""Checkpoints, state dicts, local tensors and pictures of tensors of any placements, over gloo."""

import random
from itertools import product

import pytest
import state_worker
import torch
from gloo import spawn
from simulation import mesh_of
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.sharding.blocks import blocks
from cute_sharding.sharding.deal import rows

pytestmark = pytest.mark.processes


def run(world, folder, *jobs):
    spawn(state_worker.several, world, world, str(folder / "rendezvous"), *jobs)


@pytest.mark.parametrize("seed", [0, 1])
def test_checkpoints(seed, tmp_path):
    run(4, tmp_path, ("checkpoints", str(tmp_path), seed, 12))


def test_state_dicts(tmp_path):
    run(
        4,
        tmp_path,
        ("state_dicts", str(tmp_path)),
        ("on_meta", str(tmp_path)),
        ("round_trips", str(tmp_path), 0, 20),
    )


def test_pictures(tmp_path):
    run(2, tmp_path, ("pictures", str(tmp_path)))


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


def test_blocks_are_what_a_device_holds():
    """Against index arrays: the blocks of each device, put where they say, are its local tensor."""
    rng = random.Random(3)
    for _ in range(200):
        shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
        mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 2)))
        chains = [[] for _ in shape]
        for m in range(len(mesh)):
            if shape and rng.random() < 0.8:
                chains[rng.randrange(len(shape))].append((m, rng.randint(1, 4)))
        full = torch.arange(max(torch.Size(shape).numel(), 0)).reshape(shape)
        for device in product(*map(range, mesh)):
            found = [[(factor, mesh[m], device[m]) for m, factor in chain] for chain in chains]
            local = full
            for d, chain in enumerate(found):
                local = local.index_select(
                    d,
                    torch.tensor(
                        [
                            row
                            for start, stop in rows(shape[d], chain)
                            for row in range(start, stop)
                        ],
                        dtype=torch.long,
                    ),
                )
            put = torch.full_like(local, -1)
            for block in blocks(shape, found):
                here, there = (
                    tuple(slice(start, start + size) for start, size in zip(starts, block.sizes))
                    for starts in (block.places, block.offsets)
                )
                assert (put[here] == -1).all()
                put[here] = full[there]
            assert torch.equal(put, local)
