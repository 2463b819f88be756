"""What torch's own redistribution is said to do is what it does: the same collectives, as many
elements received, as much memory.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from simulation import (
    assert_holds,
    distribute,
    is_partial,
    number,
    placement_of,
    ranks_of,
)
from torch.distributed.tensor import Partial, Replicate, _redistribute
from torch.utils._python_dispatch import TorchDispatchMode

from cute_sharding.dtensor.replaced import local_tensors
from cute_sharding.tools.stock import StockPlan, stock_plan

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.one_in(4)
R, P = Replicate(), Partial()


def S(dim, split_factor=1):
    return placement_of((dim, split_factor))


class Wire(TorchDispatchMode):
    """Counts the collectives, and the elements that rank 0 receives in them."""

    IGNORED = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self):
        super().__init__()
        self.collectives, self.received = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace in ("_c10d_functional", "_dtensor") and name not in self.IGNORED:
            given, got = (local_tensors.local_of(tensor, 0).numel() for tensor in (args[0], result))
            group = (
                args[-1]
                if not isinstance(args[-1], str)
                else dist.distributed_c10d._resolve_process_group(args[-1])
            )
            n = dist.get_world_size(group)
            self.collectives += 1
            self.received += {
                "all_gather_into_tensor": got - given,
                "reduce_scatter_tensor": given - got,
                "all_reduce": -(-2 * (n - 1) * given // n),
                "shard_dim_alltoall": (n - 1) * got // n,
            }[name]
        return result


def draw(rng, mesh, shape, pending=0.0, strided=0.0):
    def placement():
        dim = rng.randrange(-1, len(shape))
        if rng.random() < pending:
            return P
        return R if dim < 0 else S(dim, rng.choice((2, 4)) if rng.random() < strided else 1)

    return [placement() for _ in mesh]


@pytest.mark.parametrize(
    "mesh, sizes, strided",
    [
        ((4,), (8, 16), 0.3),
        ((2, 2), (8, 16), 0.0),
        ((2, 3), (5, 6, 7, 12), 0.0),
        ((2, 2, 2), (8, 3), 0.0),
    ],
    ids=str,
)
def test_counts_are_those_of_torch(mesh, sizes, strided):
    """Also where sizes do not divide, and torch pads."""
    rng = random.Random(f"stock {mesh}")
    moved = 0
    with ranks_of(mesh):
        for _ in range(40):
            shape = tuple(rng.choice(sizes) for _ in range(rng.choice((1, 2, 3))))
            before, after = (
                draw(rng, mesh, shape, 0.2, strided),
                draw(rng, mesh, shape, 0.0, strided),
            )
            plan = stock_plan(shape, mesh, before, after)
            assert plan.error is None and not plan.misread
            start = distribute(number(shape), mesh, before)
            with Wire() as wire:
                result = start.redistribute(placements=after)
            assert (plan.collectives, plan.received_elements) == (
                wire.collectives,
                wire.received,
            ), (shape, before, after, plan)
            if not any(map(is_partial, before)):
                assert_holds(result, number(shape))
            moved += plan.collectives > 0
    assert moved > 20


def test_a_plan_by_hand():
    plan = stock_plan((8, 8), (2, 4), [S(0), S(1)], [S(1), S(0)])
    assert [(s.kind, s.mesh_dim, s.change, s.received_elements) for s in plan.steps] == [
        ("all-gather", 1, "S(1) -> R", 24),
        ("all-to-all", 0, "S(0) -> S(1)", 16),
        ("local slice", 1, "R -> S(0)", 0),
    ]
    assert (plan.collectives, plan.received_elements) == (2, 40)


def test_through_replicate():
    """A _StridedShard is gathered, and made from a replica."""
    assert [s.kind for s in stock_plan((8, 8), (4,), [S(0, 2)], [S(1)]).steps] == [
        "all-gather, local slice"
    ]
    assert [s.kind for s in stock_plan((8, 8), (4,), [S(0)], [S(0, 2)]).steps] == [
        "all-gather, local slice"
    ]
    assert [s.kind for s in stock_plan((8, 8), (4,), [P], [S(0, 2)]).steps] == [
        "all-reduce (sum), local slice"
    ]
    assert stock_plan((8, 8), (4,), [R], [S(0, 2)]).received_elements == 0
    assert [s.kind for s in stock_plan((8, 8), (4,), [R], [P]).steps] == ["local share"]


def test_mesh_dims_of_one_device_and_negative_dims():
    assert stock_plan((8, 8), (1, 4), [S(0), R], [S(1), R]) == StockPlan()
    assert stock_plan((8, 8), (4,), [S(-2)], [S(-1)]) == stock_plan((8, 8), (4,), [S(0)], [S(1)])
    assert stock_plan((8, 8), (4,), [R], [R]).steps == ()


def test_what_torch_raises_is_said():
    plan = stock_plan((8, 8), (4,), [S(0)], [P])
    assert (
        plan.error == "redistribute from S(0) to P(sum) not supported yet"
        and not plan.steps
        and plan.received_elements == 0
    )
    assert "not supported yet" in plan.text(["mesh0"])
    assert "Mixed Partial" in stock_plan((8, 8), (2, 2), [P, Partial("max")], [R, R]).error
    assert "1 placements for a mesh of 2 dims" in stock_plan((8, 8), (2, 2), [S(0)], [R, R]).error
    assert stock_plan((8, 8), (4,), [S(2)], [R]).error
    assert "would take too long" in stock_plan((8, 8), (1 << 11, 1 << 11), [S(0), R], [R, R]).error


def test_placements_that_torch_misreads():
    """The split factor 2 of [_S(0, 2), S(0)] on (2, 2) is a shard order; 3 is that of no order."""
    assert not stock_plan((12, 8), (2, 2), [S(0, 2), S(0)], [R, R]).misread
    assert stock_plan((12, 8), (2, 2), [S(0, 3), S(0)], [R, R]).misread


def test_torch_is_asked_without_leaving_anything_behind():
    """No process group, and none of torch's planners kept, which would let earlier plans show in
    later ones.
    """
    before = dict(_redistribute._planner_cache)
    assert stock_plan((24, 24), (2, 2), [S(0, 2), S(0)], [S(1), S(1)]).steps
    assert _redistribute._planner_cache == before
    code = (
        "import torch.distributed as dist; from torch.distributed.tensor import Shard, Replicate; "
        "from cute_sharding.tools.stock import stock_plan; "
        "assert stock_plan((8, 8), (2, 4), [Shard(0), Shard(1)], [Replicate(), "
        "Shard(1)]).received_elements == 8; "
        "assert not dist.is_initialized()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
