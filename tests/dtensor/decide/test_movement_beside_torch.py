"""Movement ops beside torch alone: what runs there runs here, with the values of one device, and no
rank receives more.
"""

import random

import pytest
import torch
from beside_torch import LEFT_OUT, is_right, ran
from drawing import draw_placements
from movement_programs import FORWARD, MESHES, PROGRAMS, draw, listed
from op_programs import assert_close, values
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

DRAWS = 1


@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("name", [name for name in (*PROGRAMS, *FORWARD) if name != LEFT_OUT])
def test_never_worse_than_torch(name, world):
    rng = random.Random(f"beside {name} {world}")
    with ranks_of((world,)):
        for _ in range(DRAWS):
            drawn, shape, program = draw(rng, name)
            mesh = rng.choice(MESHES[world])
            placements = draw_placements(rng, mesh, shape)
            case = f"{name} {drawn} of {shape} on {mesh}: {placements}"
            full = values(*shape)
            with plain():
                wanted = listed(program(full.clone()))
            stock, most = ran(program, full, mesh, placements)
            with cute_sharding.enabled(movement=True):
                ours, received = ran(program, full, mesh, placements)
                if isinstance(ours, Exception):
                    assert isinstance(stock, Exception), (case, ours)
                    continue
                for result, want in zip(ours, wanted, strict=True):
                    assert_close(result, want, case)
            if is_right(stock, wanted):
                assert received <= most, (case, received, most)


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("flip", lambda x: x.flip(0)),
        ("flip of all", lambda x: x.flip([0, 1, 2])),
        ("half a turn", lambda x: x.roll(8, 0)),
        ("a row", lambda x: x.roll(1, 0)),
        ("quarter turns", lambda x: torch.rot90(x, 1, [0, 1])),
        ("pad", lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 7, -9))),
        ("slice", lambda x: x[7:]),
        ("put together", lambda x: torch.cat([x, x])),
    ],
)
def test_replicas_are_cut_where_torch_would_receive_less_otherwise(name, program):
    """torch cuts replicas in vain or not; we do where it pays, and never on what is pending."""
    mesh = (2, 2, 2)
    for placements in (
        (Shard(0), Replicate(), Replicate()),
        (Shard(0), Shard(1), Replicate()),
        (Replicate(), Partial("max"), Shard(0)),
        (Partial("avg"), Shard(0), Replicate()),
    ):
        full = values(16, 5, 6)
        wanted = listed(program(full))
        with ranks_of(mesh):
            stock, most = ran(program, full, mesh, placements)
            with cute_sharding.enabled(movement=True):
                ours, received = ran(program, full, mesh, placements)
                assert not isinstance(ours, Exception), (placements, ours)
                for m, p in enumerate(placements):
                    assert not p.is_partial() or ours[0].placements[m] == p
                for result, want in zip(ours, wanted, strict=True):
                    assert_close(result, want, f"{name}: {placements}")
            if is_right(stock, wanted):
                assert received <= most, (placements, received, most)


@pytest.mark.one_in(1)
def test_a_state_of_one_column_costs_no_more_than_on_torch():
    """As NorMuon keeps it: made like a column of a gradient whose columns are cut, followed by the
    mean of each row, and broadcast.
    """

    def step(gradient, state):
        state.lerp_((gradient * gradient).mean(-1, keepdim=True), 0.25)
        return gradient * state.rsqrt()

    def program(gradient):
        state = torch.zeros_like(gradient[..., :1])
        step(gradient, state)
        with CommDebugMode() as collectives:
            result = step(gradient, state)
        return [result, state], collectives.get_total_counts()

    full = values(64, 32)
    with plain():
        wanted, _ = program(full.clone())
    with ranks_of((4,)):
        gradient = distribute(full, (4,), [Shard(1)])
        _, on_torch = program(gradient)
        for settings in ({}, {"redistribution": True}):
            with cute_sharding.enabled(movement=True, **settings):
                results, collectives = program(gradient)
                assert collectives <= on_torch
                for result, want in zip(results, wanted, strict=True):
                    assert_close(result, want, str(settings))
