"""The conversions of examples/refit.py: of whole tensors and by plan, there and back; and that the
weights are those of one model.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulation import ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cute_sharding import plan_refit
from cute_sharding.exchange import Mesh

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
import refit  # noqa: E402

# Even and uneven, more ranks than heads of keys, and as many.
CONFIGS = [
    refit.Config(),
    refit.Config(layers=1, width=10, heads=8, kv_heads=2, head=4, hidden=12, experts=2),
    refit.Config(layers=1, width=7, heads=4, kv_heads=4, head=2, hidden=8, vocabulary=16),
]


def checkpoint_of(config):
    torch.manual_seed(0)
    shapes = refit.checkpoint_shapes(config).items()
    return {name: torch.randn(shape, dtype=torch.float64) / 4 for name, shape in shapes}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_engine_says_what_the_trainer_does(config, ranks):
    """Each rank's part of the weights, one after the other."""
    w = refit.trainer_from_checkpoint(config)(checkpoint_of(config))
    tokens = torch.randint(config.vocabulary, (5,), generator=torch.Generator().manual_seed(1))
    fused = refit.engine_from_trainer(config, ranks)(w)
    parts = [
        {name: part_of(x, refit.in_engine(name, x)[0], k, ranks) for name, x in fused.items()}
        for k in range(ranks)
    ]
    logits = together(config, parts, tokens)
    assert torch.allclose(logits, refit.trainers_logits(config, w, tokens))


def part_of(x, placement, k, ranks):
    return x.chunk(ranks, placement.dim)[k] if isinstance(placement, Shard) else x


class Waiting(Exception):
    """A rank waits for the others."""


def together(config, parts, tokens):
    """All ranks in this process: what is added up is worked out from sum to sum."""
    sums = []
    while True:
        terms = []
        for rank, w in enumerate(parts):
            known = iter(sums)

            def add(x, known=known, terms=terms):
                found = next(known, None)
                if found is None:
                    terms.append(x)
                    raise Waiting
                return found

            try:
                terms.append(refit.engines_logits(config, w, tokens, rank, len(parts), add))
            except Waiting:
                continue
            if rank == len(parts) - 1:
                return torch.cat(terms, -1)[:, : config.vocabulary]
        sums.append(sum(terms))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("config", CONFIGS)
def test_there_and_back_by_plan(config):
    with ranks_of((4,)):
        trainer, engine = DeviceMesh("cpu", torch.arange(4)), DeviceMesh("cpu", torch.arange(4))
        whole = checkpoint_of(config)
        state = {
            name: distribute_tensor(x, trainer, [Shard(x.ndim - 1)]) for name, x in whole.items()
        }
        names = refit.trainer_from_checkpoint(config)
        first = plan_refit(names, state, {"*": (trainer, [Shard(0)])})
        second = plan_refit(
            refit.engine_from_trainer(config, 4),
            trained := first.run(state),
            lambda name, x: (engine, refit.in_engine(name, x)),
        )
        fused = second.run(trained)
        straight = plan_refit(
            refit.engine_from_checkpoint(config, 4),
            state,
            lambda name, x: (engine, refit.in_engine(name, x)),
        )
        same = straight.run(state)
        for name, x in refit.engine_from_trainer(config, 4)(names(whole)).items():
            for found in (fused, same):
                assert torch.equal(found[name].full_tensor(), x), name
        back = first.inverse().run(second.inverse().run(fused))
        for found in (back, straight.inverse().run(same)):
            for name, x in whole.items():
                assert tuple(found[name].placements) == tuple(state[name].placements)
                assert torch.equal(found[name].full_tensor(), x), name


def test_all_bytes_go_straight():
    plan = refit.plan_of_specs(refit.Config(), Mesh((2,), (0, 1)), Mesh((2,), (2, 3)))
    assert plan.coverage == 1.0 and not plan.unread and plan.collectives == 1
    needed = {2: 0, 3: 0}
    for spec in plan.target.values():
        for rank in needed:
            share = 2 if any(isinstance(p, Shard) for p in spec.placements) else 1
            assert isinstance(spec.placements[0], (Shard, Replicate))
            needed[rank] += torch.Size(spec.shape).numel() * 4 // share
    padding = {2: 0, 3: 2 * 3 * 24 * 4}  # of both vocabularies, at their end
    assert all(plan.received_by(rank) == needed[rank] - padding[rank] for rank in needed)


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_the_program():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "refit.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "the engine's logits are the trainer's" in done.stdout
