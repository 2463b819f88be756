"""Plain tensors that autograd itself makes beside DTensors, inside of its nodes
(torch/csrc/autograd/FunctionsManual.cpp): zeros for results that nobody has used, and the like.

torch refuses ops on DTensors and plain tensors together, as it cannot know what a program means by
a plain one. What a node makes is made of the sizes of the whole, alike on each rank: a replica.

And what a node takes of a DTensor by a mask, whose shape the node itself knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.answer.running import run_slowly
from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.observing import current_node
from cute_sharding.dtensor.replaced.registry import overload
from cute_sharding.dtensor.replaced.tensor_specs import as_replica

__all__ = ["handlers_in_nodes"]

# Ops that meet such tensors, and the nodes that make them.
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

# Ops that take the gradient of what was written by index, and the nodes of such writes.
_WRITTEN_IN: dict[str, tuple[str, ...]] = {
    "index.Tensor": ("IndexPut", "IndexPutImpl"),
    "_unsafe_index.Tensor": ("UnsafeIndexPut",),
}


class _InNodes:
    """A key of the dispatcher's dict of functions of single ops: equal to the op where it is looked
    up inside of these nodes, and to nothing elsewhere. There the op is torch's, at torch's speed.
    """

    def __init__(self, op: Any, nodes: tuple[str, ...]) -> None:
        self.op = op
        ends = ("0", "1", "0_copy")  # one for each overload, and one for views that are copies
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
    """Functions of the ops that do so, by keys that are found in these nodes alone."""
    ops = ((overload(name), nodes, _on_replicas) for name, nodes in _MADE_IN.items())
    written = ((overload(name), nodes, _of_values) for name, nodes in _WRITTEN_IN.items())
    return {_InNodes(op, nodes): run for op, nodes, run in (*ops, *written) if op is not None}


def _on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op, with what is no DTensor as a replica. (None of these ops takes a tensor by name.)"""
    mesh = next(leaf.device_mesh for leaf in leaves(args) if isinstance(leaf, DTensor))
    args = tree_map(lambda leaf: as_replica(leaf, mesh) if _is_plain(leaf) else leaf, args)
    return run_slowly(op, args, kwargs)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)


def _of_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of values that were written by a mask. torch takes the elements that the mask
    names, whose number no shape tells, and sums them to the shape of the values. That shape tells
    which number it is; or that all elements have one value, and are summed at once.
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
