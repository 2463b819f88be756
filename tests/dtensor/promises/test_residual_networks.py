"""Residual networks receive no more than on torch alone, op by op, and compute what one device
does: each op of theirs may leave a debt that all of its readers pay.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import residual_programs
import torch
import torch.nn.functional as F
from op_programs import assert_close
from processes import environment, search_path
from simulation import distribute, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from benchmarks.received import Received

HERE = Path(residual_programs.__file__).parent
FLAGS = ("USE_CUTE_VIEW_PROPAGATION", "USE_CUTE_SHARDING")
R = Replicate()


def received(mesh, first, last, **flags):
    """What each network receives, in a process of its own; None where it raises."""
    command = [sys.executable, str(HERE / "residual_programs.py"), mesh, str(first), str(last)]
    site = search_path(HERE.parent.parent, HERE)
    done = subprocess.run(
        command, env=environment(site, **flags), capture_output=True, text=True, check=True
    )
    lines = map(json.loads, done.stdout.splitlines())
    return {line["seed"]: line.get("bytes") for line in lines}


@pytest.mark.costly
@pytest.mark.parametrize("mesh", ["4"])
def test_none_receives_more_than_on_torch_alone(mesh):
    alone = received(mesh, 0, 12, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    runs = {seed: n for seed, n in alone.items() if n is not None}
    assert len(runs) > 6
    for flag in FLAGS:
        found = received(mesh, 0, 12, **{flag: "1"})
        assert not {seed: (found[seed], n) for seed, n in runs.items() if not found[seed] <= n}


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_of_one_device(seed):
    network = residual_programs.Network(seed, 1)
    with plain():
        wanted, values = network.step(network.values())[1], network.values()
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True, movement=True):
        given = {name: distribute(x, (4,), network.placements[name]) for name, x in values.items()}
        for name, x in network.step(given)[1].items():
            if wanted[name] is not None:
                assert_close(x, wanted[name], name)


@pytest.mark.one_in(1)
def test_a_stream_that_begins_with_picked_rows_is_reduced_once():
    with ranks_of((4,)), cute_sharding.enabled(), CommDebugMode() as communicated:
        table = distribute(number((12, 8)), (4,), [Shard(0)])
        positions, w = (distribute(number((n, 8)), (4,), [R]) for n in (6, 8))
        ids = distribute(torch.arange(6), (4,), [R])
        h = F.embedding(ids, table) * 8**0.5 + positions
        for _ in range(3):
            h = h + F.relu(F.layer_norm(h, (8,)) @ w)
    assert communicated.get_total_counts() == 1
    assert h.placements == (R,)


@pytest.mark.one_in(1)
def test_a_parallel_block_is_reduced_once():
    """As on torch alone: a sum of a replica and of what is pending stays so until it is read."""
    with ranks_of((4,)), cute_sharding.enabled(), CommDebugMode() as communicated:
        x = distribute(number((6, 8)), (4,), [R])
        one, other = (distribute(number((8, 8)), (4,), [Shard(0)]) for _ in range(2))
        y = x + x @ one + x @ other
        assert y.placements == (Partial(),)
        F.layer_norm(y, (8,))
    assert communicated.get_total_counts() == 1


@pytest.mark.one_in(1)
@pytest.mark.parametrize("rows", [4, 8, 24])
def test_attention_of_a_short_sequence_in_shards(rows):
    def attended(q, k, v):
        return (q @ k.t()).softmax(-1) @ v

    def brought():
        given = [distribute(number((rows, 32)) / 99, (4,), [Shard(0)]) for _ in range(3)]
        with Received() as counted:
            result = attended(*given).redistribute(placements=[Shard(0)])
        return max(counted.by_rank.values()), result

    with ranks_of((4,)):
        alone, _ = brought()
        with cute_sharding.enabled():
            here, result = brought()
    assert here <= alone
    assert isinstance(result, DTensor)
