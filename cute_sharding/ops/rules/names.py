"""What rules are written with: tensors as their shapes, and names for their dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Shape: TypeAlias = "tuple[int, ...]"
# An op's arguments, where tensors are their shapes -> a pattern; None where none is known.
Rule: TypeAlias = "Callable[..., str | None]"


def named(x: Shape, whole: Sequence[int] = (), letter: str = "d") -> list[str]:
    """A name for each dim, in brackets for those that are whole."""
    whole = [d % len(x) for d in whole] if x else []
    return [f"[{letter}{d}]" if d in whole else f"{letter}{d}" for d in range(len(x))]


def text(names: Sequence[str]) -> str:
    """Names as a pattern has them."""
    return " ".join(names)


def put(names: Sequence[str], d: int, name: str) -> str:
    """The names with another in place ``d``; none where it is empty."""
    found = list(names)
    if found:
        found[d % len(found)] = name
    return text([n for n in found if n])


class ThisCall(int):
    """A number among an op's arguments that another call of a compiled program may have otherwise.

    >>> n = ThisCall(0)
    >>> n + 2, type(n) is int
    (2, False)
    """
