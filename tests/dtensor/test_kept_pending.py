"""Reductions that stay pending beside strided shards: a reduction of results is the result of what
is reduced. Each device has contributions of its own, and the values are those of one device.
"""

from functools import reduce
from itertools import product

import pytest
import torch
from op_programs import assert_close
from simulation import distribute, mesh_of, plain, ranks_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.ops import TABLE, Linear
from cute_sharding.ops.assign import COPIED
from cute_sharding.sharding.deal import rows

MESH, SHAPE = (2, 2), (6, 4, 4)
COMBINED = {
    "sum": torch.add,
    "avg": lambda a, b: (a + b) / 2,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
BITS = ("band", "bor", "bxor")
# (op, the reductions that it keeps), of the operand whose dim 1 is cut; and of two of them.
ONE = {
    "cumsum.default": (lambda x: x.cumsum(0), ("sum", "avg")),
    "flip.default": (lambda x: x.flip(0), COPIED),
    "roll.default": (lambda x: x.roll(1, 0), COPIED),
    "rot90.default": (lambda x: x.rot90(2, [0, 2]), COPIED),
    "diagonal.default": (lambda x: x.diagonal(1, 0, 2), COPIED),
    "channel_shuffle.default": (lambda x: torch.channel_shuffle(x.transpose(0, 1), 2), COPIED),
    "pixel_shuffle.default": (
        lambda x: torch.pixel_shuffle(x.permute(1, 2, 0)[..., None], 2),
        COPIED,
    ),
    "tril.default": (lambda x: x.tril(), COPIED),
    "t.default": (lambda x: x[0].t(), COPIED),
    "trace.default": (lambda x: x[0].trace(), ("sum", "avg")),
    "unbind.int": (lambda x: torch.cat(x.unbind(0)), COPIED),
    "select.int": (lambda x: x[1], COPIED),
    "split.Tensor": (lambda x: torch.stack(x.split(3, 0)), COPIED),
    "slice.Tensor": (lambda x: x[1:5:2], COPIED),
    "narrow_copy.default": (lambda x: torch.narrow_copy(x, 0, 1, 3), COPIED),
    "select_backward.default": (
        lambda x: torch.ops.aten.select_backward(x, [3, *x.shape], 0, 1),
        COPIED,
    ),
    "slice_backward.default": (
        lambda x: torch.ops.aten.slice_backward(x, [9, *x.shape[1:]], 0, 2, 8, 1),
        COPIED,
    ),
    "amax.default": (lambda x: x.amax(0), ("max",)),
    "amin.default": (lambda x: x.amin([0, 2]), ("min",)),
    "max.default": (lambda x: x.max(), ("max",)),
    "min.default": (lambda x: x.min(), ("min",)),
    "prod.default": (lambda x: x[1:3].prod(), ("product",)),
    "prod.dim_int": (lambda x: x.prod(0), ("product",)),
    "sum.dim_IntList": (lambda x: x.sum(0), ("sum", "avg")),
    "mean.dim": (lambda x: x.mean(0), ("sum", "avg")),
}
TWO = {
    "cat.default": lambda x, y: torch.cat([x, y, x]),
    "stack.default": lambda x, y: torch.stack([x, y], 1),
    "slice_scatter.default": lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 3),
    "select_scatter.default": lambda x, y: torch.select_scatter(x, y[0], 0, 2),
    "diagonal_scatter.default": lambda x, y: torch.diagonal_scatter(
        x, y[:4].diagonal(0, 0, 2), 0, 0, 2
    ),
}


def numbers(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-4, 5, SHAPE, generator=generator)
    return drawn > 2 if dtype is torch.bool else drawn.to(dtype)


def contributed(kind, seed, cut, dtype):
    """(a DTensor of ``[Partial(kind), cut]``, its value): other numbers on each device."""
    with plain():
        parts = [numbers(10 * seed + k, dtype) for k in range(MESH[0])]
        full = reduce(COMBINED[kind], parts)
        locals_ = {}
        for rank, (i, j) in enumerate(product(*map(range, MESH))):
            held = rows(SHAPE[cut.dim], [(cut.split_factor, MESH[1], j)])
            pieces = [parts[i].narrow(cut.dim, a, b - a) for a, b in held]
            locals_[rank] = torch.cat(pieces, cut.dim)
    tensor = DTensor.from_local(
        LocalTensor(locals_),
        mesh_of(MESH),
        [Partial(kind), cut],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return tensor, full


def dtype_of(kind):
    return torch.int64 if kind in BITS else torch.float64


def found(program, kind, operands, dtype=None):
    """The placements of the program's result, which is right."""
    with ranks_of(MESH), cute_sharding.enabled():
        given = [
            contributed(kind, seed, _StridedShard(1, split_factor=2), dtype or dtype_of(kind))
            for seed in range(operands)
        ]
        result = program(*[tensor for tensor, _ in given])
        with plain():
            expected = program(*[full for _, full in given])
        assert_close(result, expected, kind)
    return result.placements


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("op", ONE)
def test_of_one_operand(op, kind):
    program, keeps = ONE[op]
    if kind in BITS and op == "mean.dim":
        return  # of integers there is none
    placements = found(program, kind, 1)
    assert (placements[0] == Partial(kind)) == (kind in keeps), placements


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("op", TWO)
def test_of_operands_together(op, kind):
    assert found(TWO[op], kind, 2)[0] == Partial(kind)


@pytest.mark.parametrize("op", TWO)
def test_what_is_pending_of_one_of_them_is_finished(op):
    with ranks_of(MESH), cute_sharding.enabled():
        x, full = contributed("max", 0, _StridedShard(1, split_factor=2), torch.float64)
        with plain():
            other = numbers(7, torch.float64)
        y = distribute(other, MESH, [Replicate(), _StridedShard(1, split_factor=2)])
        for given, wanted in (((x, y), (full, other)), ((y, x), (other, full))):
            result = TWO[op](*given)
            assert result.placements[0] == Replicate()
            with plain():
                expected = TWO[op](*wanted)
            assert_close(result, expected, op)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("name", ["any", "all"])
def test_maxima_of_bools(name, kind, dtype):
    """Whether any is true of a maximum of bools is the maximum; of numbers it is not: of 0 and -1
    the greatest is 0.
    """
    for arguments in ((), (0,), (1,), (-1, True)):
        placements = found(lambda x, a=arguments: getattr(x, name)(*a), kind, 1, dtype)
        keeps = dtype is torch.bool and (name, kind) in (("any", "max"), ("all", "min"))
        assert (placements[0] == Partial(kind)) == keeps
        # The dim that is cut is reduced, or not; no device is without rows.
        assert not isinstance(placements[1], Replicate)


def test_what_is_among_others_is_asked_of_any_without_communication():
    x, others = torch.arange(40).reshape(8, 5), torch.tensor([3, 7, 90, 91, 92, 93])
    expected = torch.isin(x, others)
    with ranks_of(MESH), cute_sharding.enabled():
        given = distribute(x, MESH, [Shard(0), Replicate()])
        among = distribute(others, MESH, [Replicate(), Shard(0)])
        with CommDebugMode() as communicated:
            result = torch.isin(given, among).any()
            of_rows = torch.isin(given, among).any(1)
        assert communicated.get_total_counts() == 0
        assert_close(result, expected.any(), "any")
        assert_close(of_rows, expected.any(1), "any of rows")


def test_every_row_that_keeps_something_pending_is_here():
    """But for those of products and of pointwise ops, which have tests of their own."""
    here = {*ONE, *TWO}
    for row in TABLE:
        if isinstance(row.linear, Linear) and not row.bools:
            assert here & {*row.overloads}, row.overloads
