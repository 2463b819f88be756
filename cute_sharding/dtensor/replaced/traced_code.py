"""Code of a program's own, seen op by op (torch/utils/_python_dispatch.py, _pytree.py), and how
torch takes an op apart into others (torch/_decomp).

Used and asked here; nothing is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["TorchDispatchMode", "decomposition", "tree_leaves", "tree_map"]


def decomposition(op: Any) -> Callable[..., Any] | None:
    """The op as torch's code says it by other ops; None where there is none."""
    from torch._decomp import decomposition_table

    if op not in decomposition_table and op._can_decompose():
        return op.decompose
    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found
