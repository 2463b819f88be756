"""Pointwise ops of strided shards of which something is pending: the values are those of one
device, what is linear stays pending, and no shard is gathered.
"""

import random

import pytest
import torch
from drawing import draw_placements
from op_programs import S, assert_close
from simulation import distribute, number, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

OPS = {
    "add": lambda x, y: x + y,
    "add, by a factor": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "add a number": lambda x, y: x + 1,
    "mul by a number": lambda x, y: x * 2,
    "from a number": lambda x, y: 1 - x,
    "relu": lambda x, y: x.relu(),
    "neg": lambda x, y: -x,
}


def drawn(rng, shape, mesh):
    """A tensor's placements, at least one of them pending in one way; and what each rank
    contributes to which whole tensor.
    """
    kind = rng.choice(("sum", "avg", "max"))
    placements = list(draw_placements(rng, mesh, shape))
    pending = rng.randrange(len(mesh))
    placements[pending] = Partial(kind)
    world = torch.Size(mesh).numel()
    inner = torch.Size(mesh[pending + 1 :]).numel()
    with plain():
        whole = torch.tensor([rng.choice((-3, -2, -1, 1, 2, 5)) for _ in range(world)])
        numel = torch.Size(shape).numel()
        whole = (torch.arange(float(numel)).reshape(shape) * 5 % 7 - 3.5) * whole[0]
        parts = {}
        for rank in range(world):
            place, n = rank // inner % mesh[pending], mesh[pending]
            if kind == "sum":
                parts[rank] = whole * (2 - n if place == 0 else 1)
            elif kind == "avg":
                parts[rank] = whole * (1 + place - (n - 1) / 2)
            else:
                parts[rank] = whole - 3 * (place != 0)
    return whole, parts, placements


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_values(name, mesh):
    rng = random.Random(f"pending {name} {mesh}")
    for shape in ((6, 4), (5, 3), (3, 2, 4)):
        (x, of_x, at_x), (y, of_y, at_y) = (drawn(rng, shape, mesh) for _ in range(2))
        if rng.random() < 0.3:
            at_y, of_y, y = at_x, of_x, x
        with plain():
            expected = OPS[name](x, y)
        with ranks_of(mesh), cute_sharding.enabled():
            got = OPS[name](distribute(of_x, mesh, at_x), distribute(of_y, mesh, at_y))
            assert_close(got, expected, f"{name} of {shape}, {at_x}, {at_y}")


def test_what_is_linear_stays_pending():
    placements = [S(1), Partial()]
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute(torch.ones(4, 4), (2, 2), placements)
        y = distribute(torch.ones(4, 4), (2, 2), [S(1), Replicate()])
        with CommDebugMode() as communication:
            assert list((x + x).placements) == placements
            assert list((x + y).placements) == placements
            assert list((x * y).placements) == placements
            assert list((x / y).placements) == placements
        assert communication.get_total_counts() == 0


def test_strided_shards_are_not_gathered():
    """torch, asked, replicates everything, after a search that may take minutes."""
    with ranks_of((2, 1, 2)), cute_sharding.enabled():
        x = distribute(torch.ones(6, 8), (2, 1, 2), [S(1), Shard(0), Partial()])
        y = distribute(torch.ones(6, 8), (2, 1, 2), [Replicate(), S(0), S(0)])
        assert list(x.relu().placements) == [S(1), Shard(0), Shard(0)], "reduced, and scattered"
        assert S(1) in torch.where(x > 0, x, y).placements


def test_a_view_of_what_stays_cut_redistributes():
    """torch 2.13 replicates to clone what is pending and strided. Newer ones keep it cut, and raise
    in the view of the clone.
    """
    with plain():
        x = number((12, 7))
        expected = x.repeat_interleave(3, 0)
    with ranks_of((2, 2, 2)):
        given = distribute(x / 2, (2, 2, 2), [Partial(), Shard(1), S(0, 4)])
        if given.clone().placements == given.placements:
            with pytest.raises(RuntimeError):
                given.repeat_interleave(3, 0)
        with cute_sharding.enabled():
            assert_close(given.repeat_interleave(3, 0), expected, "repeated")
