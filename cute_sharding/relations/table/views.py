"""Views, by DimMaps (:mod:`cute_sharding.relations.view`).

A row is for an op with a view rule in torch; other overloads with the same relation are in
``by_names``. Rows without overloads are for functions in torch's dim_maps that reach the dispatcher
as other ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cute_sharding.relations import view as rules
from cute_sharding.relations.signature import COPIES
from cute_sharding.relations.table.kernels import Bits
from cute_sharding.relations.table.row import ByDimMap
from cute_sharding.relations.view import DimMap, InputDim, Split, View, identity


def as_complex(shape: Sequence[int]) -> View:
    """A complex number is two real numbers.

    Raises:
        ValueError: the last dim has another size.
    """
    if not shape or shape[-1] != 2:
        raise ValueError(
            f"view_as_complex: the last dim of {tuple(shape)} must have size 2, for the real and "
            "imaginary parts"
        )
    return View.of_runs(shape, shape[:-1], 2)


def as_dtype(shape: Sequence[int], size: int, wanted: int) -> DimMap | View:
    """Elements of ``size`` bytes read as elements of ``wanted`` bytes: each becomes several along
    the last dim, or several become one.

    Raises:
        ValueError: no whole number of elements becomes one.

    >>> as_dtype((2, 3), 4, 1)  # int32 as bytes
    (InputDim(input_dim=0), Split(input_dim=InputDim(input_dim=1), group_shape=(12,), split_id=0))
    >>> as_dtype((2, 12), 1, 4).output_shape
    (2, 3)
    """
    if size == wanted:
        return identity(len(shape))
    if not shape:
        raise ValueError(f"a tensor without dims cannot change from {size} to {wanted} bytes")
    *others, n = shape
    if size > wanted:
        last = len(others)
        return (*identity(last), Split(InputDim(last), (n * (size // wanted),), 0))
    k = wanted // size
    if n % k:
        raise ValueError(
            f"the last dim of {tuple(shape)} must be a multiple of {k}, for elements of {wanted} "
            f"bytes made of elements of {size}"
        )
    return View.of_runs(shape, (*others, n // k), k)


_view = partial(ByDimMap, linear=COPIES)

SQUEEZE = ("squeeze.default", "squeeze.dim", "squeeze.dims")

ROWS: tuple[ByDimMap, ...] = (
    _view(("view.default", "_unsafe_view.default"), rules.reshape, op="Tensor.view"),
    _view(
        ("reshape.default", "view_copy.default"),
        rules.reshape,
        op="torch.reshape",
        note="Tensor.reshape of a DTensor calls aten.view",
    ),
    _view((), rules.flatten, op="torch.flatten", note="decomposes to view"),
    _view((), rules.unflatten, op="torch.unflatten", note="decomposes to view"),
    _view((), rules.flatten, op="torch.ravel", note="decomposes to view"),
    _view(
        (*SQUEEZE, *(name.replace(".", "_.") for name in SQUEEZE)),
        rules.squeeze,
        op="torch.squeeze",
        wants_whole_dims=True,
    ),
    _view(
        ("unsqueeze.default",),
        rules.unsqueeze,
        op="torch.unsqueeze",
        by_names=("unsqueeze_copy.default",),
    ),
    _view(("expand.default", "expand_copy.default"), rules.expand, op="Tensor.expand"),
    _view((), rules.expand, op="torch.broadcast_to", note="decomposes to expand"),
    _view(
        ("permute.default",), rules.permute, op="torch.permute", by_names=("permute_copy.default",)
    ),
    _view(
        ("transpose.int",), rules.transpose, op="torch.transpose", by_names=("transpose_copy.int",)
    ),
    _view((), rules.turned, op="torch.t", by_names=("t.default", "t_copy.default")),
    _view(
        (),
        rules.same,
        op="torch.alias_copy",
        by_names=("alias_copy.default", "detach_copy.default"),
    ),
    _view((), rules.movedim, op="torch.movedim", note="decomposes to permute"),
    _view(("repeat.default",), rules.repeat, op="Tensor.repeat"),
    _view((), rules.tile, op="torch.tile", note="decomposes to repeat"),
    _view((), rules.at_least(1), op="torch.atleast_1d", note="decomposes to view"),
    _view((), rules.at_least(2), op="torch.atleast_2d", note="decomposes to unsqueeze"),
    _view((), rules.at_least_3d, op="torch.atleast_3d", note="decomposes to unsqueeze"),
    _view(
        ("view_as_real.default",),
        rules.view_as_real,
        op="torch.view_as_real",
        linear=(0,),
        by_names=("view_as_real_copy.default",),
    ),
    _view(
        ("view_as_complex.default",),
        as_complex,
        op="torch.view_as_complex",
        wants_whole_dims=True,
        linear=(0,),
        by_names=("view_as_complex_copy.default",),
    ),
    ByDimMap(
        ("view.dtype",),
        as_dtype,
        op="Tensor.view, of a dtype",
        kernel=Bits(),
        note="the rule takes the bytes of an element, before and after, in place of the dtype",
    ),
)
