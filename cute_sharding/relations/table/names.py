"""Parts of signature rules: tensors as their shapes, and names for their dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import Any, TypeAlias

Shape: TypeAlias = "tuple[int, ...]"
# An op's arguments, with shapes for tensors -> a pattern; None if none is known.
Rule: TypeAlias = "Callable[..., str | None]"


def named(x: Shape, whole: Sequence[int] = (), letter: str = "d", signs: str = "[]") -> list[str]:
    """A name for each dim, in brackets for those that are whole; or in other ``signs``."""
    whole, left, right = [d % len(x) for d in whole] if x else [], signs[:1], signs[1:]
    return [f"{left}{letter}{d}{right}" if d in whole else f"{letter}{d}" for d in range(len(x))]


def text(names: Sequence[str]) -> str:
    """The names as they are written in a pattern."""
    return " ".join(names)


def with_name(names: Sequence[str], d: int, name: str) -> str:
    """The names with position ``d`` replaced; removed if ``name`` is empty."""
    found = list(names)
    if found:
        found[d % len(found)] = name
    return text([n for n in found if n])


def without_missing(pattern: str, args: Sequence[Any]) -> str:
    """The pattern without the operands marked ``?`` whose argument is None or missing.

    >>> without_missing("n [...], [c]?, [c]? -> n [...]", [(2, 3), None, (3,)])
    'n [...], [c] -> n [...]'
    """
    if "?" not in pattern:
        return pattern
    before, _, after = pattern.partition("->")
    given = [*args, *[None] * before.count(",")]
    left = [
        names.strip().removesuffix("?")
        for names, arg in zip(before.split(","), given)
        if arg is not None or "?" not in names
    ]
    return f"{', '.join(left)} ->{after}"


def is_whole(start: Any = None, end: Any = None, step: Any = 1) -> bool:
    """Whether a slice takes all rows of a dim of any length: compilers write the `:` of `x[:,
    None]` like this.
    """
    return (
        (start is None or (type(start) is int and start == 0))
        and (end is None or (type(end) is int and end >= maxsize))
        and type(step) is int
        and step == 1
    )


class ThisCall(int):
    """A number among an op's arguments that may differ in another call of a compiled program.

    >>> n = ThisCall(0)
    >>> n + 2, type(n) is int
    (2, False)
    """
