"""Deciding facts about sizes and strides, ints or sympy expressions in positive integer symbols.

Each predicate answers ``True`` (proved), ``False`` (disproved) or ``None`` (neither). The proofs are polynomial
identities: every symbol stands for a positive integer, so a polynomial whose coefficients are all non-negative once each
symbol ``s`` is written ``1 + t`` is non-negative, and ``a`` divides ``b`` when ``b / a`` cancels to integer coefficients.
A caller's facts (:func:`assuming`) enter as substitutions (``s % 4 == 0`` writes ``s`` as ``4 * s'``), so they need no rules of
their own.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cute_sharding.layout.errors import LayoutError, Undecided

if TYPE_CHECKING:
    import sympy

# A size or stride: an int or a sympy.Expr. sympy is imported only once an expression turns up.
Int = Any


def is_static(*values: Int) -> bool:
    """Whether every value is a plain int (no symbol anywhere)."""
    return all(type(value) is int for value in values)


@dataclass(frozen=True)
class _Facts:
    """Facts in force: substitutions for symbols, and divisibilities and inequalities that are no substitution."""

    substitution: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    divisible: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()  # (expr, n): n divides expr
    nonnegative: tuple[sympy.Expr, ...] = ()
    zero: tuple[sympy.Expr, ...] = field(default=())


_NO_FACTS = _Facts()
_facts: ContextVar[_Facts] = ContextVar("cute_sharding_facts", default=_NO_FACTS)


def symbol(name: str) -> sympy.Symbol:
    """The positive integer symbol of that name, as :meth:`Layout.parse` reads it."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def parse_expr(text: str, *, rational: bool = False) -> Any:
    """An int, a sympy expression in positive integer symbols, or a nested tuple of them, read from ``text``.

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
                    raise LayoutError(f"cannot read {text!r}: {a}/{b} is not an integer expression; use //")
                return _BINARY[type(op)](a, b)
            case ast.Call(func=ast.Name(id="floor" | "ceiling" | "Mod" as name), args=args, keywords=[]):
                import sympy

                return getattr(sympy, name)(*(walk(arg) for arg in args))
        raise LayoutError(f"cannot read {text!r}: expected integers, names, tuples and arithmetic")

    try:
        return walk(ast.parse(text.strip(), mode="eval"))
    except SyntaxError as error:
        raise LayoutError(f"cannot read {text!r}: {error.msg}") from None
    except ZeroDivisionError:
        raise LayoutError(f"cannot read {text!r}: division by zero") from None


@contextmanager
def assuming(*facts: str) -> Iterator[None]:
    """Add facts for the algebra to use inside the ``with`` block.

    A fact is text, as an :class:`Undecided` error names it: ``"s0 % 4 == 0"``, ``"s0 >= 8"``, ``"s0 < s1"``, ``"s0 == s1"``.

    >>> from cute_sharding.layout import Layout, assuming, logical_divide, symbol
    >>> with assuming("s % 4 == 0"):
    ...     logical_divide(Layout(symbol("s")), Layout(4))
    (4,s/4):(1,4)
    """
    token = _facts.set(_extend(_facts.get(), facts))
    try:
        yield
    finally:
        _facts.reset(token)


def _extend(facts: _Facts, texts: tuple[str, ...]) -> _Facts:
    import sympy

    for text in texts:
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            node = None
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
            raise LayoutError(f"cannot read the fact {text!r}: expected one comparison, such as 's0 % 4 == 0' or 's0 >= 8'")
        left, right = node.left, node.comparators[0]
        kind = type(node.ops[0])
        b = parse_expr(ast.unparse(right), rational=True)
        if kind is ast.Eq and isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and b == 0:
            expr, n = parse_expr(ast.unparse(left.left), rational=True), parse_expr(ast.unparse(left.right), rational=True)
            substituted = None
            if isinstance(expr, sympy.Symbol):
                quotient = sympy.Dummy(f"{expr.name}_over", integer=True, positive=True)
                substituted = _substituted(facts, expr, n * quotient)
            if substituted is not None:
                facts = substituted
            else:
                facts = _Facts(facts.substitution, (*facts.divisible, (sympy.sympify(expr), sympy.sympify(n))), facts.nonnegative, facts.zero)
            continue
        a = parse_expr(ast.unparse(left), rational=True)
        if kind is ast.Eq:
            target = next((x for x in (a, b) if isinstance(x, sympy.Symbol)), None)
            substituted = None
            if target is not None:
                substituted = _substituted(facts, target, sympy.sympify(b if target is a else a))
            if substituted is not None:
                facts = substituted
            else:
                facts = _Facts(facts.substitution, facts.divisible, facts.nonnegative, (*facts.zero, sympy.sympify(a) - b))
            continue
        if isinstance(a, tuple) or isinstance(b, tuple):
            raise LayoutError(f"cannot read the fact {text!r}: it compares tuples")
        differences: dict[type, Any] = {ast.GtE: a - b, ast.Gt: a - b - 1, ast.LtE: b - a, ast.Lt: b - a - 1}
        if kind not in differences:
            raise LayoutError(f"cannot read the fact {text!r}: use ==, <, <=, > or >=")
        facts = _Facts(facts.substitution, facts.divisible, (*facts.nonnegative, sympy.sympify(differences[kind])), facts.zero)
    return facts


def _substituted(facts: _Facts, name: sympy.Symbol, value: sympy.Expr) -> _Facts | None:
    """``facts`` with ``name`` written as ``value``; where ``name`` is already written otherwise, both are kept."""
    import sympy

    written = _rewrite(name, facts)
    value = _rewrite(value, facts)
    if written == value:
        return facts
    if not isinstance(written, sympy.Symbol):
        # s = 4 t is known and s = 6 u is new: t = 6 / gcd(4, 6) * v says both.
        coefficient, symbols = written.as_coeff_Mul()
        new, _ = value.as_coeff_Mul()
        if isinstance(symbols, sympy.Symbol) and coefficient.is_Integer and new.is_Integer and len(value.free_symbols) == 1:
            fresh = sympy.Dummy(f"{name.name}_over", integer=True, positive=True)
            written, value = symbols, fresh * (new // sympy.gcd(coefficient, new))
        else:
            return None
    if written in value.free_symbols:
        return None
    return _Facts((*facts.substitution, (written, value)), facts.divisible, facts.nonnegative, facts.zero)


def _rewrite(expr: Int, facts: _Facts) -> Any:
    import sympy

    expr = sympy.sympify(expr)
    for old, new in facts.substitution:
        expr = expr.xreplace({old: new})
    return expr


def _normal(expr: Int) -> Any:
    """``expr`` expanded under the facts in force, so that equal polynomials are equal objects."""
    import sympy

    return sympy.expand(sympy.cancel(_rewrite(expr, _facts.get())))


def is_zero(expr: Int) -> bool | None:
    if type(expr) is int:
        return expr == 0
    e = _normal(expr)
    if e.is_number:
        return bool(e == 0)
    if any(_normal(e - z) == 0 or _normal(e + z) == 0 for z in _facts.get().zero):
        return True
    return False if _positive_coefficients(e, strict=True) or _positive_coefficients(-e, strict=True) else None


def is_nonnegative(expr: Int) -> bool | None:
    if type(expr) is int:
        return expr >= 0
    e = _normal(expr)
    if e.is_number:
        return bool(e >= 0)
    if _positive_coefficients(e, strict=False):
        return True
    if _positive_coefficients(-e, strict=True):
        return False
    known = [_normal(n) for n in _facts.get().nonnegative]
    # A fact, or a sum of two, may be all that is missing.
    sums = known + [a + b for a in known for b in known]
    if any(_positive_coefficients(_normal(e - n), strict=False) for n in sums):
        return True
    if any(_positive_coefficients(_normal(-e - n), strict=True) for n in sums):
        return False
    return None


def is_less(a: Int, b: Int) -> bool | None:
    return is_nonnegative(b - a - 1)


def divides(n: Int, expr: Int) -> bool | None:
    """Whether ``n`` divides ``expr`` for every value of the symbols; ``n`` is taken to be positive."""
    if type(n) is int and type(expr) is int:
        return expr % n == 0
    import sympy

    numerator, denominator = sympy.fraction(sympy.together(sympy.cancel(_rewrite(expr, _facts.get()) / _rewrite(n, _facts.get()))))
    if denominator == 1:
        return True if _integral(numerator) else None
    if denominator.is_Integer and numerator.is_Integer:
        return False
    for known, divisor in _facts.get().divisible:
        quotient = sympy.cancel(_normal(expr) * _normal(divisor) / (_normal(known) * _normal(n)))
        if sympy.fraction(quotient)[1] == 1 and _integral(quotient):
            return True
    # A constant remainder of a polynomial that is otherwise divisible disproves it, as in (4 s + 1) % 4.
    e = _normal(expr)
    modulus = _normal(n)
    if modulus.is_Integer and e.is_polynomial():
        constant, rest = e.as_coeff_Add()
        if constant.is_Integer and constant % modulus != 0 and divides(n, rest):
            return False
    return None


def _integral(numerator: Any) -> bool:
    import sympy

    symbols = sorted(numerator.free_symbols, key=str)
    if not symbols:
        return bool(numerator.is_Integer)
    try:
        return all(c.is_Integer for c in sympy.Poly(numerator, *symbols).coeffs())
    except sympy.PolynomialError:
        return bool(numerator.is_integer)


def _positive_coefficients(e: Any, *, strict: bool) -> bool:
    """Whether ``e`` is a polynomial with non-negative coefficients in (symbol - 1); strict: and a positive constant."""
    import sympy

    symbols = sorted(e.free_symbols, key=str)
    if any(not (s.is_integer and s.is_positive) for s in symbols):
        symbols_ok = [s for s in symbols if s.is_integer and s.is_nonnegative]
        if len(symbols_ok) != len(symbols):
            return False
    shifted = e.subs({s: s + 1 for s in symbols if s.is_positive}, simultaneous=True)
    if not symbols:
        return bool(e > 0) if strict else bool(e >= 0)
    try:
        poly = sympy.Poly(sympy.expand(shifted), *symbols)
    except sympy.PolynomialError:
        return False
    if any(c.is_negative or not c.is_number for c in poly.coeffs()):
        return False
    return not strict or bool(poly.coeff_monomial(1) > 0)


def divisibility(expr: Int, n: Int) -> str:
    """The fact that ``n`` divides ``expr``, as :func:`assuming` reads it."""

    def operand(value: Int) -> str:
        return str(value) if type(value) is int or value.is_Atom else f"({value})"

    return f"{operand(expr)} % {operand(n)} == 0"


def quotient(expr: Int, n: Int) -> Int:
    """``expr / n`` where the division is known to be exact."""
    if type(expr) is int and type(n) is int:
        return expr // n
    import sympy

    return as_int(sympy.cancel(sympy.sympify(expr) / n))


def ceil_quotient(expr: Int, n: Int) -> Int | None:
    """``expr / n`` rounded up, where the quotient is an integer polynomial but for a constant; else None."""
    import sympy

    constant, rest = sympy.expand(sympy.cancel(sympy.sympify(expr) / n)).as_coeff_Add()
    return as_int(rest + sympy.ceiling(constant)) if constant.is_Rational and _integral(rest) else None


def as_int(expr: Int) -> Int:
    """A sympy Integer as a plain int; anything else unchanged."""
    return int(expr) if type(expr) is not int and getattr(expr, "is_Integer", False) else expr


def require(answer: bool | None, fact: str, context: str) -> bool:
    """``answer`` where there is one, else :class:`Undecided` naming ``fact``."""
    if answer is None:
        raise Undecided(fact, context)
    return answer
