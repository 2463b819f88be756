"""What is known of ops: relations of those of aten, by the tables of views and of movement and of a
few ops beside; and what the schema of any op says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from cute_sharding.dtensor.replaced.local_tensors import leaves
from cute_sharding.layout.layout import row_major
from cute_sharding.relations import NotOnlyMoved, Relation, compose, piece
from cute_sharding.relations.moves import Shape
from cute_sharding.relations.relation import join_pieces
from cute_sharding.relations.table import BY_OP, TABLE

# From the op's arguments, with shapes in the place of tensors; of tensors of indices these.
Rule: TypeAlias = "Callable[..., Relation]"


def relation_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Relation | None:
    """What an op says of its results, by its overload's name; None where no table has it.

    Raises:
        NotOnlyMoved, ValueError, TypeError, IndexError: it says nothing of such arguments.
    """
    rule = _RULES.get(name)
    return None if rule is None else rule(*args, **kwargs)


def value_of(name: str, args: Sequence[Any]) -> Any | None:
    """What every element is of a new tensor that an op makes; None where the op makes none."""
    made = FILLS.get(name.partition(".")[0])
    return None if made is None else made(args)


# -- rules -----------------------------------------------------------------------------------------


def _identity(shape: Shape, *args: Any, **kwargs: Any) -> Relation:
    return Relation.same(shape)


def _stacked(shapes: Sequence[Shape], dim: int = 0) -> Relation:
    """A cat of tensors with a dim more."""
    d = dim % (len(shapes[0]) + 1)
    more = [(*shape[:d], 1, *shape[d:]) for shape in shapes]
    same = Relation.same(*shapes)
    together = BY_OP["torch.cat"].relation(more, d)
    return compose(Relation(same.inputs, tuple(more), same.pieces), together)


def _numbers(index: Any, many: int) -> Any:
    """Numbers of that many rows, which must be known while code is recorded."""
    if not isinstance(index, torch.Tensor) or index.is_meta or index.dtype is torch.bool:
        raise NotOnlyMoved(
            "the row numbers of the index are not known: pass row numbers as torch.tensor([...]) "
            "on the CPU"
        )
    if bool(((index >= many) | (index < -many)).any()):
        raise IndexError(f"a row number is out of bounds for {many} rows")
    return index


def _rows_taken(shape: Shape, dim: int, index: Any) -> Relation:
    """Rows by their numbers."""
    d, below = dim % len(shape), row_major(shape)
    index = _numbers(index, shape[d])
    rows = index.reshape(-1).tolist()
    onto = (*shape[:d], *index.shape, *shape[d + 1 :])
    beside = row_major((*shape[:d], len(rows), *shape[d + 1 :]))
    others = [(n, below[k], beside[k]) for k, n in enumerate(shape) if k != d]
    if not all(n for n, _, _ in others):
        rows = []
    pieces = [
        piece(0, 0, (row % shape[d]) * below[d], j * beside[d], others)
        for j, row in enumerate(rows)
    ]
    return Relation((shape,), (onto,), join_pieces(pieces))


def _indexed(shape: Shape, indices: Sequence[Any]) -> Relation:
    """``x[:, index]``: of one dim."""
    given = [d for d, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise NotOnlyMoved(
            f"the index selects rows in {len(given)} dims, but a refit can index only one dim at a "
            "time"
        )
    return _rows_taken(shape, given[0], indices[given[0]])


def _rows_put(shape: Shape, dim: int, index: Any, values: Shape) -> Relation:
    """A tensor of which rows, by their numbers, are those of another one, which may be expanded."""
    d, below = dim % len(shape), row_major(shape)
    index = _numbers(index, shape[d])
    rows = [row % shape[d] for row in index.reshape(-1).tolist()]
    if len(set(rows)) < len(rows):
        raise NotOnlyMoved("rows are written twice: give each row number once")
    onto = (*shape[:d], *index.shape, *shape[d + 1 :])
    beside = [0 if n == 1 else step for n, step in zip(values, row_major(values))]
    beside = [0] * (len(onto) - len(values)) + beside
    behind = d + index.ndim
    others = [
        (n, beside[k if k < d else k - 1 + index.ndim], below[k])
        for k, n in enumerate(shape)
        if k != d
    ]
    same = [(n, step, step) for k, (n, step) in enumerate(zip(shape, below)) if k != d]
    if not all(n for n, _, _ in others):
        return Relation((shape, values), (shape,), ())
    at = (index.new_tensor(beside[d:behind]) * _coordinates(index)).sum(-1).reshape(-1).tolist()
    pieces = [piece(1, 0, x, row * below[d], others) for x, row in zip(at, rows)]
    rest = [row for row in range(shape[d]) if row not in {*rows}]
    pieces += [piece(0, 0, row * below[d], row * below[d], same) for row in rest]
    return Relation((shape, values), (shape,), join_pieces(pieces))


def _coordinates(index: torch.Tensor) -> torch.Tensor:
    """For each element of a tensor its coordinates, in one more dim."""
    found = torch.ones_like(index).nonzero()
    return found.view(*index.shape, index.ndim)


def _put(shape: Shape, indices: Sequence[Any], values: Shape, accumulate: bool = False) -> Relation:
    """``x[:, index] = values``: of one dim."""
    given = [d for d, index in enumerate(indices) if index is not None]
    if accumulate or len(given) != 1:
        raise NotOnlyMoved(
            f"the write adds up, or has row numbers for {len(given)} dims: write rows of one dim "
            "at a time"
        )
    return _rows_put(shape, given[0], indices[given[0]], values)


_RULES: dict[str, Rule] = {
    **{
        name: row.relation
        for row in TABLE
        if row.is_moved
        for name in (*row.overloads, *row.by_names)
    },
    **dict.fromkeys(
        [
            *("clone.default", "detach.default", "alias.default", "lift_fresh.default"),
            *("lift_fresh_copy.default", "_to_copy.default"),
        ],
        _identity,
    ),
    "stack.default": _stacked,
    "index_select.default": _rows_taken,
    "index.Tensor": _indexed,
    "index_put.default": _put,
    "index_copy.default": _rows_put,
}

# Ops with rows by their numbers: which argument has these.
TAKES_NUMBERS = {
    "index_select.default": 2,
    "index.Tensor": 1,
    "index_put.default": 1,
    "index_copy.default": 2,
}

# New tensors that are one value all over: which, of their arguments.
FILLS: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], lambda args: 0),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], lambda args: 1),
    **dict.fromkeys(["full", "full_like"], lambda args: args[1]),
    "new_full": lambda args: args[2],
    "scalar_tensor": lambda args: args[0],
}

# Ops that give memory without values, and those that may give a tensor other or longer memory.
ALLOCATES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
RESIZES = frozenset({"resize_", "resize_as_", "set_"})
# In-place ops that do not read what they write over: a copy, and one value all over. (Others that
# do not draw random numbers, and torch says that of an op.)
COPY = "copy_"
OVERWRITES = frozenset({COPY, "fill_", "zero_"})
# Ops beside views whose result shares memory with their operand.
LIFTS = "lift_fresh.default"  # what torch.tensor() has just made
SHARES = ("detach.default", "alias.default", LIFTS)
# Ops that ask how a tensor lies, and not for its values.
ASKS = frozenset({"is_pinned.default", "is_same_size.default", "is_contiguous.default"})


# -- traits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpTraits:
    """What an op's schema says of it."""

    is_view: bool
    is_new: bool
    writes: bool
    copies: bool
    resizes: bool
    asks: bool
    gives_tensors: bool
    communicates: bool


def name_of_op(func: Any) -> str:
    """The name of an op's overload, by which tables know those of PyTorch; of an op of another
    library with that.
    """
    return str(func.__name__ if func.namespace == "aten" else func)


def packet_of(func: Any) -> str:
    return str(func.__name__.partition(".")[0] if func.namespace == "aten" else func)


@cache
def traits_of(func: Any) -> OpTraits:
    schema, name, packet = func._schema, name_of_op(func), packet_of(func)
    writes = schema.is_mutable
    return OpTraits(
        is_view=torch.Tag.inplace_view in func.tags
        if writes
        else schema._is_view_op() or name in SHARES,
        is_new=not writes and packet in {*ALLOCATES, *FILLS},
        writes=writes,
        copies=packet == COPY,
        resizes=packet in RESIZES,
        asks=name in ASKS,
        gives_tensors=any("Tensor" in str(x.type) for x in schema.returns),
        communicates="c10d" in func.namespace,
    )


@cache
def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags


@cache
def view_scattered(func: Any) -> Callable[..., Any] | None:
    """Of an op that gives a copy with a view written over, that view; None for other ops."""
    name = packet_of(func)
    if name == COPY.removesuffix("_"):
        return lambda x: x
    if not name.endswith("_scatter") or len(func._schema.arguments) < 3:
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_scatter"), None)
    taken = [x.name for x in func._schema.arguments[:2]]
    if packet is None or taken != ["self", "src"]:
        return None
    found: Callable[..., Any] = packet
    return found


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an op writes to."""
    given = {x.name: value for x, value in zip(func._schema.arguments, args)} | kwargs
    named = [x.name for x in func._schema.arguments if x.is_write]
    return [x for x in leaves([given.get(name) for name in named]) if isinstance(x, torch.Tensor)]
