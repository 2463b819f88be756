"""Plain tensors that autograd itself makes beside DTensors, inside of its nodes
(torch/csrc/autograd/FunctionsManual.cpp): zeros for results that nobody has used, and the like.

torch refuses ops on DTensors and plain tensors together, as it cannot know what a program means by
a plain one. What a node makes is made of the sizes of the whole, alike on each rank: a replica.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

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

_node = torch._C._current_autograd_node

# .inside: whether the thread runs the op that it was asked for in a node
_thread = threading.local()


class _InNodes:
    """A key of the dispatcher's dict of functions of single ops: equal to the op where it is looked
    up inside of these nodes, and to nothing elsewhere. There the op is torch's, at torch's speed.
    """

    def __init__(self, op: torch._ops.OpOverload, nodes: tuple[str, ...]) -> None:
        self.op = op
        ends = ("0", "1", "0_copy")  # one for each overload, and one for views that are copies
        self.nodes = frozenset(f"{name}Backward{end}" for name in nodes for end in ends)
        self._hash = hash(op)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if other is not self.op:
            return self is other
        node = _node()
        return (
            node is not None and node.name() in self.nodes and not getattr(_thread, "inside", False)
        )

    def __repr__(self) -> str:
        return f"{self.op} in backward"


def handlers_in_nodes() -> dict[Any, Any]:
    """Functions of the ops that meet such tensors, by keys that are found in these nodes alone."""
    ops = ((overload(name), nodes) for name, nodes in _MADE_IN.items())
    return {_InNodes(op, nodes): _on_replicas for op, nodes in ops if op is not None}


def _on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op, with what is no DTensor as a replica. (None of these ops takes a tensor by name.)"""
    mesh, is_mixed = None, False
    for arg in args:
        for leaf in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(leaf, DTensor):
                mesh = leaf.device_mesh
            elif isinstance(leaf, torch.Tensor):
                is_mixed = True
    if is_mixed:
        args = tree_map(lambda leaf: as_replica(leaf, mesh) if _is_plain(leaf) else leaf, args)
    _thread.inside = True
    try:
        return op(*args, **kwargs)
    finally:
        _thread.inside = False


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
