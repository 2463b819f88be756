"""Ops whose results have sizes that depend on values, or are Python values: every rank has the
result that one device would have.
"""

import random

import pytest
import torch
from drawing import draw_placements
from simulation import assert_holds, distribute, finished, mesh_of, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_sharding
from benchmarks.received import Received

MESHES = [(1,), (4,), (2, 2), (2, 1, 2)]


def ints(*shape):
    with plain():
        return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))


def floats(*shape):
    with plain():
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# The program, and its operands; of floats the gradient is compared too.
PROGRAMS = {
    "nonzero": (lambda x: x.nonzero(), lambda: [ints(6, 5)]),
    "argwhere": (torch.argwhere, lambda: [floats(3, 2, 5) > 0]),
    "where": (lambda x: torch.where(x)[1], lambda: [ints(7, 4) > 1]),
    "bincount": (torch.bincount, lambda: [ints(9), ints(9)]),
    "bincount of none": (torch.bincount, lambda: [ints(0), ints(0)]),
    "bincount, weights": (
        lambda x, weights: x.bincount(weights.detach()),
        lambda: [ints(9), (floats(9) * 8).round()],  # sums of which are exact
    ),
    "bincount, more bins": (lambda x: x.bincount(minlength=7), lambda: [ints(5) + 1]),
    "repeat_interleave": (
        lambda x, counts: x.repeat_interleave(counts, 0),
        lambda: [floats(7, 3), ints(7)],
    ),
    "repeat_interleave of a known size": (
        lambda x, counts: x.repeat_interleave(counts, 0, output_size=int(ints(7).sum())),
        lambda: [floats(7, 3), ints(7)],
    ),
    "unique": (
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        lambda: [ints(5, 4)],
    ),
    "unique rows": (lambda x: torch.unique(x, dim=0), lambda: [ints(9, 2)]),
    "unique_consecutive": (torch.unique_consecutive, lambda: [ints(9)]),
    "masked_select": (torch.masked_select, lambda: [floats(6, 5), ints(6, 5) > 0]),
    "mask": (lambda x, mask: x[mask], lambda: [floats(6, 5), ints(6, 5) > 0]),
    "mask of rows": (lambda x, mask: x[mask], lambda: [floats(6, 5), ints(6) > 0]),
    "mask of columns": (lambda x, mask: x[:, mask], lambda: [floats(6, 5), ints(5) > 0]),
    "mask of the middle": (
        lambda x, mask: x[:, mask],
        lambda: [floats(3, 4, 5, 2), ints(4, 5) > 0],
    ),
    "mask of bytes": (
        lambda x, mask: x[mask],
        lambda: [floats(6, 5), (ints(6) > 0).to(torch.uint8)],
    ),
    "mask of nothing": (lambda x, mask: x[mask], lambda: [floats(6, 5), ints(6) > 9]),
    "allclose": (torch.allclose, lambda: [floats(4, 3), floats(4, 3)]),
    "not allclose": (lambda x, y: torch.allclose(x, y + 1), lambda: [floats(4, 3), floats(4, 3)]),
}


def check(found, expected):
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for each, other in zip(found, expected):
            check(each, other)
    elif isinstance(expected, torch.Tensor):
        assert_holds(finished(found), expected)
    else:
        assert found == expected


def known(value):
    return value if isinstance(value, (bool, tuple, list)) else value.detach()


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_rank_has_the_whole_result(name, mesh):
    program, operands = PROGRAMS[name]
    rng = random.Random(f"{name} {mesh}")
    whole = operands()
    with plain():
        plain_ones = [x.clone().requires_grad_(x.is_floating_point()) for x in whole]
        expected = program(*plain_ones)
        if isinstance(expected, torch.Tensor) and expected.requires_grad:
            (expected * expected).sum().backward()
    with ranks_of(mesh), cute_sharding.enabled():
        for k in range(4):
            placed = [
                draw_placements(rng, mesh, x.shape) if k else (Replicate(),) * len(mesh)
                for x in whole
            ]
            given = [
                distribute(x, mesh, p).detach().requires_grad_(x.is_floating_point())
                for x, p in zip(whole, placed)
            ]
            found = program(*given)
            check(found, known(expected))
            if not k and isinstance(found, DTensor):
                assert found.placements == (Replicate(),) * len(mesh)
            if isinstance(found, DTensor) and found.requires_grad:
                (found * found).sum().backward()
                assert torch.allclose(
                    given[0].grad.full_tensor().reconcile(), plain_ones[0].grad
                ), placed


def test_other_dims_than_those_of_the_mask_stay_sharded():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(floats(6, 5), (2,), [Shard(0)])
        mask = distribute(ints(5) > 0, (2,), [Shard(0)])
        assert x[:, mask].placements == (Shard(0),)


def test_counts_are_of_what_each_rank_has():
    with ranks_of((4,)), cute_sharding.enabled(), Received() as received:
        with plain():
            whole = torch.arange(400) % 5
            expected = whole.bincount()
        found = distribute(whole, (4,), [Shard(0)]).bincount()
        assert found.placements == (Partial(),)
        assert_holds(finished(found), expected)
        with pytest.raises(RuntimeError, match="non-negative"):
            distribute(whole - 1, (4,), [Shard(0)]).bincount()
        with pytest.raises(RuntimeError, match="minlength"):
            distribute(whole, (4,), [Shard(0)]).bincount(minlength=-1)
        assert max(received.by_rank.values()) < 40


def test_what_is_pending_is_finished_first():
    with ranks_of((2,)), cute_sharding.enabled():
        with plain():
            parts = {0: torch.tensor([1, 0, 2, 0]), 1: torch.tensor([-1, 0, 1, 3])}
        found = distribute(parts, (2,), [Partial()]).nonzero()
        with plain():
            expected = torch.tensor([[2], [3]])
        assert_holds(found, expected)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("name", ["nonzero", "masked_select", "mask of columns", "unique rows"])
def test_compiled(name, is_captured):
    """With a break of the graph, or sizes that the compiler takes as unknown."""
    program, operands = PROGRAMS[name]
    torch._dynamo.reset()
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=is_captured)
    with captured, cute_sharding.enabled():
        compiled = torch.compile(program, backend="aot_eager")
        for scale in (1, -1):
            whole = [x * scale if x.dtype != torch.bool else x for x in operands()]
            given = [
                DTensor.from_local(x, mesh_of((2,)), [Replicate()], run_check=False) for x in whole
            ]
            assert torch.equal(compiled(*given).to_local(), program(*whole))


def test_a_rank_outside_of_the_mesh_has_no_values():
    with cute_sharding.enabled():
        mesh = torch.distributed.DeviceMesh("cpu", [1, 2])
        x = DTensor.from_local(
            torch.empty(0), mesh, [Replicate()], run_check=False, shape=(4,), stride=(1,)
        )
        assert isinstance(x.nonzero(), DTensor)
