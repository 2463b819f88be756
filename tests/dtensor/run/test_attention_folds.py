"""Attention over a sharded sequence: values and gradients beside one device, on drawn shapes,
placements and masks, and what is received.
"""

import random
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiling import compiled, fresh_compiler, sharded  # noqa: F401
from functorch.compile import make_boxed_func
from op_programs import assert_close
from simulation import distribute, plain, ranks_of
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.run.folds.attention import meeting

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
MASKS = {
    "no mask": None,
    "causal": None,
    "for all": lambda b, h, s, t: (s, t),
    "of keys": lambda b, h, s, t: (b, 1, 1, t),
    "for each": lambda b, h, s, t: (b, h, s, t),
}


def drawn_placements(rng, mesh):
    """Placements of queries, and of keys and values, some of which shard the sequence."""
    kinds = [S2, S2, S2, S1, S0, R, _StridedShard(2, split_factor=2)]
    while True:
        found = [[rng.choice(kinds) for _ in mesh] for _ in range(3)]
        if rng.random() < 0.8:
            found[2] = found[1]
        if any(p in (S2, kinds[-1]) for some in found for p in some):
            return found


def of_mask(placements, mask):
    """Placements of a mask, as those of queries where it has the dim."""
    kept = [p for p in placements]
    short = 4 - mask.ndim
    for m, p in enumerate(kept):
        d = None if p == R else p.dim - short
        fits = d is not None and d >= 0 and mask.shape[d] > 1 and type(p) is Shard
        kept[m] = Shard(d) if fits else R
    return kept


def attend(q, k, v, mask, causal):
    """The result, and the gradients of queries, keys and values."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    return y, *torch.autograd.grad((y * y).sum() + y.sum(), (q, k, v))


def check(shapes, mesh, placements, kind, dtype, rng):
    """Beside one device: an error against float64 that is at most twice as large."""
    b, h, s, _ = shapes[0]
    t = shapes[1][2]
    causal = kind == "causal"
    with plain():
        torch.manual_seed(rng.randrange(1000))
        fulls = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        mask = None
        if MASKS[kind] is not None:
            mask = torch.rand(MASKS[kind](b, h, s, t)) < 0.6
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)
        fulls = [x.to(dtype) for x in fulls]
        mask = None if mask is None else mask.to(dtype)
        exact = attend(
            *(x.double() for x in fulls), None if mask is None else mask.double(), causal
        )
        alone = attend(*fulls, mask, causal)
    case = kind, dtype, shapes, mesh, placements
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        tensors = [distribute(x, mesh, p) for x, p in zip(fulls, placements)]
        given = None if mask is None else distribute(mask, mesh, of_mask(placements[0], mask))
        found = [x.full_tensor() for x in attend(*tensors, given, causal)]
    for each, whole, one in zip(found, exact, alone, strict=True):
        assert each.dtype == one.dtype, case
        for local in each._local_tensors.values():
            with plain():
                error, of_one = ((v.double() - whole).abs() for v in (local, one))
                # What is exact here is of float64 too.
                few = 1024 if dtype == torch.float64 else 8
                slack = torch.finfo(dtype).eps * few * (1 + 2 * whole.abs().max())
                assert error.max() <= 2 * of_one.max() + slack, (case, error.max(), of_one.max())


@pytest.mark.one_in(8)
@pytest.mark.costly
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_values_and_gradients_are_those_of_one_device(kind, dtype):
    """Even and uneven shards, strided ones, several on one dim, devices without rows, shared
    heads; queries without keys.
    """
    rng = random.Random(f"{kind} {dtype}")
    for mesh in [(4,), (2, 3), (2, 2, 2)]:
        for _ in range(3):
            b, h, groups = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
            s, t = rng.choice(
                [(8, 8), (13, 13), (1, 24), (3, 5), (16, 16), (12, 7), (1, 1), (7, 12)]
            )
            shapes = [(b, h * groups, s, 8), (b, h, t, 8), (b, h, t, 8)]
            check(shapes, mesh, drawn_placements(rng, mesh), kind, dtype, rng)


@pytest.mark.parametrize("h", [1, 2, 4])
@pytest.mark.parametrize("mesh", [(3,), (2, 3), (8,)], ids=str)
def test_each_device_has_heads_that_share_keys(mesh, h):
    """On none the kernel divides by zero, which ends the process."""
    rng, placements = random.Random(h), [[S1] * len(mesh)] * 3
    for groups in (2, 4):
        shapes = [(2, h * groups, 6, 8), (2, h, 6, 8), (2, h, 6, 8)]
        check(shapes, mesh, placements, "causal", torch.float64, rng)


# -- what is received ------------------------------------------------------------------------------


def normal(*shape):
    with plain():
        return torch.randn(shape)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_step_of_decoding_receives_its_states(groups, inference):
    """Of each query a maximum, a sum and a weighted result, in two all-reduces."""
    ranks, heads, width, cache = 8, 8, 16, 32_768
    with ranks_of((ranks,)), cute_sharding.enabled(), torch.inference_mode(inference):
        q = distribute(normal(1, heads, 1, width), (ranks,), [R])
        k, v = (
            distribute(normal(1, heads // groups, cache, width), (ranks,), [S2]) for _ in range(2)
        )
        with Received() as counted:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1)
    assert y.placements == (R,)
    states = heads * (width + 2)
    assert counted.collectives == {"all_reduce": 2}
    assert max(counted.by_rank.values()) == 2 * (ranks - 1) * states // ranks


@pytest.mark.one_in(1)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_queries_keys_and_values_in_shards_gather_two(causal):
    """Keys and values in each direction; their gradients are handed out."""
    ranks, shape = 8, (2, 4, 128, 16)
    with ranks_of((ranks,)), cute_sharding.enabled():
        given = [distribute(normal(*shape), (ranks,), [S2], requires_grad=True) for _ in range(3)]
        g = distribute(normal(*shape), (ranks,), [S2])
        with Received() as counted:
            y = F.scaled_dot_product_attention(*given, is_causal=causal)
        one = 4 * 2 * 4 * 128 * 16 * (ranks - 1) // ranks
        assert y.placements == (S2,)
        assert set(counted.bytes_by_rank.values()) == {2 * one}
        with Received() as counted:
            found = torch.autograd.grad(y, given, g)
        assert found[0].placements == (S2,)
        assert [x.placements[0].is_partial() for x in found] == [False, True, True]
        assert set(counted.bytes_by_rank.values()) == {2 * one}


def test_a_shard_moves_to_heads_where_that_is_cheaper():
    """As before queries could stay."""
    shape = (2, 8, 64, 16)
    with ranks_of((8,)), cute_sharding.enabled():
        given = [distribute(normal(*shape), (8,), [S2], requires_grad=True) for _ in range(3)]
        with Received() as counted:
            y = F.scaled_dot_product_attention(*given)
            found = torch.autograd.grad(y, given, torch.ones_like(y))
    assert [x.placements for x in (y, *found)] == [(S1,)] * 4
    assert set(counted.collectives) == {"all_to_all_single"}


def test_shared_heads_of_keys_stay_sharded():
    with ranks_of((4,)), cute_sharding.enabled():
        q = distribute(normal(2, 8, 6, 16), (4,), [S1])
        k = distribute(normal(2, 4, 6, 16), (4,), [S1])
        with Received() as counted:
            y = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert y.placements == (S1,)
    assert not counted.collectives


# -- rows ------------------------------------------------------------------------------------------


def test_queries_meet_each_key_that_is_not_later_once():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randrange(1, 12)

        def drawn():
            cuts = sorted(rng.sample(range(n + 1), min(n + 1, 2 * rng.randrange(1, 4))))
            return [(a, b) for a, b in zip(cuts[::2], cuts[1::2])]

        queries, keys = drawn(), drawn()
        rows, columns = ([row for some in x for row in range(*some)] for x in (queries, keys))
        found = []
        for block in meeting(queries, keys):
            of_q, of_k = rows[slice(*block.queries)], columns[slice(*block.keys)]
            if block.is_causal:
                assert of_q == of_k
            found += [(a, b) for a in of_q for b in of_k if b <= a or not block.is_causal]
        assert sorted(found) == [(a, b) for a in rows for b in columns if b <= a]


def test_many_runs_meet_under_a_mask():
    """Of queries in 64 runs: one kernel with a mask."""
    with ranks_of((2,)), cute_sharding.enabled():
        full = normal(1, 1, 128, 8)
        q, k = (distribute(full, (2,), [p]) for p in (_StridedShard(2, split_factor=64), R))
        with plain():
            wanted = F.scaled_dot_product_attention(full, full, full, is_causal=True)
        assert_close(F.scaled_dot_product_attention(q, k, k, is_causal=True), wanted, "strided")


def test_keys_that_are_zero_count():
    """A kernel gives the logarithm 0 for a key whose score is 0, and for no key at all."""
    with ranks_of((8,)), cute_sharding.enabled():
        with plain():
            q, k, v = torch.randn(1, 1, 3, 4), torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)
            v[:, :, 7] = 1
            mask = torch.zeros(3, 8)
            mask[1, 1:7] = mask[2] = -torch.inf
            wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        q = distribute(q, (8,), [R])
        k, v = (distribute(x, (8,), [S2]) for x in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=distribute(mask, (8,), [S1]))
        assert found.placements == (R,)
        assert_close(found, wanted, "zeros")


# -- compiled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_shows_the_all_reduces_of_states(dynamic, fresh_compiler):  # noqa: F811
    shapes = [[((4, 8, 1, 8), [R]), *[((4, 8, n, 8), [S2])] * 2] for n in (64, 96)]
    found = graphs_of(F.scaled_dot_product_attention, shapes, dynamic)
    assert len(found) == (1 if dynamic else 2)
    assert {name: n for name, n in found[0].items() if "c10d" in name or "cute" in name} == {
        "_c10d_functional.all_reduce.default": 2,
        "_c10d_functional.wait_tensor.default": 2,
    }


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_causal_graph_gathers_two(dynamic, fresh_compiler):  # noqa: F811
    shapes = [[((1, 3, n, 8), [S2])] * 3 for n in (64, 96)]
    program = partial(F.scaled_dot_product_attention, is_causal=True)
    found = graphs_of(program, shapes, dynamic)
    assert len(found) == (1 if dynamic else 2)
    assert found[0]["_c10d_functional.all_gather_into_tensor.default"] == 2
    assert not any("exchange" in name for name in found[0])


def graphs_of(program, shapes, dynamic):
    """The ops in the graphs of calls on tensors of these shapes and placements, whose results are
    those of eager calls.
    """
    nodes = []

    def backend(graph, inputs):
        nodes.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    run = compiled(program, dynamic, aot_autograd(fw_compiler=backend))
    for each in shapes:
        given = [sharded(shape, placements) / 1000 for shape, placements in each]
        found, wanted = run(*given), program(*given)
        assert found.placements == wanted.placements
        assert torch.allclose(found.to_local(), wanted.to_local(), atol=1e-5)
    return nodes
