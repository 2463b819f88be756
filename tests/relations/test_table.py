"""Every row of the rule table against torch: its DimMaps, its registrations, and what the ops
themselves do.
"""

import random
from functools import cache
from itertools import product
from math import prod

import pytest
import torch
from enumeration import shapes_of
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops import _view_ops

from cute_sharding.relations.table import BY_OP, VIEWS
from cute_sharding.relations.table.views import ROWS
from cute_sharding.relations.view import (
    expand,
    flatten,
    movedim,
    normalize_dim,
    permute,
    repeat,
    reshape,
    squeeze,
    unflatten,
    view_of,
)

# OpInfo name -> row. Names that OpInfo has and the table has not are listed for what they are.
ROW_OF = {
    "t": "torch.t",
    "alias_copy": "torch.alias_copy",
    "view": "Tensor.view",
    "view_copy": "Tensor.view",
    "reshape": "torch.reshape",
    "flatten": "torch.flatten",
    "unflatten": "torch.unflatten",
    "ravel": "torch.ravel",
    "squeeze": "torch.squeeze",
    "squeeze_copy": "torch.squeeze",
    "unsqueeze": "torch.unsqueeze",
    "unsqueeze_copy": "torch.unsqueeze",
    "expand": "Tensor.expand",
    "expand_copy": "Tensor.expand",
    "broadcast_to": "torch.broadcast_to",
    "permute": "torch.permute",
    "permute_copy": "torch.permute",
    "transpose": "torch.transpose",
    "transpose_copy": "torch.transpose",
    "movedim": "torch.movedim",
    "repeat": "Tensor.repeat",
    "tile": "torch.tile",
    "atleast_1d": "torch.atleast_1d",
    "atleast_2d": "torch.atleast_2d",
    "atleast_3d": "torch.atleast_3d",
    "view_as_real": "torch.view_as_real",
    "view_as_complex": "torch.view_as_complex",
}
# Rows of ops that torch's table of view ops has not.
NOT_IN_TORCH = ("torch.unflatten", "torch.t", "torch.alias_copy")
# A row that no name in OpInfo stands for: Tensor.view of a dtype, for which torch has a rule that
# takes blocks of elements for blocks of others.
OF_DTYPES = "Tensor.view, of a dtype"
OPS = [*ROW_OF, "squeeze-multiple"]

# What torch's own functions cannot be asked: the definition of the op decides there, and only
# there.
TORCH_CANNOT = {
    "alias_copy": "it is no view to torch",
    "view_as_real": "a scalar has no last dim to look up",
    "view_as_complex": "a DimMap has no word for elements that become one",
    "reshape": "an empty target shape is indexed",
    "flatten": "start_dim and end_dim are not taken",
    "unflatten": "there is no such key",
    "t": "there is no such key",
    "tile": "an empty list of repeats is indexed",
    "transpose": "a scalar has no dims to check against",
    "transpose_copy": "a scalar has no dims to check against",
}


@cache
def op_infos():
    """By name: torch's operator database takes long to import, and each process that collects
    tests reads this file.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        "-".join(filter(None, (op.name, op.variant_test_name))): op
        for op in op_db
        if op.name in ROW_OF
    }


def torch_key(name):
    return (
        getattr(torch, name.removeprefix("torch."))
        if name.startswith("torch.")
        else getattr(torch.Tensor, name.removeprefix("Tensor."))
    )


def structure(spec):
    """A DimSpec of either library, as tuples."""
    kind = type(spec).__name__
    return {
        "InputDim": lambda: (kind, spec.input_dim),
        "Singleton": lambda: (kind,),
        "Broadcast": lambda: (kind, structure(spec.dim), spec.dim_size),
        "NewDim": lambda: (kind, spec.size),
        "Repeat": lambda: (kind, structure(spec.input_dim), spec.times),
        "Flatten": lambda: (kind, *map(structure, spec.input_dims)),
        "Split": lambda: (kind, structure(spec.input_dim), tuple(spec.group_shape), spec.split_id),
    }[kind]()


def structures(dim_map):
    return tuple(map(structure, dim_map))


def samples(op):
    dtype = torch.complex64 if op.name == "view_as_real" else torch.float32
    for sample in op.sample_inputs("cpu", dtype):
        for tensor in (
            sample.input if isinstance(sample.input, (list, tuple)) else [sample.input]
        ):  # the atleast ops take several at once
            yield tensor, sample.args, sample.kwargs


def reads(op, shape, *args, **kwargs):
    """For each element of the op's output, the flat index of the input element that it reads; found
    by running the op. And the output shape.
    """
    index = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
    if "view_as_real" in op.__name__:
        result = op(torch.complex(index, index), *args, **kwargs)
        return result.reshape(-1).tolist(), tuple(result.shape)
    result = op(index, *args, **kwargs)
    if result.is_complex():
        return torch.view_as_real(result).reshape(-1).tolist(), tuple(result.shape)
    return result.reshape(-1).tolist(), tuple(result.shape)


def check_layout(view, expected):
    values, output_shape = expected
    assert view.output_shape == output_shape
    assert view.layout.size == len(values)
    assert [view.layout(i) for i in range(len(values))] == values


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPS)
def test_dim_maps_equal_torchs(name):
    op = op_infos()[name]
    row = BY_OP[ROW_OF[op.name]]
    stock = None if row.op in NOT_IN_TORCH else _view_ops.dim_maps.get(torch_key(row.op))
    compared = refused = 0
    for tensor, args, kwargs in samples(op):
        ours = row.rule(tuple(tensor.shape), *args, **kwargs)
        try:
            theirs = stock(tensor, *args, **kwargs)
            ours = structures(ours)
        except (TypeError, IndexError, AssertionError):
            assert op.name in TORCH_CANNOT
            refused += 1
            continue
        assert ours == structures(theirs), (tuple(tensor.shape), args, kwargs)
        compared += 1
    assert compared >= 1 or row.op in NOT_IN_TORCH or name == "view_as_complex"
    assert compared + refused >= 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPS)
def test_view_layouts_do_what_the_op_does(name):
    op = op_infos()[name]
    row = BY_OP[ROW_OF[op.name]]
    compared = 0
    for tensor, args, kwargs in samples(op):
        shape = tuple(tensor.shape)
        check_layout(row.view(shape, *args, **kwargs), reads(op.op, shape, *args, **kwargs))
        compared += 1
    assert compared >= 1


def test_every_row_is_compared_with_op_info():
    assert set(op_infos()) == set(OPS)
    assert {*ROW_OF.values(), OF_DTYPES} == {row.op for row in ROWS}


def test_a_view_of_a_dtype_reads_the_bytes_that_the_op_reads():
    dtypes = (torch.uint8, torch.int16, torch.int32, torch.int64)
    compared = 0
    for before, after in product(dtypes, repeat=2):
        for shape in [(8,), (3, 8), (2, 1, 16), (0, 8), (2, 3)]:
            whole = torch.arange(prod(shape) * before.itemsize).to(torch.uint8).view(before)
            whole = whole.view(shape)
            size = before.itemsize, after.itemsize
            try:
                expected = whole.view(after)
            except RuntimeError:
                with pytest.raises(ValueError, match="must be a multiple of"):
                    BY_OP[OF_DTYPES].view(shape, *size)
                continue
            view = BY_OP[OF_DTYPES].view(shape, *size)
            assert view.output_shape == tuple(expected.shape)
            # In order, each element of the smaller size belongs to one of the larger.
            k = max(size) // min(size)
            in_order = [i // k if size[0] > size[1] else i for i in range(view.elements)]
            assert [view.layout(i) for i in range(view.layout.size)] == in_order
            compared += 1
    assert compared > 50


def test_reshape_rules_equal_torchs_on_every_small_shape():
    rng = random.Random(0)
    compared = 0
    for n in (1, 2, 4, 6, 8, 12, 24, 30):
        shapes = shapes_of(n)
        for source in shapes:
            for target in rng.sample(shapes, min(len(shapes), 12)):
                if target:  # torch indexes the empty shape
                    assert structures(reshape(source, target)) == structures(
                        _view_ops.view_groups(source, target)
                    ), (source, target)
                    compared += 1
                check_layout(
                    view_of(source, reshape(source, target)), reads(torch.reshape, source, target)
                )
    assert compared > 4000


def test_reshape_rules_of_empty_tensors():
    """torch's function does not end on many of these, such as (0,) -> (0, 2); the definition is all
    there is to compare with.
    """
    rng = random.Random(0)
    shapes = [
        (0,),
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 3),
        (3, 0),
        (2, 0, 3),
        (0, 2, 3),
        (2, 3, 0),
        (1, 0, 1),
        (2, 0, 0, 5),
    ]
    for source in shapes:
        for target in rng.sample(shapes, 6):
            view = view_of(source, reshape(source, target))
            assert view.output_shape == target
            assert view.layout.size == 0


# -- the registrations -----------------------------------------------------------------------------


def registered_by_torch():
    """The aten overload of each registration that the module of the view ops makes."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    result = set()
    for table in (
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
        propagator.op_to_rules,
    ):
        for op, entry in table.items():
            strategy = getattr(entry, "func", entry)
            if strategy.__module__ == _view_ops.__name__:
                result.add(str(op).removeprefix("aten."))
    return result


def test_every_op_that_torch_has_a_rule_for_has_a_row():
    not_there = (*NOT_IN_TORCH, OF_DTYPES)
    named = {torch_key(row.op): row for row in ROWS if row.op not in not_there}
    missing = [key for key in _view_ops.dim_maps if key not in named]
    assert not missing, (
        f"torch has rules for {missing}; add a row for each to relations/table/views.py"
    )
    assert set(named) == set(_view_ops.dim_maps)


def test_every_overload_that_torch_registers_has_a_row():
    stock = registered_by_torch()
    assert len(stock) >= 18, "the registrations are not where this test looks for them"
    stock.add("view.dtype")  # which torch registers as an op on any shape
    missing = stock - set(VIEWS)
    assert not missing, (
        f"torch registers {sorted(missing)}; add each to its row in relations/table/views.py"
    )
    assert set(VIEWS) == stock, (
        "an overload that torch leaves to its decomposition, or does not register, is not ours to "
        "answer"
    )


# -- arguments that no op takes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: reshape((4, 6), (5, 5)), "shape (5, 5) has 25 elements, but the tensor has 24"),
        (lambda: reshape((4, 6), (-1, 5)), "cannot be inferred for 24 elements"),
        (lambda: reshape((4, 6), (-1, -1)), "give at most one"),
        (lambda: reshape((0, 6), (-1, 0)), "cannot be inferred for 0 elements"),
        (lambda: expand((4, 6), (6,)), "the target has fewer dims"),
        (lambda: expand((4, 6), (5, 6)), "output dim 0 cannot change from size 4 to size 5"),
        (lambda: expand((6,), (-1, 6)), "output dim 0"),
        (lambda: repeat((4, 6), (2,)), "at least one number for each dim"),
        (lambda: permute((4, 6), (0, 0)), "repeat a dim"),
        (lambda: permute((4, 6), (0,)), "permute has 1 dim (0,) for a tensor of 2 dims"),
        (lambda: squeeze((4, 6), (0, -2)), "repeat a dim"),
        (lambda: flatten((4, 6), 1, 0), "start_dim 1 comes after end_dim 0"),
        (
            lambda: movedim((4, 6), (0, 1), (0,)),
            "2 source dims (0, 1), but 1 destination dim (0,)",
        ),
        (lambda: unflatten((4, 6), 1, (4, 2)), "has 8 elements, but the tensor has 6"),
        (lambda: normalize_dim(2, 2), "dim 2 is out of range for a tensor of 2 dims: use -2 to 1"),
        (lambda: BY_OP["torch.view_as_complex"].view((4, 3)), "must have size 2"),
        (lambda: BY_OP[OF_DTYPES].view((4, 3), 1, 2), "must be a multiple of 2"),
        (lambda: BY_OP[OF_DTYPES].view((), 4, 2), "cannot change from 4 to 2 bytes"),
        (lambda: view_of((4, 6), (object(),)), "unknown DimSpec"),
        (lambda: view_of((4, 6), reshape((4, 5), (2, 10))), "the numbers of elements differ"),
    ],
)
def test_errors_say_what_does_not_fit(build, message):
    with pytest.raises((ValueError, IndexError, TypeError)) as error:
        build()
    assert message in str(error.value)
