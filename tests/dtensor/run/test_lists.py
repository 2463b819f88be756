"""Lists of tensors are redistributed together: what each rank comes to hold is what it holds of
each tensor by itself, each receives as much, and over the same mesh dims it is one collective.
"""

import random
from collections import Counter
from weakref import WeakKeyDictionary

import lists_worker
import pytest
import simulation
import torch
from drawing import draw_placements, draw_shape
from gloo import run
from simulation import (
    assert_holds,
    distribute,
    number,
    plain,
    ranks_of,
    watched_wire,
)
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run import groups
from cute_sharding.dtensor.run.lists import LocalMove, redistribute_all
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# what fills up messages, which end at a multiple of the widest element
GAPS = 7 * 15
GATHER = "c10d_functional.all_gather_into_tensor"
MESHES = [(2,), (3,), (4,), (1, 2), (2, 2), (2, 3), (2, 2, 2)]
SUMMED = [torch.float32, torch.float64, torch.int64]
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8),
    *(torch.bool, torch.complex64, torch.complex128),
]


def of(shape, mesh, before, dtype):
    with plain():
        full = (number(shape) % 100).to(dtype)
    return distribute(full, mesh, before)


def wanted(tensor, after):
    spec = tensor._spec
    target = DTensorSpec(spec.mesh, tuple(after), tensor_meta=spec.tensor_meta)
    return LocalMove(tensor._local_tensor, spec, target)


def draw(rng, mesh):
    """A shape, a dtype, and placements before and after."""
    shape = () if rng.random() < 0.1 else draw_shape(rng)
    chance = rng.choice([0, 0, 0, 0.3])
    before = [Partial() if rng.random() < chance else R for _ in mesh]
    after = [R for _ in mesh]
    if shape:
        before = draw_placements(rng, mesh, shape, pending="sum", chance=chance)
        after = before if rng.random() < 0.2 else draw_placements(rng, mesh, shape)
    return shape, rng.choice(SUMMED if chance else DTYPES), before, after


def received_bytes(wire):
    totals = Counter()
    for dtype, received in wire:
        totals.update({rank: n * dtype.itemsize for rank, n in received.items()})
    return +totals


@pytest.fixture(params=[True, False], ids=["one group", "no groups"])
def has_groups(request, monkeypatch):
    """Whether there are groups of several mesh dims."""
    if not request.param:
        monkeypatch.setattr(groups, "_groups", WeakKeyDictionary())
        monkeypatch.setattr(cute_sharding, "prepare_groups", lambda mesh: None)
        simulation._mesh_of.cache_clear()
    groups._at_hand.cache_clear()
    yield request.param
    groups._at_hand.cache_clear()
    simulation._mesh_of.cache_clear()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_is_what_it_is_by_itself(mesh, has_groups, monkeypatch):
    rng = random.Random(f"lists {mesh}")
    fewer = 0
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for _ in range(10):
            drawn = [draw(rng, mesh) for _ in range(rng.randint(4, 9))]
            some = [
                wanted(of(shape, mesh, before, dtype), after)
                for shape, dtype, before, after in drawn
            ]
            with watched_wire(monkeypatch) as alone, CommDebugMode() as one_by_one:
                expected = [redistribute_local_tensor(*one) for one in some]
            cute_sharding.stats(reset=True)
            with watched_wire(monkeypatch) as wire, CommDebugMode() as at_once:
                moved = redistribute_all(some)
            for got, single, case in zip(moved, expected, drawn, strict=True):
                assert_alike(got, single, case)
            most = received_bytes(alone)
            assert all(n <= most[rank] + GAPS for rank, n in received_bytes(wire).items()), drawn
            count = at_once.get_total_counts()
            assert cute_sharding.stats().get("redistribute", {}).get("collectives", 0) == count
            assert count <= one_by_one.get_total_counts()
            fewer += one_by_one.get_total_counts() - count
    assert fewer > 4 or mesh == (1, 2)


def assert_alike(got, wanted, case):
    for rank, part in wanted._local_tensors.items():
        other = got._local_tensors[rank]
        assert part.dtype == other.dtype and part.shape == other.shape, case
        with plain():
            assert torch.equal(part, other), (rank, case)
            assert part.stride() == other.stride(), (rank, case)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("after", [R, S0, S1], ids=str)
def test_partials_of_a_dtype_are_reduced_together(after):
    shapes = [(8, 4), (16, 8), (4, 12), (8,)][: 3 if after == S1 else 4]
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True):
        some = [
            wanted(of(x, (4,), [Partial()], dtype), [after]) for x in shapes for dtype in SUMMED[:2]
        ]
        expected = [redistribute_local_tensor(*one) for one in some]
        with CommDebugMode() as at_once:
            moved = redistribute_all(some)
    assert at_once.get_total_counts() == 2
    for got, single, one in zip(moved, expected, some, strict=True):
        assert_alike(got, single, one.current)


@pytest.mark.parametrize("norm", [2, 1], ids=str)
def test_norms_of_a_dtype_are_reduced_together(norm):
    """Those of 16 bits as sums of powers of 32, with those of 32."""
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True):
        given = [of((8, 4), (4,), [S0], dtype) for dtype in dtypes]
        some = [wanted(x, [R]) for x in torch._foreach_norm(given, norm)]
        expected = [redistribute_local_tensor(*one) for one in some]
        with CommDebugMode() as at_once:
            moved = redistribute_all(some)
    assert at_once.get_total_counts() == 2
    for got, single, one in zip(moved, expected, some, strict=True):
        assert_alike(got, single, one.current)


# -- ops ------------------------------------------------------------------------------------------


def lists(mesh, before, after, n=8, shape=(8, 12)):
    """Two lists, plain and as DTensors."""
    with plain():
        full = [[number(shape) + i + 100 * k for i in range(n)] for k in range(2)]
    return full, [
        [distribute(x, mesh, placements) for x in some]
        for some, placements in zip(full, (before, after))
    ]


OPS = {
    "add": lambda a, b: torch._foreach_add(a, b),
    "add_": lambda a, b: torch._foreach_add_(a, b),
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.5),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, 0.5),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "cat": lambda a, b: [torch.cat([*a, *b, b[0]])],
    "stack": lambda a, b: [torch.stack([*a, *b, b[0]])],
}
# of one whose second list is as it is to be but for two tensors
MIXED = [S1, S0, R, S0, S1, S0, S0, S0]


@pytest.mark.parametrize("settings", [{}, {"redistribution": True}, {"movement": True}], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_ops_of_lists_exchange_once(name, settings):
    with ranks_of((4,)), cute_sharding.enabled(**settings):
        for before, after in ((S0, S1), (S1, S0), (S0, _StridedShard(0, split_factor=2))):
            full, given = lists((4,), [before], [after])
            with plain():
                expected = OPS[name](*[[x.clone() for x in some] for some in full])
            with CommDebugMode() as communication:
                results = OPS[name](*given)
            for result, value in zip(given[0] if name.endswith("_") else results, expected or []):
                assert_holds(result.redistribute(placements=[R]), value)
            assert communication.get_total_counts() == 1, communication.get_comm_counts()


def test_only_some_move():
    with ranks_of((4,)), cute_sharding.enabled():
        with plain():
            full = [[number((8, 12)) + i for i in range(8)] for _ in range(2)]
        a = [distribute(x, (4,), [S0]) for x in full[0]]
        b = [distribute(x, (4,), [p]) for x, p in zip(full[1], MIXED)]
        with CommDebugMode() as communication:
            torch._foreach_add_(a, b)
        assert communication.get_total_counts() == 1
        for x, value in zip(a, full[0]):
            assert list(x.placements) == [S0]
            assert_holds(x, value * 2)


def test_gathers_are_one_gather():
    """Of replicas that are written to, also where dtypes differ; one tensor's stays as it is."""
    with ranks_of((4,)), cute_sharding.enabled():
        for n, dtypes in ((8, DTYPES[:1]), (8, DTYPES[:3]), (1, DTYPES[:1])):
            with plain():
                full = [number((8, 3)).to(dtypes[i % len(dtypes)]) for i in range(n)]
            a = [distribute(x, (4,), [R]) for x in full]
            b = [distribute(x, (4,), [S0]) for x in full]
            with CommDebugMode() as communication:
                torch._foreach_add_(a, b)
            assert [*map(str, communication.get_comm_counts())] == [GATHER]
            assert communication.get_total_counts() == 1
            for x, value in zip(a, full):
                assert_holds(x, value * 2)


def test_gathers_of_groups_that_hold_nothing():
    """Of 2 rows in blocks of 5, one group has both, and the other none."""
    mesh, split = (2, 2, 2), [_StridedShard(0, split_factor=5), R, S1]
    with ranks_of(mesh), cute_sharding.enabled():
        with plain():
            full = number((2, 2))
        x = distribute(full, mesh, split)
        assert_holds(torch.cat([x, x + 1], 1), torch.cat([full, full + 1], 1))


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(1)
def test_on_real_ranks(tmp_path):
    run(4, tmp_path, (lists_worker.all_of_it,), compares=True)
