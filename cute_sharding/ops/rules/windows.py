"""Rules of ops that look at windows of the last dims, as pools, with their gradients: the
dims before these, images and channels, are free.
"""

from __future__ import annotations

from re import findall
from typing import Any

from cute_sharding.ops.rules.names import Rule, Shape, named, text


def windowed(spatial: int, operands: str = "x", results: str = "y") -> Rule:
    """An op over the last ``spatial`` dims, which its first operand has in the form that comes
    first.

    Args:
        operands: for each tensor that comes in, "x" where its last dims are those of what the
            windows are of, and "y" where they are one for each window; "=x" where the op reads the
            sizes alone.
        results: the same of what comes out.
    """

    def rule(first: Shape, *_: Any, **__: Any) -> str | None:
        leading = len(first) - spatial
        if leading < 1:
            return None
        before = named(first)[:leading]
        names = {form: text([*before, *(f"[{form}{i}]" for i in range(spatial))]) for form in "xy"}
        come_in = [sign + names[form] for sign, form in findall("(=?)([xy])", operands)]
        come_out = [names[form] for form in results]
        return f"{', '.join(come_in)} -> {', '.join(come_out)}"

    return rule
