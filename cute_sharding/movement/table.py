"""The table of movement ops: one row for each, op -> map of rows -> exchange.

A row is all that is known of an op: how its arguments make a :class:`Move`, and which aten
overloads it answers for in DTensor's dispatcher. Ops that are made of others (narrow, chunk,
tensor_split, hstack) come there as those (dtensor/movement/splits.py makes the slices of
tensor_split one exchange). docs/rules.md shows the table.

Source: the ops' definitions in PyTorch's documentation and in
aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cute_sharding.movement import rules
from cute_sharding.ops.assign import Linear
from cute_sharding.ops.table import COPIES, COPIES_ALL
from cute_sharding.relations.moves import Move


class Signed(NamedTuple):
    """How an op is by its signature, which follows from its map of rows (signatures.py): what the
    map does not say.

    Attributes:
        linear: the operands of which what is pending may stay so.
        filled: no device may be left without rows.
        also: overloads that go by the signature alone.
        otherwise: the signature for arguments of which no map is known.

    >>> Signed(COPIES).linear.operands
    (0,)
    """

    linear: Linear | tuple[int, ...] = ()
    filled: bool = False
    also: tuple[str, ...] = ()
    otherwise: str | None = None


PAD = Signed(filled=True)


@dataclass(frozen=True)
class Row:
    """One movement op.

    Attributes:
        op: its name in torch.
        rule: ``(operands' shapes and arguments) -> Move``.
        overloads: the aten overloads.
        reads: how many of its operands the results are made of; None: all. The gradient of a pad is
            given what was padded, too.
        note: what a reader of the table should know.
        signed: how it is by its signature, where that answers; None: it does not.

    >>> row = BY_OP["torch.flip"]
    >>> isinstance(row, Row), row.overloads
    (True, ('flip.default',))
    """

    op: str
    rule: rules.Rule
    overloads: tuple[str, ...] = ()
    note: str = field(default="", compare=False)
    reads: int | None = None
    signed: Signed | None = None

    def move(self, *args: Any, **kwargs: Any) -> Move | None:
        """The op on tensors of those shapes, which stand for them among the arguments; None: no map
        is known for such arguments.

        >>> BY_OP["torch.cat"].move([(2, 3), (2, 5)], 1).outputs
        ((2, 8),)
        """
        return self.rule(*args, **kwargs)


def _of_dims(name: str) -> tuple[str, ...]:
    return tuple([name.format(f"{n}d") for n in (1, 2, 3)])


TABLE: tuple[Row, ...] = (
    Row(
        "Tensor.__getitem__",
        rules.sliced,
        ("slice.Tensor",),
        "slices; also narrow, tensor_split",
        signed=Signed(COPIES),
    ),
    Row("slice's gradient", rules.sliced_backward, ("slice_backward.default",), signed=Signed()),
    Row(
        "torch.select",
        rules.selected,
        ("select.int",),
        "also an int as index",
        signed=Signed(COPIES),
    ),
    Row(
        "select's gradient", rules.selected_backward, ("select_backward.default",), signed=Signed()
    ),
    Row(
        "torch.unbind",
        rules.unbound,
        ("unbind.int",),
        signed=Signed(COPIES, also=("unbind_copy.int",), otherwise="... ->"),
    ),
    Row(
        "torch.split",
        rules.split,
        ("split.Tensor",),
        "also chunk",
        signed=Signed(COPIES, also=("unsafe_split.Tensor",)),
    ),
    Row(
        "torch.split, by sizes",
        rules.split_with_sizes,
        ("split_with_sizes.default", "split_with_sizes_copy.default"),
        signed=Signed(COPIES, also=("unsafe_split_with_sizes.default",)),
    ),
    Row(
        "torch.cat",
        rules.concatenated,
        ("cat.default",),
        "also hstack, vstack, dstack",
        signed=Signed(COPIES_ALL),
    ),
    Row(
        "torch.roll",
        rules.rolled,
        ("roll.default",),
        signed=Signed(COPIES, otherwise="[...] -> [...]"),
    ),
    Row(
        "torch.flip", rules.flipped, ("flip.default",), "also fliplr, flipud", signed=Signed(COPIES)
    ),
    Row(
        "torch.nn.functional.pad",
        rules.padded,
        ("constant_pad_nd.default",),
        "with a constant",
        signed=Signed(),
    ),
    Row("torch.tril", rules.triangle(True), ("tril.default",), "free on any cut", signed=Signed()),
    Row("torch.triu", rules.triangle(False), ("triu.default",), "free on any cut", signed=Signed()),
    Row(
        "torch.nn.functional.pad, reflect",
        rules.folded("reflect"),
        _of_dims("reflection_pad{}.default"),
        signed=PAD,
    ),
    Row(
        "reflection_pad's gradient",
        rules.folded_backward("reflect"),
        _of_dims("reflection_pad{}_backward.default"),
        reads=1,
        signed=PAD,
    ),
    Row(
        "torch.nn.functional.pad, replicate",
        rules.folded("replicate"),
        _of_dims("replication_pad{}.default"),
        signed=PAD,
    ),
    Row(
        "replication_pad's gradient",
        rules.folded_backward("replicate"),
        _of_dims("replication_pad{}_backward.default"),
        reads=1,
        signed=PAD,
    ),
    Row(
        "torch.diagonal",
        rules.diagonal,
        ("diagonal.default",),
        signed=Signed(also=("diagonal_copy.default",)),
    ),
    Row("diagonal's gradient", rules.diagonal_backward, ("diagonal_backward.default",)),
    Row("Tensor.unfold", rules.unfolded, ("unfold.default",)),
    Row("unfold's gradient", rules.unfolded_backward, ("unfold_backward.default",)),
)
"""The rows, one for each movement op.

>>> sum(row.op == "torch.roll" for row in TABLE)
1
"""

BY_OP: dict[str, Row] = {row.op: row for row in TABLE}
"""The rows by the name that the op has in torch.

>>> BY_OP["torch.select"].move((4, 6), 1, -1).outputs
((4,),)
"""

BY_OVERLOAD: dict[str, Row] = {name: row for row in TABLE for name in row.overloads}
"""For each aten overload its row.

>>> BY_OVERLOAD["roll.default"].op
'torch.roll'
"""
