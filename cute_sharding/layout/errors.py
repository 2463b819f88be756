"""The algebra's errors. Both are ValueErrors: the arguments are at fault, not the machine."""

from __future__ import annotations

# The end of the messages of composition, since CuTe's examples are column-major.
ROW_MAJOR = "Layouts are row-major: reverse the modes of a layout that is written in CuTe's order"


class LayoutError(ValueError):
    """No layout satisfies the operation's post-condition, or an argument is not a layout.

    >>> try:
    ...     composition(Layout((4, 6), (7, 1)), Layout(3, 4))
    ... except LayoutError as error:
    ...     print(str(error).rpartition(", ")[2].partition(". ")[0])
    and 2 does not divide 3
    """


class Undecided(LayoutError):
    """The answer depends on a symbol, and no known fact decides it.

    Attributes:
        fact: the missing fact, in the syntax that :func:`cute_sharding.layout.assuming` takes.

    >>> try:
    ...     logical_divide(Layout(symbol("s")), Layout(4))
    ... except Undecided as error:
    ...     print(error.fact)
    s % 4 == 0
    """

    def __init__(self, fact: str, context: str = "") -> None:
        self.fact = fact
        where = f"{context}: " if context else ""
        super().__init__(
            f"{where}the answer depends on the fact `{fact}`. If the fact is true, put the call "
            f"inside: with assuming({fact!r}): ..."
        )
