"""The rule table: one row for each view op, op -> DimMap.

A row is all that is known of an op: how its arguments make a DimMap, which aten overloads it
answers for in DTensor's dispatcher, which of them are strict (a view: free or an error) and, for
the few ops whose local form has needs of its own, what those are. docs/rules.md is generated from
it.

To add an op: its row here, with a rule in dim_map.py if it needs one of its own; an example for
docs/rules.md in docs/generate_rules.py; and the name that torch's operator database has for it in
tests/views/test_table.py. The adapter goes by the table, and tests fail until all are there. Ops
and overloads that torch has no view rule for get none, also where they are pure aliases: torch
leaves them to their decompositions or answers them elsewhere. (Rows without overloads are for the
functions of torch's dim_maps.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cute_sharding.views import dim_map as rules
from cute_sharding.views.dim_map import DimMap
from cute_sharding.views.view import View, view_of


@dataclass(frozen=True)
class Row:
    """One view op.

    Attributes:
        op: its name in torch, such as ``torch.permute`` or ``Tensor.expand``.
        rule: ``(input shape, *arguments) -> DimMap``.
        strict: the aten overloads that must not communicate.
        lenient: the aten overloads that may redistribute their input first.
        wants_whole_dims: the local op needs the dims that it does not keep whole on every device:
            squeeze removes a dim only where its local size is 1 (a device that holds nothing has 0
            there), and view_as_complex a dim of size 2.
        pairs: the output's elements are pairs of the input's (view_as_complex), and only linear
            reductions may be pending.
        signed: the aten overloads that torch has no view rule for, and that go by the signature
            that follows from the DimMap (movement/signatures.py).
        note: what a reader of the table should know.

    >>> row = BY_OP["torch.squeeze"]
    >>> isinstance(row, Row), row.strict[:2], row.wants_whole_dims
    (True, ('squeeze.default', 'squeeze.dim'), True)
    """

    op: str
    rule: Callable[..., DimMap]
    strict: tuple[str, ...] = ()
    lenient: tuple[str, ...] = ()
    wants_whole_dims: bool = False
    pairs: bool = False
    signed: tuple[str, ...] = ()
    note: str = field(default="", compare=False)

    def view(self, shape: Sequence[int], *args: Any, **kwargs: Any) -> View:
        """The op on a tensor of that shape, as a view; ``args`` as the op has them after it.

        Raises:
            ValueError, TypeError, IndexError: the op has no such arguments on such a tensor.

        >>> BY_OP["torch.permute"].view((2, 3, 4), (2, 0, 1)).output_shape
        (4, 2, 3)
        """
        if self.pairs:
            return _view_of_pairs(shape)
        return view_of(shape, self.rule(shape, *args, **kwargs))


def _view_of_pairs(shape: Sequence[int]) -> View:
    """view_as_complex in units of real numbers: the output ends in a dim of 2 that has no name."""
    if not shape or shape[-1] != 2:
        raise ValueError(
            f"view_as_complex: the last dim of {tuple(shape)} must have size 2, for the real and "
            "imaginary parts"
        )
    ndim = len(shape)
    return View(
        shape,
        tuple(range(ndim)),
        tuple(shape),
        tuple(shape),
        {d: d for d in range(ndim - 1)},
        rank=ndim - 1,
    )


TABLE: tuple[Row, ...] = (
    Row(
        "Tensor.view",
        rules.reshape,
        strict=("view.default", "_unsafe_view.default"),
        lenient=("view_copy.default",),
    ),
    Row(
        "torch.reshape",
        rules.reshape,
        lenient=("reshape.default",),
        note="Tensor.reshape on a DTensor reaches the dispatcher as aten.view",
    ),
    Row("torch.flatten", rules.flatten, note="decomposes to view"),
    Row("torch.unflatten", rules.unflatten, note="decomposes to view"),
    Row("torch.ravel", rules.flatten, note="decomposes to view"),
    Row(
        "torch.squeeze",
        rules.squeeze,
        strict=(
            "squeeze.default",
            "squeeze.dim",
            "squeeze.dims",
            "squeeze_.default",
            "squeeze_.dim",
            "squeeze_.dims",
        ),
        wants_whole_dims=True,
    ),
    Row(
        "torch.unsqueeze",
        rules.unsqueeze,
        lenient=("unsqueeze.default",),
        signed=("unsqueeze_copy.default",),
    ),
    Row("Tensor.expand", rules.expand, lenient=("expand.default", "expand_copy.default")),
    Row("torch.broadcast_to", rules.expand, note="decomposes to expand"),
    Row(
        "torch.permute",
        rules.permute,
        lenient=("permute.default",),
        signed=("permute_copy.default",),
    ),
    Row(
        "torch.transpose",
        rules.transpose,
        lenient=("transpose.int",),
        signed=("transpose_copy.int",),
    ),
    Row("torch.t", rules.turned, signed=("t.default", "t_copy.default")),
    Row("torch.movedim", rules.movedim, note="decomposes to permute"),
    Row("Tensor.repeat", rules.repeat, lenient=("repeat.default",)),
    Row("torch.tile", rules.tile, note="decomposes to repeat"),
    Row("torch.atleast_1d", rules.at_least(1), note="decomposes to view"),
    Row("torch.atleast_2d", rules.at_least(2), note="decomposes to unsqueeze"),
    Row("torch.atleast_3d", rules.at_least_3d, note="decomposes to unsqueeze"),
    Row("torch.view_as_real", rules.view_as_real, lenient=("view_as_real.default",)),
    Row(
        "torch.view_as_complex",
        rules.view_as_complex,
        lenient=("view_as_complex.default",),
        wants_whole_dims=True,
        pairs=True,
    ),
)
"""The rows, one for each view op.

>>> sum(row.op == "torch.permute" for row in TABLE)
1
"""

BY_OP: dict[str, Row] = {row.op: row for row in TABLE}
"""The rows by the name that the op has in torch.

>>> BY_OP["torch.unsqueeze"].view((2, 3), 1).output_shape
(2, 1, 3)
"""

BY_OVERLOAD: dict[str, tuple[Row, bool]] = {
    **{name: (row, True) for row in TABLE for name in row.strict},
    **{name: (row, False) for row in TABLE for name in row.lenient},
}
"""For each aten overload its row, and whether it is strict.

>>> row, strict = BY_OVERLOAD["view.default"]
>>> row.op, strict
('Tensor.view', True)
"""
