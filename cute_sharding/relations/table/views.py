"""Views, by DimMaps (:mod:`cute_sharding.relations.dim_map`).

A row is for an op with a view rule in torch; other overloads with the same relation are in
``by_names``. Strict rows are for views that raise if they are not free and
``implicit_redistribution="error"``; others redistribute under any setting, as torch does. Rows
without overloads are for functions in torch's dim_maps that reach the dispatcher as other ops.
"""

from __future__ import annotations

from functools import partial

from cute_sharding.relations import dim_map as rules
from cute_sharding.relations.signature import COPIES
from cute_sharding.relations.table.row import ByDimMap

_view = partial(ByDimMap, linear=COPIES)

SQUEEZE = ("squeeze.default", "squeeze.dim", "squeeze.dims")

ROWS: tuple[ByDimMap, ...] = (
    _view(("view.default", "_unsafe_view.default"), rules.reshape, op="Tensor.view", strict=True),
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
        strict=True,
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
        rules.view_as_complex,
        op="torch.view_as_complex",
        wants_whole_dims=True,
        pairs=True,
        linear=(0,),
        by_names=("view_as_complex_copy.default",),
    ),
)
