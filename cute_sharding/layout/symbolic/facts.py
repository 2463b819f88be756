"""Facts: divisibilities, equalities and orders of expressions, and their text."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from cute_sharding.layout.errors import LayoutError
from cute_sharding.layout.symbolic.expressions import Int, fraction, parse_expr

_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "divides": lambda left, right: left % right == 0,
    "equal": lambda left, right: left == right,
    "at most": lambda left, right: left <= right,
}


class Fact(NamedTuple):
    """``left % right == 0`` ("divides"), ``left == right`` ("equal") or ``left <= right`` ("at
    most"); or its negation, if ``holds`` is False.

    Its text is what :func:`assuming` reads.

    Attributes:
        relation: "divides", "equal" or "at most".
        left, right: ints or sympy expressions.
        holds: whether the relation holds.

    >>> print(Fact("divides", symbol("s"), 4), Fact("at most", symbol("s"), 8, holds=False))
    s % 4 == 0 s > 8
    """

    relation: str
    left: Int
    right: Int
    holds: bool = True

    def is_true_of(self, left: int, right: int) -> bool:
        """Whether the fact is true if its two sides are these numbers.

        >>> Fact("divides", symbol("s"), 4).is_true_of(12, 4)
        True
        """
        answer = _RELATIONS[self.relation](left, right)
        return answer is self.holds

    def __str__(self) -> str:
        left, right = _text(self.left), _text(self.right)
        if self.relation == "divides":
            return (
                f"{_operand(self.left)} % {_operand(self.right)} {'==' if self.holds else '!='} 0"
            )
        if self.relation == "equal":
            return f"{left} {'==' if self.holds else '!='} {right}"
        return f"{left} {'<=' if self.holds else '>'} {right}"


def parse_fact(text: str) -> Fact:
    """The fact in ``text``, such as ``"s0 % 4 == 0"``, ``"s0 < s1"`` or ``"s0 != 4"``."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        node = None
    if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
        raise LayoutError(
            f"cannot read the fact {text!r}: expected one comparison, such as 's0 % 4 == 0' or 's0 "
            ">= 8'"
        )
    left, right = node.left, node.comparators[0]
    kind = type(node.ops[0])
    b = parse_expr(ast.unparse(right), rational=True)
    if (
        kind in (ast.Eq, ast.NotEq)
        and isinstance(left, ast.BinOp)
        and isinstance(left.op, ast.Mod)
        and b == 0
    ):
        return Fact(
            "divides",
            parse_expr(ast.unparse(left.left), rational=True),
            parse_expr(ast.unparse(left.right), rational=True),
            kind is ast.Eq,
        )
    a = parse_expr(ast.unparse(left), rational=True)
    if isinstance(a, tuple) or isinstance(b, tuple):
        raise LayoutError(f"cannot read the fact {text!r}: a fact cannot compare tuples")
    if kind in (ast.Eq, ast.NotEq):
        return Fact("equal", a, b, kind is ast.Eq)
    orders = {
        ast.LtE: (a, b, True),
        ast.Gt: (a, b, False),
        ast.GtE: (b, a, True),
        ast.Lt: (b, a, False),
    }
    if kind not in orders:
        raise LayoutError(f"cannot read the fact {text!r}: compare with ==, !=, <, <=, > or >=")
    return Fact("at most", *orders[kind])


def _operand(value: Int) -> str:
    return str(value) if type(value) is int or value.is_Atom else f"({_text(value)})"


def _text(value: Int) -> str:
    """``value`` as text, with rounded quotients as Python writes them."""
    if type(value) is int:
        return str(value)
    return str(_printer().doprint(value))


@cache
def _printer() -> Any:
    import sympy
    from sympy.printing.str import StrPrinter

    class Printer(StrPrinter):  # type: ignore[misc]
        def _print_floor(self, expr: Any) -> str:
            numerator, denominator = fraction(expr.args[0])
            return "({}//{})".format(
                *(
                    self._print(e) if e.is_Atom else f"({self._print(e)})"
                    for e in (numerator, denominator)
                )
            )

        def _print_ceiling(self, expr: Any) -> str:
            return f"-{self._print_floor(sympy.floor(-expr.args[0], evaluate=False))}"

    return Printer()
