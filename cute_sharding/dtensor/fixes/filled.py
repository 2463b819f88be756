"""Plain tensors that autograd itself makes beside DTensors, inside its nodes
(torch/csrc/autograd/FunctionsManual.cpp), such as zeros for unused results.

torch refuses ops on DTensors and plain tensors together, because it cannot know what a program
means by a plain one. A node makes its tensor from global sizes, equal on each rank: a replica.

And gradients of elements that a mask selects from a DTensor; the node itself knows their shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.observing import current_node
from cute_sharding.dtensor.replaced.op_schemas import overload
from cute_sharding.dtensor.replaced.tensor_specs import as_replica
from cute_sharding.dtensor.run.op_plan import run_slowly

__all__ = ["handlers_in_nodes"]

# Ops that get such tensors, and the nodes that make them.
_MADE_IN: dict[str, tuple[str, ...]] = {
    "stack.default": ("Unbind",),
    "cat.default": (
        *("Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes"),
        *("LinalgHouseholderProduct", "LuUnpack", "Prod"),
    ),
    "where.self": ("Cumprod",),
    "scatter_add.default": ("Cummax", "Cummin"),
    "slice_scatter.default": ("SliceScatter",),
    "select_scatter.default": ("SelectScatter",),
    "diagonal_scatter.default": ("DiagonalScatter",),
    "index_put.default": ("IndexPut",),
    "index_fill.int_Tensor": ("Trace",),
    "put.default": ("Put", "Take"),
}

# Ops that take the gradient of values written by index, and the nodes of such writes.
_WRITTEN_IN: dict[str, tuple[str, ...]] = {
    "index.Tensor": ("IndexPut", "IndexPutImpl"),
    "_unsafe_index.Tensor": ("UnsafeIndexPut",),
}


class _InNodes:
    """A key of the dispatcher's dict of functions of single ops. It equals the op if it is looked
    up inside one of these nodes, and nothing elsewhere: there the op is torch's, at torch's speed.
    """

    def __init__(self, op: Any, nodes: tuple[str, ...]) -> None:
        self.op = op
        ends = ("0", "1", "0_copy")  # for each overload, and for views that are copies
        self.nodes = frozenset(f"{name}Backward{end}" for name in nodes for end in ends)
        self._hash = hash(op)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if other is not self.op:
            return self is other
        node = current_node()
        return node is not None and node.name() in self.nodes

    def __repr__(self) -> str:
        return f"{self.op} in backward"


def handlers_in_nodes() -> dict[Any, Any]:
    """Functions for these ops, by keys that are found only inside these nodes."""
    ops = ((overload(name), nodes, _on_replicas) for name, nodes in _MADE_IN.items())
    written = ((overload(name), nodes, _of_values) for name, nodes in _WRITTEN_IN.items())
    return {_InNodes(op, nodes): run for op, nodes, run in (*ops, *written) if op is not None}


def _on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op, with plain tensors as replicas. (None of these ops takes a tensor by keyword.)"""
    mesh = next(leaf.device_mesh for leaf in leaves(args) if isinstance(leaf, DTensor))
    args = tree_map(lambda leaf: as_replica(leaf, mesh) if _is_plain(leaf) else leaf, args)
    return run_slowly(op, args, kwargs)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)


def _of_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of values that were written by a mask. torch selects the elements by the mask,
    whose number no shape tells, and sums them to the shape of the values. That shape tells the
    number; or that all elements have one value, and then they are summed at once.
    """
    gradient, indices = args
    at = [d for d, index in enumerate(indices) if index is not None]
    mask, first = indices[at[0]], at[0]
    if len(at) != 1 or mask.dtype not in (torch.bool, torch.uint8):
        return run_slowly(op, args, kwargs)
    node: Any = current_node()
    node, number = node.next_functions[-1]
    values = tuple(node._input_metadata[number].shape)
    last = first + mask.ndim
    behind = gradient.ndim - last  # as in ops.rules.parts.written_by_mask
    mask = mask.view(*mask.shape, *[1] * behind) != 0
    if len(values) > behind and values[-behind - 1] != 1:
        sizes = [*gradient.shape[:first], values[-behind - 1], *gradient.shape[last:]]
        return torch.ops.aten.masked_scatter_backward(gradient, mask.expand(gradient.shape), sizes)
    return gradient.masked_fill(~mask, 0).sum([*range(first, last)]).unsqueeze(first)
