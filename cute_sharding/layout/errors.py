"""What the algebra raises. Both are ValueErrors: the arguments, not the machine, are at fault."""

from __future__ import annotations


class LayoutError(ValueError):
    """No layout satisfies the operation's post-condition, or an argument is not a layout."""


class Undecided(LayoutError):
    """The answer depends on a symbol, and nothing in hand settles it.

    ``fact`` is the missing fact, in the syntax that :func:`cute_sharding.layout.assuming` takes.
    """

    def __init__(self, fact: str, context: str = "") -> None:
        self.fact = fact
        where = f"{context}: " if context else ""
        super().__init__(
            f"{where}undecided without the fact `{fact}`; if it holds, supply it: with "
            f"assuming({fact!r}): ..."
        )
