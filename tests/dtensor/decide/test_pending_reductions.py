"""Reductions of which an extreme, a flag or a product is left pending, and what follows them: the
values are those of one device, and no shard is gathered.
"""

import pytest
import torch
from op_programs import S, assert_close
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from cute_sharding.dtensor.bookkeeping.versions import release

REDUCED = {
    "any": (lambda x: (x > 0).any(0), "max"),
    "all": (lambda x: (x > -6).all(0), "min"),
    "any of numbers": (lambda x: (x % 3).to(torch.uint8).any(0), "max"),
    "any, kept": (lambda x: (x > 0).any(0, keepdim=True), "max"),
    "prod": (lambda x: (x / 8).prod(0), "product"),
    "prod of integers": (lambda x: (x % 3 + 1).long().prod(0), "product"),
    "amax": (lambda x: x.amax(0), "max"),
    "amin": (lambda x: x.amin(0), "min"),
}
NORMS = {
    f"norm of order {order}": (lambda x, order=order: torch.linalg.vector_norm(x, order, 0), None)
    for order in (1, 2, 3.5, float("inf"))
}
NEXT = {
    "itself": lambda y: y,
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.float().mean(),
    "as integers": lambda y: y.int(),
    "twice": lambda y: y * 2.0,
    "negative": lambda y: y * -2.0,
    "not": torch.logical_not,
    "or": lambda y: torch.logical_or(y, y.logical_not()),
    "equal": lambda y: y == 1,
    "where": lambda y: torch.where(y.bool(), 1.0, -1.0),
    "any": lambda y: y.any(),
    "all": lambda y: y.all(),
    "greatest": lambda y: y.int().max(),
    "count": torch.count_nonzero,
    "prod": lambda y: y.float().prod(),
    "cat": lambda y: torch.cat([y, y]),
    "sum of a cat": lambda y: torch.cat([y, y]).reshape(2, -1).sum(0),
    "sum of what is no NaN": lambda y: y.float().nansum(),
    "cumsum": lambda y: y.float().reshape(-1).cumsum(0),
    "norm": lambda y: y.float().norm(),
    "mm": lambda y: y.float().reshape(1, -1) @ y.float().reshape(-1, 1),
}


@pytest.mark.one_in(40)
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), [Shard(0)]), ((2,), [S(0)]), ((2, 2), [Shard(0), Shard(1)]), ((4,), [Shard(0)])],
    ids=str,
)
@pytest.mark.parametrize("following", NEXT)
@pytest.mark.parametrize("name", {**REDUCED, **NORMS})
def test_what_follows_counts_each_once(name, following, mesh, placements):
    reduced, go_on = {**REDUCED, **NORMS}[name][0], NEXT[following]
    with plain():
        full = torch.randint(-8, 9, (6, 4), generator=torch.Generator().manual_seed(0)).float()
        wanted = go_on(reduced(full))
    with ranks_of(mesh), cute_sharding.enabled():
        result = go_on(reduced(distribute(full, mesh, placements)))
        assert_close(result, wanted, f"{name}, {following}")


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("placement", [Shard(0), S(0)], ids=str)
def test_nothing_is_gathered_for_them(name, placement):
    reduced, pending = REDUCED[name]
    # Of flags the smallest is their product, which is what torch leaves of a plain shard.
    same = {pending, "product"} if name.startswith("all") else {pending}
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(torch.ones(8, 4), (2,), [placement])
        with CommDebugMode() as communicated:
            assert reduced(x).placements in [(Partial(each),) for each in same]
        assert communicated.get_total_counts() == 0


def flags_like(x):
    """A flag for each column of what is ``x`` here: on ranks, of a DTensor, a replica."""
    with plain():
        flags = torch.zeros(x.shape[1], dtype=torch.bool)
    if not isinstance(x, DTensor):
        return flags
    mesh = tuple(x.device_mesh.shape)
    return distribute(flags, mesh, [Replicate()] * len(mesh))


OF_THE_SUM = {
    "any": lambda x: x.any(0),
    "any of all": lambda x: x.any(),
    "sum, rounded": lambda x: x.sum(0, dtype=torch.int64),
    "sum of all, rounded": lambda x: x.sum(dtype=torch.int32),
    "nansum": lambda x: x.nansum(0),
}
if release() < (2, 14):  # which refuses it of any DTensor, also by itself
    OF_THE_SUM["any, into a tensor"] = lambda x: torch.any(x, 0, out=flags_like(x))


@pytest.mark.parametrize("name", OF_THE_SUM)
@pytest.mark.parametrize(
    "placements", [[Partial(), Shard(0)], [Partial(), Shard(1)], [Partial(), S(0)]], ids=str
)
def test_of_a_sum_that_is_pending_not_of_what_each_device_adds(name, placements):
    with plain():
        parts = [torch.tensor([[2.5, 0.5, torch.inf], [0.5, -1.0, 1.0]]).repeat(2, 1)]
        parts.append(torch.tensor([[0.5, -0.5, -torch.inf], [0.0, 1.0, 1.0]]).repeat(2, 1))
        wanted = OF_THE_SUM[name](parts[0] + parts[1])
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute({rank: parts[rank // 2] for rank in range(4)}, (2, 2), placements)
        assert_close(OF_THE_SUM[name](x), wanted, name)


@pytest.mark.parametrize("ops", [True, False])
def test_a_sum_of_integers_to_integers_stays_pending(ops):
    with ranks_of((2,)), cute_sharding.enabled(ops=ops):
        x = distribute(torch.ones(4, 3, dtype=torch.int32), (2,), [Partial()])
        with CommDebugMode() as communicated:
            assert x.sum(0, dtype=torch.int64).placements == (Partial(),)
        assert communicated.get_total_counts() == 0
