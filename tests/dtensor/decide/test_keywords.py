"""A tensor that is passed by keyword goes where the op's rule says, whoever wrote the rule."""

import random

import pytest
import torch
from op_programs import S, assert_close, values
from simulation import distribute, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor.experimental import register_sharding

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas

SETTINGS = {"views": {"ops": False}, "ops": {}, "all": {"redistribution": True, "movement": True}}

LIBRARY = torch.library.Library("cute_sharding_keywords", "DEF")
LIBRARY.define("scaled(Tensor x, float a, *, Tensor w, float b=1, Tensor? bias=None) -> Tensor")


def scaled(x, a, *, w, b=1, bias=None):
    y = x * w * (a * b)
    return y if bias is None else y + bias


LIBRARY.impl("scaled", scaled, "CompositeExplicitAutograd")
SCALED = torch.ops.cute_sharding_keywords.scaled.default


def by_rows(x, a, *, w, b=1, bias=None):
    """Rows of x with a whole w; columns of all."""
    r, rest = Replicate(), [] if bias is None else [Replicate()]
    return [
        ([r], [r, None, r, *rest]),
        ([Shard(0)], [Shard(0), None, r, *rest]),
        ([Shard(1)], [Shard(1), None, Shard(1), *[Shard(1) for _ in rest]]),
    ]


def of_one_dim(op, args, kwargs):
    rest = [] if kwargs.get("bias") is None else [0]
    return [
        [Shard(0), Shard(0), Replicate(), *[Replicate() for _ in rest]],
        [Shard(1), Shard(1), Shard(1), *[Shard(1) for _ in rest]],
    ]


RULES = {
    "register_sharding": lambda: register_sharding(SCALED)(by_rows),
    "register_single_dim_strategy": lambda: register_single_dim_strategy(SCALED)(of_one_dim),
}


@pytest.fixture(params=RULES)
def registered(request):
    RULES[request.param]()
    yield
    for table in op_schemas.tables():
        table.pop(SCALED, None)
    op_schemas.clear_propagation_caches()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_by_a_rule_of_the_program(registered, mesh, name):
    rng = random.Random(f"{mesh} {name}")
    x, w, bias = values(6, 8), values(1, 8), values(1, 8) * 3
    of_x, of_row = (Replicate(), Shard(0), Shard(1), S(1, 2)), (Replicate(), Shard(1), S(1, 2))
    with ranks_of(mesh), cute_sharding.enabled(**SETTINGS[name]):
        for _ in range(12):
            places = [[rng.choice(some) for _ in mesh] for some in (of_x, of_row, of_row)]
            placed = [distribute(t, mesh, p) for t, p in zip((x, w, bias), places)]
            found = SCALED(placed[0], 2.0, w=placed[1])
            assert_close(found, scaled(x, 2.0, w=w), f"{places[:2]}")
            found = SCALED(placed[0], 2.0, bias=placed[2], w=placed[1], b=3.0)
            assert_close(found, scaled(x, 2.0, w=w, b=3.0, bias=bias), f"{places}")


@pytest.mark.parametrize("name", SETTINGS)
def test_by_a_rule_of_torchs(name):
    """The tolerances of a pseudoinverse are replicated."""
    x, part = values(4, 3, 3), torch.tensor(0.1)
    wanted = torch.linalg.pinv(x, atol=4 * part, rtol=4 * part)
    assert not torch.allclose(wanted, torch.linalg.pinv(x, atol=part, rtol=part))
    with ranks_of((4,)), cute_sharding.enabled(**SETTINGS[name]):
        for place in (Replicate(), Shard(0)):
            a, pending = distribute(x, (4,), [place]), distribute(part, (4,), [Partial()])
            assert_close(torch.linalg.pinv(a, atol=pending, rtol=pending), wanted, f"{place}")


@pytest.mark.parametrize("name", ["ops", "all"])
def test_by_a_rule_of_ours(name):
    x, order = values(12), values(12).argsort()
    with ranks_of((4,)), cute_sharding.enabled(**SETTINGS[name]):
        for places in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(0))):
            a, by = (distribute(t, (4,), [p]) for t, p in zip((x, order), places))
            wanted = torch.searchsorted(x, values(5), sorter=order)
            sought = distribute(values(5), (4,), [Replicate()])
            assert_close(torch.searchsorted(a, sought, sorter=by), wanted, f"{places}")
