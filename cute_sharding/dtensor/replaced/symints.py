"""Sizes that are SymInts and the ShapeEnv that knows them
(torch/fx/experimental/symbolic_shapes.py, torch/utils/_sympy).

Nodes, hints and expressions are read. Guards are added here only by reading a SymInt's value
(:func:`number_of`) or testing a condition (:func:`is_truly`). (All places that add guards:
compiled/__init__.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from cute_sharding.relations.table.names import ThisCall

__all__ = [
    "SymbolicStride",
    "are_without_factors",
    "ask_whether_contiguous",
    "assert_at_run_time",
    "factors_at_hand",
    "has_shape_env",
    "is_empty",
    "is_symbolic",
    "is_truly",
    "number_of",
    "numbers_at_hand",
    "settled",
    "settled_spec",
    "shape_with_symbols",
    "size_text",
    "split_factor_of",
    "split_factors",
    "with_numbers",
]

assert_at_run_time = torch._check


def is_symbolic(*values: Any) -> bool:
    """Whether there is a SymInt among the values (tracing with dynamic shapes)."""
    for value in values:  # every redistribution calls this several times
        if type(value) is not int and (
            is_symbolic(*value)
            if isinstance(value, (tuple, list))
            else isinstance(value, torch.SymInt)
        ):
            return True
    return False


def number_of(size: Any) -> int:
    """The value of a SymInt, with a guard that it has this value. For a symbol's quotient that
    divides, or for a product, the guards are on the symbols, which torch then knows completely.

    (A guard on a product alone would leave sizes half known, which become constants when the
    backward pass is traced: too late for its results.)
    """
    expr = size.node.expr
    if len(expr.free_symbols) > 1 and size.node.has_hint():
        for symbol in sorted(expr.free_symbols, key=str):
            int(size.node.shape_env.create_symintnode(symbol, hint=None))
    if type(expr).__name__ == "FloorDiv" and expr.args[0].is_Symbol and expr.args[1].is_Integer:
        from torch.utils._sympy.functions import Mod

        base, divisor = expr.args
        shape_env = size.node.shape_env
        if Mod(base, divisor) in shape_env.divisible:
            return int(shape_env.create_symintnode(base, hint=None)) // int(divisor)
    return int(size)


class SymbolicStride(_StridedShard):
    """A _StridedShard whose split factor is a SymInt. torch's code and programs that read the
    factor get a number, with a guard that it has this value; our rules use the symbol.
    """

    def __init__(self, dim: int, symbol: torch.SymInt) -> None:
        now: Any = symbol.node.hint
        super().__init__(dim, split_factor=now)
        self.symbol = symbol

    @property
    def split_factor(self) -> int:  # type: ignore[override]
        return number_of(self.symbol)

    def _split_factor_int(self) -> int:
        return self.split_factor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _StridedShard)
            and self.dim == other.dim
            and size_text(self.symbol) == size_text(split_factor_of(other))
        )

    def __hash__(self) -> int:
        return hash((self.dim, self.symbol.node.expr))

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.symbol})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.symbol})"


def split_factor_of(placement: _StridedShard) -> Any:
    """The split factor; a symbol if it is one."""
    return placement.symbol if isinstance(placement, SymbolicStride) else placement.split_factor


# Kinds of placements without split factors: isinstance of torch's placements is Python code.
_WITHOUT = frozenset({Shard, Replicate, Partial})


def are_without_factors(placements: Sequence[Placement]) -> bool:
    """Whether no placement has a split factor."""
    return _WITHOUT.issuperset(map(type, placements)) or not any(
        isinstance(p, _StridedShard) for p in placements
    )


def split_factors(spec: DTensorSpec) -> list[Any]:
    if are_without_factors(spec.placements):
        return []
    return [split_factor_of(p) for p in spec.placements if isinstance(p, _StridedShard)]


def settled(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements with numbers for split factors: for a SymInt its present value, with a guard
    that it has this value.
    """
    return tuple(
        [
            _StridedShard(p.dim, split_factor=p.split_factor)
            if isinstance(p, SymbolicStride)
            else p
            for p in placements
        ]
    )


def settled_spec(spec: DTensorSpec) -> DTensorSpec:
    if not any(isinstance(p, SymbolicStride) for p in spec.placements):
        return spec
    return DTensorSpec(
        spec.mesh,
        settled(spec.placements),
        spec.tensor_meta,
        spec.shard_order,
        spec.use_strided_shard_as_shard_order,
    )


def shape_with_symbols(shape: Sequence[Any], stride: Sequence[Any]) -> Any:
    """The shape; if only the strides hold SymInts, its first size becomes an equal symbolic one.

    torch's C++ cache must not look up specs with symbols, which cannot be hashed. To find symbols
    it looks at the shape alone (torch/csrc/autograd/python_variable.cpp), but a column of a matrix,
    one of whose sizes is a number, has a symbol in its stride.
    """
    if not shape or is_symbolic(shape) or not is_symbolic(stride):
        return shape
    symbol = next(n for n in stride if isinstance(n, torch.SymInt))
    first, *others = shape
    sizes: Any = (symbol * 0 + first, *others)
    return torch.Size(sizes)


def has_shape_env(*values: Any) -> bool:
    """Whether every SymInt among the values belongs to a trace (LocalTensorMode has others, which
    stand for a number on each rank).
    """
    return all(
        has_shape_env(*v)
        if isinstance(v, (tuple, list))
        else not isinstance(v, torch.SymInt) or hasattr(v.node, "shape_env")
        for v in values
    )


def numbers_at_hand(value: Any) -> Any | None:
    """The value with numbers for SymInts, their values in the call that is being compiled. None if
    one has no value yet or does not belong to a compiler, or if a leaf is neither a number nor
    None. No guard is added.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.SymInt):
            if not (has_shape_env(leaf) and leaf.node.has_hint()):
                return None
        elif not (leaf is None or isinstance(leaf, (int, float))):
            return None
    return tree_map_only(torch.SymInt, lambda n: int(n.node.hint), value)


def with_numbers(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An op's arguments with numbers for SymInts, which know that another call may have other
    numbers; 0 for those without a value yet. No guard is added.
    """
    if not is_symbolic(*args, *kwargs.values()):
        return args, kwargs
    found: tuple[Any, dict[str, Any]] = tree_map_only(
        torch.SymInt, lambda n: ThisCall(numbers_at_hand(n) or 0), (args, kwargs)
    )
    return found


def factors_at_hand(specs: Sequence[DTensorSpec]) -> dict[int, Any] | None:
    """Present number -> split factor. None if one has no number, or if two have the same number
    that may differ in a later call.
    """
    found: dict[int, Any] = {}
    for factor in (factor for spec in specs for factor in split_factors(spec)):
        number = numbers_at_hand(factor)
        if number is None or size_text(found.setdefault(number, factor)) != size_text(factor):
            return None
    return found


def is_truly(condition: Any) -> bool:
    """Whether a condition on sizes holds, with a guard for the outcome; False if sizes have no
    value yet.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_empty(size: Any) -> bool:
    """Whether a size is 0 now, with a guard if it is.

    torch tests whether the product of a tensor's sizes is 0, and takes the outcome for a fact about
    the other factors: it divides by this one.
    """
    return isinstance(size, torch.SymInt) and size.node.hint == 0 and is_truly(size == 0)


def ask_whether_contiguous(shape: Sequence[Any], stride: Sequence[Any]) -> None:
    """Add the guards that torch adds to find out whether a tensor with these sizes and strides is
    contiguous, if some are symbols.
    """
    symbols = [n for n in (*shape, *stride) if isinstance(n, torch.SymInt)]
    if not symbols or not has_shape_env(*symbols):
        return
    wanted: Any = 1
    for n, step in zip(reversed(shape), reversed(stride)):
        if is_truly(n == 1):
            continue
        if not is_truly(step == wanted):
            return
        wanted = n * wanted


def size_text(n: Any) -> str:
    """A size as text: equal for sizes that are known to be equal."""
    return str(n.node.expr) if isinstance(n, torch.SymInt) else str(n)
