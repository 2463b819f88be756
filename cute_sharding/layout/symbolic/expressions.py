"""Arithmetic on ints and expressions in symbols, and reading them from text."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cute_sharding.layout.errors import LayoutError

if TYPE_CHECKING:
    import sympy

# A size or stride: an int or a sympy.Expr. sympy is imported only when an expression turns up.
Int = Any


def is_static(*values: Int) -> bool:
    """Whether every value is a plain int (no symbol anywhere)."""
    return all(type(value) is int for value in values)


def as_int(expr: Int) -> Int:
    """A sympy Integer as a plain int; anything else unchanged."""
    return int(expr) if type(expr) is not int and getattr(expr, "is_Integer", False) else expr


def symbol(name: str) -> sympy.Symbol:
    """The positive integer symbol of that name, as :meth:`Layout.parse` reads it.

    >>> Layout((4, symbol("s"))) == Layout.parse("(4,s):(s,1)")
    True
    """
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


@lru_cache(maxsize=1 << 14)  # proofs ask the same again and again, and sympy takes milliseconds
def fraction(expr: Any) -> tuple[Any, Any]:
    """Numerator and denominator in lowest terms."""
    import sympy

    expr = sympy.sympify(expr)
    if not _is_polynomial(expr):
        return sympy.fraction(sympy.together(sympy.cancel(expr)))
    # Nothing cancels: the denominator is that of the coefficients, and sympy need not look for a
    # common factor, which takes far longer.
    expanded = sympy.expand(expr)
    coefficients = expanded.as_coefficients_dict().values()
    denominator = sympy.Integer(sympy.ilcm(1, *[c.q for c in coefficients]))
    return sympy.expand(expanded * denominator), denominator


def _is_polynomial(expr: Any) -> bool:
    """Whether ``expr`` is a polynomial in its symbols with rational coefficients."""
    return (
        expr.is_Symbol
        or expr.is_Rational
        or ((expr.is_Add or expr.is_Mul) and all(map(_is_polynomial, expr.args)))
        or (
            expr.is_Pow
            and expr.exp.is_Integer
            and expr.exp.is_positive
            and _is_polynomial(expr.base)
        )
    )


def is_integral(numerator: Any) -> bool:
    """Whether a polynomial has integer coefficients, or any other expression integer values."""
    import sympy

    symbols = sorted(numerator.free_symbols, key=str)
    if not symbols:
        return bool(numerator.is_Integer)
    try:
        return all(c.is_Integer for c in sympy.Poly(numerator, *symbols).coeffs())
    except sympy.PolynomialError:
        return bool(numerator.is_integer)


def quotient(expr: Int, n: Int) -> Int:
    """``expr / n``, for a division that is known to be exact."""
    if type(expr) is int and type(n) is int:
        return expr // n
    import sympy

    return as_int(sympy.cancel(sympy.sympify(expr) / n))


def ceil_quotient(expr: Int, n: Int) -> Int | None:
    """``expr / n`` rounded up, if that is an integer polynomial plus a constant; else None."""
    if is_static(expr, n):
        return -(-expr // n)
    import sympy

    constant, rest = sympy.expand(sympy.cancel(sympy.sympify(expr) / n)).as_coeff_Add()
    return (
        as_int(rest + sympy.ceiling(constant))
        if constant.is_Rational and is_integral(rest)
        else None
    )


def remainder(a: Int, b: Int) -> Any:
    """``a`` modulo ``b``. Never sympy's Mod: for one Mod in another it builds wrong expressions
    (1.14 squares the inner one), and it may not terminate.
    """
    import sympy

    return sympy.sympify(a) - b * sympy.floor(sympy.sympify(a) / b)


def _modulo(a: Int, b: Int) -> Any:
    """sympy's Mod where it is right, so that an expression reads as it was written."""
    import sympy

    a, b = sympy.sympify(a), sympy.sympify(b)
    return remainder(a, b) if a.has(sympy.Mod) or b.free_symbols else sympy.Mod(a, b)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: lambda a, b: a % b if is_static(a, b) else _modulo(a, b),
    ast.Pow: operator.pow,
}


def parse_expr(text: str, *, rational: bool = False) -> Any:
    """An int, a sympy expression in positive integer symbols, or a nested tuple of them, read from
    ``text``.

    Raises :class:`LayoutError` on anything but integers, names, tuples and arithmetic.
    """

    def walk(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return walk(body)
            case ast.Constant(value=int(value)) if type(value) is int:
                return value
            case ast.Name(id=name):
                return symbol(name)
            case ast.Tuple(elts=items):
                return tuple(walk(item) for item in items)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -walk(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                a, b = walk(left), walk(right)
                if isinstance(op, ast.Div) and is_static(a, b):
                    if rational and b:
                        import sympy

                        return sympy.Rational(a, b)
                    if not b:
                        raise ZeroDivisionError
                    raise LayoutError(f"cannot read {text!r}: use // instead of / in {a}/{b}")
                return _BINARY[type(op)](a, b)
            case ast.Call(
                func=ast.Name(id="floor" | "ceiling" | "Mod" | "Max" | "Min" as name),
                args=args,
                keywords=[],
            ):
                import sympy

                values = [walk(arg) for arg in args]
                return _modulo(*values) if name == "Mod" else getattr(sympy, name)(*values)
        raise LayoutError(
            f"cannot read {text!r}: write only integers, names, tuples and arithmetic"
        )

    try:
        return walk(ast.parse(text.strip(), mode="eval"))
    except SyntaxError as error:
        raise LayoutError(f"cannot read {text!r}: {error.msg}") from None
    except ZeroDivisionError:
        raise LayoutError(f"cannot read {text!r}: division by zero") from None
