"""How torch takes an op apart into others (torch/_decomp): asked here; nothing is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["decomposition"]


def decomposition(op: Any) -> Callable[..., Any] | None:
    """The op as torch's Python code says it by other ops; None where there is none."""
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found
