"""Ops in place and ops on lists that torch has no rule for, although it has one, or the package has
a row, for the op that returns a new tensor, or for the op on one tensor. Each is compared with one
device, on placements of all kinds; what is written to keeps its placements.
"""

from itertools import product

import pytest
import torch
from op_programs import assert_close, index, values
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas

aten = torch.ops.aten
R, P = Replicate(), Partial()
ROWS = index(3, below=5)

# The other arguments of each op in place, on a tensor of shape (5, 6).
ARGUMENTS = {
    "addmv_.default": [((5, 4), (4,))],  # on a vector
    "addbmm_.default": [((2, 5, 3), (2, 3, 6))],
    "addr_.default": [((5,), (6,))],
    "cumprod_.default": [(0,), (1,)],
    "cumsum_.default": [(0,), (-1,)],
    "floor_divide_.Tensor": [((5, 6),), ((6,),)],
    "hardswish_.default": [()],
    "index_add_.default": [(0, ROWS, (3, 6)), (1, ROWS, (5, 3))],
    "index_copy_.default": [(0, torch.tensor([4, 0, 3]), (3, 6))],
    "masked_fill_.Tensor": [(values(5, 6) > 0, ())],
    "renorm_.default": [(2.0, 1, 0.5)],
    "scatter_add_.default": [(1, index(5, 3, below=6), (5, 3))],
    "tril_.default": [(), (-1,)],
    "triu_.default": [(), (2,)],
}


def every_op():
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = op_schemas.overload(f"{packet}.{overload or 'default'}") if "aten::" in name else None
        if op is not None and "out" not in overload:
            yield op


def of(arguments, place):
    """Shapes among the arguments as values; ``place`` makes DTensors of all tensors."""
    made = [values(*x) if isinstance(x, tuple) else x for x in arguments]
    return [place(x) if isinstance(x, torch.Tensor) else x for x in made]


def meant(x, placements):
    """What a tensor on two devices, each of which has all of a pending one, means."""
    return x * 2 if P in placements else x.clone()


def pending_or(x, other):
    """The placements for another operand: of numbers it may be pending, of indices not."""
    if other == [P] and not x.is_floating_point():
        return [R]
    return [R] if isinstance(other[0], Shard) and other[0].dim >= x.ndim else other


def test_each_op_in_place_is_in_the_sweep():
    found = {op_schemas.name_of(op) for op in every_op() if op_schemas.new_form(op) is not None}
    assert {"addr_.default", "addbmm_.default"} <= found <= set(ARGUMENTS)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_in_place_as_the_op_that_returns_a_new_tensor(name):
    op, full = op_schemas.overload(name), values(5, 6) if name != "addmv_.default" else values(5)
    cuts = [R, P, Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        for arguments in ARGUMENTS[name]:
            for p, other in product(cuts, ([R], [P], [Shard(0)])):
                if getattr(p, "dim", 0) >= full.ndim:
                    continue
                case = f"{name} {arguments}: {p}, others {other}"
                with plain():
                    wanted = meant(full, [p])
                    op(wanted, *of(arguments, lambda x: meant(x, pending_or(x, other))))
                x = distribute(full, (2,), [p])
                others = of(arguments, lambda x: distribute(x, (2,), pending_or(x, other)))
                assert op(x, *others) is x, case
                assert x.placements == (p,), case
                assert_close(x, wanted, case)


def test_in_place_refuses_what_one_device_refuses():
    with ranks_of((2,)), cute_sharding.enabled():
        whole = distribute(index(5, 6, below=9), (2,), [Shard(0)])
        with pytest.raises(RuntimeError):
            whole.floor_divide_(distribute(values(5, 6), (2,), [Shard(0)]))


def calls_on_lists(op, lists):
    """The arguments of an op on lists: a list for each list of tensors, in turn, and numbers."""
    kinds = [str(argument.type) for argument in op._schema.arguments]
    remaining = iter(lists)
    numbers = {"number": 0.25, "List[number]": [0.25, 0.5], "bool": False}
    for kind in kinds:
        yield next(remaining) if kind == "List[Tensor]" else numbers[kind]


LISTS = sorted(
    {op_schemas.name_of(op) for op in every_op() if op_schemas.is_pointwise_on_lists(op)}
)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", LISTS)
def test_on_lists_each_element_follows_the_first_list(name):
    op, shapes = op_schemas.overload(name), [(4, 5), (3, 4)]
    kinds = [str(argument.type) for argument in op._schema.arguments]
    count = kinds.count("List[Tensor]")
    fulls = [[values(*shape) + 2 + i for shape in shapes] for i in range(count)]
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        for p, other in product([R, P, Shard(0), Shard(1)], [R, P, Shard(0)]):
            placed = [p, *[other] * (count - 1)]
            with plain():
                wanted = [[meant(x, [at]) for x in some] for some, at in zip(fulls, placed)]
                wanted = op(*calls_on_lists(op, wanted)) or wanted[0]
            given = [[distribute(x, (2,), [at]) for x in some] for some, at in zip(fulls, placed)]
            results = op(*calls_on_lists(op, given)) or given[0]
            for x, y in zip(results, wanted, strict=True):
                assert_close(x, y, f"{name}: {placed}")
            if op_schemas.is_in_place(op):
                assert all(x.placements == (p,) for x in given[0])
