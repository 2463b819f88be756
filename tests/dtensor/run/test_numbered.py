"""Rows by number: ops that take or write rows that an index names, and searches for the greatest,
beside one device, on drawn shapes and placements.
"""

import random
from math import prod

import pytest
import torch
import torch.nn.functional as F
from simulation import distribute, finished, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.run.numbered import numbers_of, own_rows
from cute_sharding.sharding.rows import local_size

MESHES = [(4,), (2, 3), (2, 2, 2), (8,), (1, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int8]
ON = {"redistribution": True, "movement": True}


def placed(rng, mesh, ndim):
    def one():
        d = rng.randrange(ndim)
        return rng.choice([Shard(d), Shard(d), Replicate(), _StridedShard(d, split_factor=2)])

    return [one() if ndim else Replicate() for _ in mesh]


def drawn(rng):
    """A mesh, a tensor, one of its dims."""
    shape = tuple(rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.choice([1, 2, 3])))
    x = torch.randint(-3, 4, shape).to(rng.choice(DTYPES))
    return rng.choice(MESHES), x, rng.randrange(len(shape))


def assert_same(found, wanted, case):
    """Every rank has what one device has."""
    for local in found._local_tensors.values():
        with plain():
            assert (local.dtype, local.shape) == (wanted.dtype, wanted.shape), case
            if wanted.is_floating_point():
                local, wanted = local.nan_to_num(77.0), wanted.nan_to_num(77.0)
            assert torch.equal(local, wanted), case


def numbers(n, *shape, back=False):
    return torch.randint(-n if back else 0, n, shape)


def at(d, *index):
    return (slice(None),) * d + index


def operands(name, rng, x, d):
    """An op of this name along dim d, and its operands."""
    n, k = x.shape[d], rng.choice([1, 2, 4, 7])
    rows = tuple(k if e == d else m for e, m in enumerate(x.shape))
    fewer = tuple(k if e == d else rng.randint(1, m) for e, m in enumerate(x.shape))
    few = torch.randperm(n)[: min(k, n)]  # each row once: the order of writes is nobody's
    once = tuple(len(few) if e == d else m for e, m in enumerate(x.shape))

    def values(*shape):
        return torch.randint(-3, 4, shape).to(x.dtype)

    how, own = rng.choice(["sum", "prod", "amax", "amin", "mean"]), rng.random() < 0.5
    return {
        "index_select": (lambda x, t: x.index_select(d, t), [numbers(n, k)]),
        "gather": (lambda x, t: x.gather(d, t), [numbers(n, *fewer)]),
        "take_along_dim": (lambda x, t: x.take_along_dim(t, d), [numbers(n, *rows)]),
        "x[t]": (
            lambda x, t: x[at(d, t)],
            [numbers(n, *rng.choice([(k,), (2, k), ()]), back=True)],
        ),
        "x[s, t]": (
            lambda x, s, t: x.reshape(-1, x.shape[-1])[s, t],
            [numbers(prod(x.shape[:-1]), k, 1), numbers(x.shape[-1], 3, back=True)],
        ),
        "index_add": (lambda x, t, y: x.index_add(d, t, y), [numbers(n, k), values(*rows)]),
        "index_copy": (lambda x, t, y: x.index_copy(d, t, y), [few, values(*once)]),
        "index_fill": (lambda x, t: x.index_fill(d, t, 1), [numbers(n, k)]),
        "scatter": (lambda x, t: x.scatter(d, t, 1), [numbers(n, *fewer)]),
        "scatter_add": (
            lambda x, t, y: x.scatter_add(d, t, y),
            [numbers(n, *fewer), values(*fewer)],
        ),
        "scatter_add_": (
            lambda x, t, y: x.clone().scatter_add_(d, t, y),
            [numbers(n, *fewer), values(*fewer)],
        ),
        "scatter_reduce": (
            lambda x, t, y: x.scatter_reduce(d, t, y, how, include_self=own),
            [numbers(n, *fewer), values(*fewer)],
        ),
        "index_put": (
            lambda x, t, y: x.index_put((t,), y, accumulate=True),
            [numbers(x.shape[0], k, back=True), values(k, *x.shape[1:])],
        ),
        "index_put, one value": (
            lambda x, t, y: x.index_put((t,), y),
            [numbers(x.shape[0], k), values()],
        ),
        "x[t] = y": (lambda x, t, y: written(x.clone(), at(d, t), y), [few, values()]),
    }[name]


def written(x, index, value):
    x[index] = value
    return x


NAMES = [
    *("index_select", "gather", "take_along_dim", "x[t]", "x[s, t]", "index_add", "index_copy"),
    *("index_fill", "scatter", "scatter_add", "scatter_add_", "scatter_reduce", "index_put"),
    *("index_put, one value", "x[t] = y"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_rows_by_number_are_those_of_one_device(name):
    rng = random.Random(name)
    torch.manual_seed(len(name))
    for _ in range(8):
        with plain():
            mesh, x, d = drawn(rng)
            function, others = operands(name, rng, x, d)
            wanted = function(x, *others)
        places = [placed(rng, mesh, each.ndim) for each in (x, *others)]
        with ranks_of(mesh), cute_sharding.enabled(**ON):
            given = [distribute(each, mesh, some) for each, some in zip((x, *others), places)]
            found = function(*given).full_tensor()
        assert_same(found, wanted, (name, mesh, x.shape, d, places))


SEARCHES = {
    "argmax": lambda x, d, keeps: [x.argmax(d, keeps)],
    "argmin": lambda x, d, keeps: [x.argmin(d, keeps)],
    "max": lambda x, d, keeps: x.max(d or 0, keeps),
    "min": lambda x, d, keeps: x.min(d or 0, keeps),
    "aminmax": lambda x, d, keeps: torch.aminmax(x, dim=d, keepdim=keeps),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_find_what_one_device_finds(name):
    """The first of equal ones, of NaN before all, of -0. as of 0., also over all dims at once."""
    rng = random.Random(name)
    torch.manual_seed(len(name))
    for _ in range(12):
        with plain():
            mesh, x, d = drawn(rng)
            if x.is_floating_point():
                odd = rng.choice([float("nan"), float("inf"), -float("inf"), -0.0])
                x = torch.where(torch.rand(x.shape) < 0.2, torch.tensor(odd, dtype=x.dtype), x)
            d, keeps = rng.choice([None, d, d - x.ndim]), rng.random() < 0.5
            wanted = SEARCHES[name](x, d, keeps)
        places = placed(rng, mesh, x.ndim)
        with ranks_of(mesh), cute_sharding.enabled(**ON):
            found = SEARCHES[name](distribute(x, mesh, places), d, keeps)
            full = [each.full_tensor() for each in found]
        for each, one in zip(full, wanted, strict=True):
            assert_same(each, one, (name, mesh, x, d, places))


def test_a_number_and_its_place_travel_together():
    with ranks_of((8,)), cute_sharding.enabled(**ON):
        x = distribute(torch.randn(64, 512), (8,), [Shard(1)])
        with Received() as received:
            x.max(1)
        assert received.collectives == {"all_reduce": 1} and received.most == 896
        with Received() as received:
            x.double().argmax(1)
        assert received.collectives == {"all_reduce": 2} and received.most == 2 * 896


def test_written_rows_are_not_sent():
    with ranks_of((8,)), cute_sharding.enabled(**ON):
        x = distribute(torch.randn(512, 64), (8,), [Shard(0)])
        t = distribute(torch.randint(0, 512, (8,)), (8,), [Replicate()])
        y = distribute(torch.randn(8, 64), (8,), [Replicate()])
        with Received() as received:
            x[t] = y
            x.index_add(0, t, y)
            x.scatter_add(0, t[:, None].expand(8, 64), y)
        assert not received.collectives
        with Received() as received:
            finished(x[t])
        assert received.collectives == {"all_reduce": 1} and received.most == 8 * 64 * 4 * 2 * 7 / 8
        many = distribute(torch.randint(0, 512, (512,)), (8,), [Replicate()])
        with Received() as received:
            finished(x[many])
        assert received.most < 64 * 512 * 4  # the shard moves to the other dim


@pytest.mark.parametrize("op", ["index", "index_add", "gather"])
def test_a_row_that_is_not_there_is_an_error_on_each_rank(op):
    with ranks_of((4,)), cute_sharding.enabled(**ON):
        x = distribute(torch.randn(8, 3), (4,), [Shard(0)])
        t = distribute(torch.tensor([2, 8]), (4,), [Replicate()])
        y = distribute(torch.ones(2, 3), (4,), [Replicate()])
        with pytest.raises(IndexError, match="index 8 is out of bounds: there are 8 rows"):
            match op:
                case "index":
                    x[t]
                case "index_add":
                    x.index_add(0, t, y)
                case "gather":
                    x.gather(0, t[:, None])
        with pytest.raises(IndexError, match="index -1 is out of bounds"):
            x.index_select(0, t - 3)


def test_the_numbers_of_rows_are_read_back():
    rng = random.Random(0)
    for _ in range(300):
        n = rng.randrange(1, 40)
        chain = tuple(
            (rng.choice([1, 1, 2, 3, 7]), rng.choice([1, 2, 3, 4]), m)
            for m in range(rng.choice([1, 2, 3]))
        )
        device = [rng.randrange(parts) for _, parts, _ in chain]
        own, count, is_own = own_rows(torch.arange(n), n, chain, device)
        size = n
        for factor, parts, m in chain:
            size = local_size(size, factor, parts, device[m])
        assert count == size == int(is_own.sum())
        assert own[is_own].tolist() == list(range(size))
        rows = torch.arange(n)[is_own]
        assert numbers_of(torch.arange(size), n, chain, device).tolist() == rows.tolist()


# An op on rows that an index picked (x), which are pending by a mask, beside others (r).
AFTER_PICKED = {
    "cat": lambda x, r: torch.cat([r, x], 1),
    "cat with a product": lambda x, r: torch.cat([x, x * 2]),
    "cat of picked": lambda x, r: torch.cat([x, x.flip(0)]),
    "stack": lambda x, r: torch.stack([x, r]),
    "hstack": lambda x, r: torch.hstack([r, x]),
    "where": lambda x, r: torch.where(r > 0, x, r),
    "lerp": lambda x, r: torch.lerp(r, x, 0.5),
    "addcmul": lambda x, r: torch.addcmul(r, x, x),
    "add_": lambda x, r: x.clone().add_(r),
    "mul_": lambda x, r: x.clone().mul_(2).add_(1),
    "add to": lambda x, r: r.clone().add_(x),
    "copy_": lambda x, r: torch.zeros_like(r).copy_(x),
    "copy to": lambda x, r: x.clone().copy_(r),
    "into a slice": lambda x, r: torch.slice_scatter(r, x[:2], 0, 1, 3),
    "foreach": lambda x, r: torch._foreach_add([x, r], [r, x])[0],
    "foreach mul": lambda x, r: torch._foreach_mul([x, r], 3.0)[0] + 1,
    "index_put": lambda x, r: r.index_put((x.argsort(0)[:, 0],), x, accumulate=True),
    "index_add": lambda x, r: r.index_add(0, x.argsort(0)[:, 0], x),
    "masked_fill": lambda x, r: x.masked_fill(r > 0, 1.0),
    "masked_scatter": lambda x, r: r.masked_scatter(r > 0, x),
    "clamp": lambda x, r: x.clamp(max=r),
    "matmul": lambda x, r: x @ r.t(),
    "baddbmm": lambda x, r: torch.addmm(x, r, r.t()[:, :3]),
    "pad": lambda x, r: F.pad(x, (1, 0), value=2.0),
    "repeat": lambda x, r: x.repeat(2, 1),
    "expand": lambda x, r: x[:, None].expand(-1, 2, -1) * r[:, None],
    "sort": lambda x, r: x.sort(1)[0],
    "softmax": lambda x, r: x.softmax(1),
    "cumsum": lambda x, r: x.cumsum(0),
    "norm": lambda x, r: x.norm(dim=1),
    "isnan": lambda x, r: x.isnan().logical_or(r > 0),
    "mse_loss": lambda x, r: F.mse_loss(x, r),
    "layer_norm": lambda x, r: F.layer_norm(x, (3,), r[0], r[1]),
    "einsum": lambda x, r: torch.einsum("ij,kj->ik", x, r),
}


@pytest.mark.parametrize("name", AFTER_PICKED)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_what_follows_picked_rows(name, mesh):
    program = AFTER_PICKED[name]
    torch.manual_seed(1)
    table, beside, rows = torch.randn(5, 3), torch.randn(4, 3), torch.tensor([0, 4, 2, 1])
    for pick in (lambda x, i: x.index_select(0, i), lambda x, i: F.embedding(i, x)):
        wanted = program(pick(table, rows), beside)
        for held in ([Replicate()], [Shard(0)], [Shard(1)]):
            with ranks_of(mesh), cute_sharding.enabled(**ON):
                x, i = (
                    distribute(one, mesh, [place] * len(mesh))
                    for one, place in ((table, Shard(0)), (rows, Replicate()))
                )
                r = distribute(beside, mesh, held * len(mesh))
                found = program(pick(x, i), r).full_tensor()
            for local in found._local_tensors.values():
                torch.testing.assert_close(local, wanted)
