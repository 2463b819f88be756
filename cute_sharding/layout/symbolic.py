"""Deciding facts about sizes and strides, ints or sympy expressions in positive integer symbols.

Each predicate answers ``True`` (proved), ``False`` (disproved) or ``None`` (neither). The proofs
are polynomial identities: every symbol stands for a positive integer, so a polynomial whose
coefficients are all non-negative once each symbol ``s`` is written ``1 + t`` is non-negative, and
``a`` divides ``b`` when ``b / a`` cancels to integer coefficients. A caller's facts
(:func:`assuming`) enter as substitutions (``s % 4 == 0`` writes ``s`` as ``4 * s'``), so they need
no rules of their own.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement
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
class Fact:
    """``left % right == 0`` ("divides"), ``left == right`` ("equal") or ``left <= right`` ("at
    most"); or, where not ``holds``, that this is not so.

    Its text is what :func:`assuming` reads.
    """

    relation: str
    left: Int
    right: Int
    holds: bool = True

    def __str__(self) -> str:
        left, right = _text(self.left), _text(self.right)
        if self.relation == "divides":
            return (
                f"{_operand(self.left)} % {_operand(self.right)} {'==' if self.holds else '!='} 0"
            )
        if self.relation == "equal":
            return f"{left} {'==' if self.holds else '!='} {right}"
        return f"{left} {'<=' if self.holds else '>'} {right}"


@dataclass(frozen=True)
class _Facts:
    """Facts in force: substitutions for symbols (and, the other way, what each made-up symbol
    stands for), and what is no substitution.
    """

    substitution: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    meaning: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    divisible: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()  # (expr, n): n divides expr
    nonnegative: tuple[sympy.Expr, ...] = ()
    zero: tuple[sympy.Expr, ...] = ()
    nonzero: tuple[sympy.Expr, ...] = ()
    indivisible: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    least: tuple[
        tuple[sympy.Expr, int], ...
    ] = ()  # (symbol, its smallest value), where that is not 1


# Inequalities are added up in pairs while there are no more than these.
FACTS_ADDED = 6

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
                    raise LayoutError(
                        f"cannot read {text!r}: {a}/{b} is not an integer expression; use //"
                    )
                return _BINARY[type(op)](a, b)
            case ast.Call(
                func=ast.Name(id="floor" | "ceiling" | "Mod" | "Max" | "Min" as name),
                args=args,
                keywords=[],
            ):
                import sympy

                values = [walk(arg) for arg in args]
                return _modulo(*values) if name == "Mod" else getattr(sympy, name)(*values)
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

    A fact is text, as an :class:`Undecided` error names it: ``"s0 % 4 == 0"``, ``"s0 >= 8"``, ``"s0
    < s1"``, ``"s0 == s1"``.

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
    for text in texts:
        facts = _with(facts, parse_fact(text))
    return facts


def parse_fact(text: str) -> Fact:
    """The fact that ``text`` says, such as ``"s0 % 4 == 0"``, ``"s0 < s1"`` or ``"s0 != 4"``."""
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
        raise LayoutError(f"cannot read the fact {text!r}: it compares tuples")
    if kind in (ast.Eq, ast.NotEq):
        return Fact("equal", a, b, kind is ast.Eq)
    orders = {
        ast.LtE: (a, b, True),
        ast.Gt: (a, b, False),
        ast.GtE: (b, a, True),
        ast.Lt: (b, a, False),
    }
    if kind not in orders:
        raise LayoutError(f"cannot read the fact {text!r}: use ==, !=, <, <=, > or >=")
    return Fact("at most", *orders[kind])


@lru_cache(maxsize=1 << 12)
def _with(facts: _Facts, fact: Fact) -> _Facts:
    """``facts`` and ``fact``; the same object where both are, so that what follows from them is
    looked up.
    """
    import sympy

    a, b = sympy.sympify(fact.left), sympy.sympify(fact.right)
    if fact.relation == "divides":
        if not fact.holds:
            return replace(facts, indivisible=(*facts.indivisible, (a, b)))
        # In lowest terms, s / 4 for 2 s / 8: a symbol that is a multiple is a substitution.
        a, b = fraction(a / b)
        if isinstance(a, sympy.Symbol):
            multiple = sympy.Dummy(f"{a.name}_over", integer=True, positive=True)
            substituted = _substituted(facts, a, b * multiple, (multiple, a / b))
            if substituted is not None:
                return substituted
        return replace(facts, divisible=(*facts.divisible, (a, b)))
    if fact.relation == "equal":
        if not fact.holds:
            return replace(facts, nonzero=(*facts.nonzero, a - b))
        for target, value in ((a, b), (b, a)):
            substituted = (
                _substituted(facts, target, value) if isinstance(target, sympy.Symbol) else None
            )
            if substituted is not None:
                return substituted
        difference = sympy.expand(_rewrite(a - b, facts))
        if (
            len(difference.free_symbols) == 1
            and difference.is_polynomial()
            and sympy.degree(difference) == 1
        ):
            (name,) = difference.free_symbols
            value = sympy.solve(difference, name)
            substituted = (
                _substituted(facts, name, value[0])
                if value and value[0].is_Integer and value[0] > 0
                else None
            )
            if substituted is not None:
                return substituted
        return replace(facts, zero=(*facts.zero, a - b))
    if fact.holds and isinstance(b, sympy.Symbol) and a.is_Integer:
        return _at_least(facts, b, int(a))
    if not fact.holds and isinstance(a, sympy.Symbol) and b.is_Integer:
        return _at_least(facts, a, int(b) + 1)
    if (
        fact.holds
        and isinstance(a, sympy.Symbol)
        and b.is_Integer
        and dict(facts.least).get(a, 1) == b
    ):
        return _with(facts, Fact("equal", a, b))
    return replace(facts, nonnegative=(*facts.nonnegative, b - a if fact.holds else a - b - 1))


def _at_least(facts: _Facts, name: sympy.Symbol, value: int) -> _Facts:
    """``facts`` with ``name >= value``."""
    written = _rewrite(name, facts)
    coefficient, symbol_part = written.as_coeff_Mul()
    if symbol_part.is_Symbol and coefficient.is_Integer and coefficient > 0:
        known = dict(facts.least)
        known[symbol_part] = max(known.get(symbol_part, 1), -(-value // int(coefficient)))
        return replace(facts, least=tuple(known.items()))
    return replace(facts, nonnegative=(*facts.nonnegative, name - value))


def _substituted(
    facts: _Facts, name: sympy.Symbol, value: sympy.Expr, meaning: tuple[Any, Any] | None = None
) -> _Facts | None:
    """``facts`` with ``name`` written as ``value``; where ``name`` is already written otherwise,
    both are kept. ``meaning`` is what the symbol that ``value`` brings in stands for.
    """
    import sympy

    written = _rewrite(name, facts)
    value = _rewrite(value, facts)
    if written == value:
        return facts
    if not isinstance(written, sympy.Symbol):
        # s = 4 t is known and s = 6 u is new: t = 6 / gcd(4, 6) * v says both.
        coefficient, symbols = written.as_coeff_Mul()
        new, _ = value.as_coeff_Mul()
        if (
            isinstance(symbols, sympy.Symbol)
            and value.is_Integer
            and (value / coefficient).is_Integer
        ):
            # s = 4 t is known, and s = 8 is new.
            written, value = symbols, value / coefficient
        elif (
            isinstance(symbols, sympy.Symbol)
            and coefficient.is_Integer
            and new.is_Integer
            and len(value.free_symbols) == 1
            and meaning is not None
        ):
            factor = new // sympy.gcd(coefficient, new)
            fresh = sympy.Dummy(f"{name.name}_over", integer=True, positive=True)
            written, value, meaning = symbols, fresh * factor, (fresh, symbols / factor)
        else:
            return None
    if written in value.free_symbols:
        return None
    least = dict(facts.least)
    smallest = least.pop(written, 1)
    if smallest > 1 and meaning is not None:
        coefficient, _ = value.as_coeff_Mul()
        if coefficient.is_Integer and value == coefficient * meaning[0]:
            least[meaning[0]] = -(-smallest // int(coefficient))
    nonnegative = (
        facts.nonnegative
        if smallest <= 1 or value.is_Symbol
        else (*facts.nonnegative, value - smallest)
    )
    if value.is_Symbol and smallest > 1:
        least[value] = max(least.get(value, 1), smallest)
    return replace(
        facts,
        substitution=(*facts.substitution, (written, value)),
        meaning=facts.meaning if meaning is None else (*facts.meaning, meaning),
        nonnegative=nonnegative,
        least=tuple(least.items()),
    )


def _rewrite(expr: Int, facts: _Facts) -> Any:
    import sympy

    expr = sympy.sympify(expr)
    for old, new in facts.substitution:
        expr = expr.xreplace({old: new})
    return expr


def _normal(expr: Int) -> Any:
    """``expr`` expanded under the facts in force, so that equal polynomials are equal objects.
    Quotients that are rounded down stand as ``floor``.
    """
    return _normalized(expr, _facts.get())


@lru_cache(maxsize=1 << 14)
def _normalized(expr: Int, facts: _Facts) -> Any:
    import sympy

    expr = _rewrite(expr, facts)
    if expr.has(sympy.floor, sympy.ceiling, sympy.Mod):
        expr = _floored(expr, facts)
    return sympy.expand(sympy.cancel(expr))


def _floored(expr: Any, facts: _Facts) -> Any:
    """``expr`` with every rounded quotient as one of floor, in lowest terms, or as the quotient
    where it is exact.
    """
    import sympy

    if not expr.args:
        return expr
    args = [_floored(arg, facts) for arg in expr.args]
    if expr.func is sympy.Mod:
        return args[0] - args[1] * _floor(args[0], args[1], facts)
    if expr.func is sympy.floor:
        return _floor(*fraction(args[0]), facts)
    if expr.func is sympy.ceiling:
        return -_floor(*fraction(-args[0]), facts)
    return expr.func(*args)


def remainder(a: Int, b: Int) -> Any:
    """``a`` modulo ``b``. Never sympy's Mod: of one in another it makes wrong expressions (1.14
    squares the inner one), and it may not come to an end.
    """
    import sympy

    return sympy.sympify(a) - b * sympy.floor(sympy.sympify(a) / b)


def _modulo(a: Int, b: Int) -> Any:
    """sympy's Mod where it is right, so that what is read is what was written."""
    import sympy

    a, b = sympy.sympify(a), sympy.sympify(b)
    return remainder(a, b) if a.has(sympy.Mod) or b.free_symbols else sympy.Mod(a, b)


def fraction(expr: Any) -> tuple[Any, Any]:
    """Numerator and denominator in lowest terms."""
    import sympy

    return sympy.fraction(sympy.together(sympy.cancel(expr)))


def _floor(numerator: Any, denominator: Any, facts: _Facts) -> Any:
    import sympy

    numerator, denominator = fraction(numerator / denominator)
    if (denominator.is_number and denominator < 0) or (
        not denominator.is_number and _is_positive(sympy.expand(-denominator))
    ):
        numerator, denominator = sympy.expand(-numerator), sympy.expand(-denominator)
    elif not denominator.is_number and not _is_positive(sympy.expand(denominator)):
        # Of unknown sign: what follows is about positive ones.
        return sympy.floor(numerator / denominator)
    if numerator.is_polynomial() and all(
        c.is_negative for c in numerator.as_coefficients_dict().values()
    ):
        return -_floor(denominator - numerator - 1, denominator, facts)
    if denominator == 1 or _divides(denominator, numerator, facts):
        return sympy.expand(sympy.cancel(numerator / denominator))
    for beyond in (sympy.expand(numerator).as_coeff_Add()[0], denominator - 1):
        # What is a multiple but for a constant, or was rounded up to here.
        if beyond != 0 and _divides(denominator, sympy.expand(numerator - beyond), facts):
            return sympy.expand(sympy.cancel((numerator - beyond) / denominator)) + sympy.floor(
                beyond / denominator
            )
    if not denominator.is_number:
        # What is a multiple of the denominator comes out: floor((s n + r) / s) = n + floor(r / s).
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(numerator)):
            quotient, below = fraction(term / denominator)
            if below == 1:
                whole += quotient
            else:
                rest += term
        if rest == 0 or (_is_nonnegative(rest) and _is_positive(sympy.expand(denominator - rest))):
            return whole
        if whole != 0:
            return whole + sympy.floor(rest / denominator)
    return sympy.floor(sympy.expand(numerator / denominator))


def simplified(expr: Int, names: Iterable[tuple[Any, Any]] = ()) -> Int:
    """``expr`` in the simplest form that the facts in force allow, in the caller's symbols. Where
    the facts make it an integer it may read as a fraction, such as ``s/4``.

    ``names`` are (expression, symbol) pairs: expressions that have a symbol of their own, to be
    used where they are part of ``expr``.
    """
    import sympy

    facts = _facts.get()
    expr = _normalized(expr, facts)
    for named, name in names:
        coefficient, form = _normalized(named, facts).as_coeff_Mul()
        if form.is_Symbol or (
            coefficient == 1 and isinstance(form, (sympy.floor, sympy.Max, sympy.Min))
        ):
            expr = expr.xreplace({form: name / coefficient})
    return as_int(sympy.factor_terms(_meant(expr, facts)))


def _meant(expr: Any, facts: _Facts) -> Any:
    """``expr`` without symbols that a fact brought in."""
    for name, value in reversed(facts.meaning):
        expr = expr.xreplace({name: value})
    return expr


def is_zero(expr: Int) -> bool | None:
    if type(expr) is int:
        return expr == 0
    e = _normal(expr)
    if e.is_number:
        return bool(e == 0)
    facts = _facts.get()
    if any(_normal(e - z) == 0 or _normal(e + z) == 0 for z in facts.zero):
        return True
    if _is_positive(e) or _is_positive(-e):
        return False
    import sympy

    constant, powers = sympy.factor_list(fraction(e)[0])
    if len(powers) > 1 or constant not in (1, -1):
        answers = [is_zero(factor) for factor, _ in powers]
        if True in answers:
            return True
        if None not in answers:
            return False
    if any(_normal(e - z) == 0 or _normal(e + z) == 0 for z in facts.nonzero):
        return False
    return None


def is_nonnegative(expr: Int) -> bool | None:
    if type(expr) is int:
        return expr >= 0
    import sympy

    e = _normal(expr)
    if e.is_number:
        return bool(e >= 0)
    if _is_nonnegative(e):
        return True
    if _is_positive(-e):
        return False
    if isinstance(e, (sympy.Min, sympy.Max)):
        parts = {is_nonnegative(part) for part in e.args}
        settling = isinstance(
            e, sympy.Max
        )  # one that is negative settles it for the smallest, one that is not for the largest
        if settling in parts:
            return settling
        if None not in parts:
            return not settling
    sums = list(_that_may_be_missing(e))
    if any(_is_nonnegative(_normal(e - n)) for n in sums):
        return True
    if any(_is_positive(_normal(-e - n)) for n in sums):
        return False
    return None


def _that_may_be_missing(e: Any) -> Iterator[Any]:
    """The facts that something is not negative, and the sums of two, that may be all that is
    missing to a proof about ``e``: they share symbols with it, and no Min or Max is left over.
    """
    import sympy

    known = [_normal(n) for n in _facts.get().nonnegative]
    sums: list[tuple[Any, ...]] = [(n,) for n in known]
    if len(known) <= FACTS_ADDED:
        sums += combinations_with_replacement(known, 2)
    symbols = {x: x.free_symbols for x in (e, *known)}
    unseen = {x: x.atoms(sympy.Min, sympy.Max) for x in (e, *known)}
    for terms in sums:
        near = [n for n in terms if symbols[n] & symbols[e]]
        reach = symbols[e].union(*(symbols[n] for n in near))
        if (
            near
            and all(symbols[n] & reach for n in terms)
            and all(
                unseen[n] <= unseen[e].union(*(unseen[other] for other in terms if other is not n))
                for n in terms
            )
        ):
            yield sympy.Add(*terms)


def is_less(a: Int, b: Int) -> bool | None:
    return is_nonnegative(b - a - 1)


def divides(n: Int, expr: Int) -> bool | None:
    """Whether ``n`` divides ``expr`` for every value of the symbols; ``n`` is taken to be
    positive.
    """
    if type(n) is int and type(expr) is int:
        return expr % n == 0
    return _divides(_normal(n), _normal(expr), _facts.get())


def _divides(n: Any, expr: Any, facts: _Facts) -> bool | None:
    import sympy

    n, expr = sympy.sympify(n), sympy.sympify(expr)
    numerator, denominator = fraction(expr / n)
    if denominator == 1:
        return True if _integral(numerator) else None
    if denominator.is_Integer and numerator.is_Integer:
        return False
    for known, divisor in facts.divisible:
        quotient, rest = fraction(expr * _rewrite(divisor, facts) / (_rewrite(known, facts) * n))
        if rest == 1 and _integral(quotient):
            return True
    for known, divisor in facts.indivisible:
        # n does not divide e if it does not divide a multiple of e.
        if (
            sympy.cancel(_rewrite(divisor, facts) / n) == 1
            and fraction(_rewrite(known, facts) / expr)[1] == 1
        ):
            return False
    # A constant remainder of a polynomial that is otherwise divisible disproves it, as in (4 s + 1)
    # % 4.
    if n.is_Integer and expr.is_polynomial():
        constant, rest = sympy.expand(expr).as_coeff_Add()
        if constant.is_Integer and constant % n != 0 and _divides(n, rest, facts):
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


def _is_nonnegative(e: Any) -> bool:
    """Whether the integer ``e`` is never negative: above -1 at the bounds of what it rounds."""
    import sympy

    if _rounds(e):
        return any(_positive_coefficients(b + 1, strict=True) for b in _bounds(e))
    return not e.has(sympy.floor, sympy.Max, sympy.Min) and _positive_coefficients(e, strict=False)


def _is_positive(e: Any) -> bool:
    import sympy

    if _rounds(e):
        return any(_positive_coefficients(b, strict=True) for b in _bounds(e))
    return not e.has(sympy.floor, sympy.Max, sympy.Min) and _positive_coefficients(e, strict=True)


def _rounds(e: Any) -> bool:
    import sympy

    return bool(e.has(sympy.floor))


def _bounds(e: Any) -> Iterator[Any]:
    """Expressions without floor that ``e`` is never below."""
    import sympy

    atoms = [
        a
        for a in e.atoms(sympy.floor)
        if not any(a is not b and b.has(a) for b in e.atoms(sympy.floor))
    ]
    if not atoms:
        if not e.has(sympy.Max, sympy.Min):
            yield e
        return
    atom = min(atoms, key=str)
    stand_in = sympy.Dummy(
        "rounded", integer=True
    )  # of unknown sign: sympy would decide Min and Max by it
    try:
        poly = sympy.Poly(e.xreplace({atom: stand_in}), stand_in)
    except sympy.PolynomialError:
        return
    if poly.degree() != 1:
        return
    coefficient = poly.coeff_monomial(stand_in)
    others = coefficient.atoms(sympy.floor)
    if not all(_positive_coefficients(a.args[0], strict=False) for a in others):
        return
    plain = coefficient.xreplace(
        {a: sympy.Dummy("rounded", integer=True, nonnegative=True) for a in others}
    )
    argument = atom.args[0]
    _, denominator = fraction(argument)
    if _positive_coefficients(plain, strict=False):
        bound = argument - 1 + 1 / denominator
    elif _positive_coefficients(-plain, strict=False):
        bound = argument
    else:
        return
    yield from _bounds(sympy.expand(poly.coeff_monomial(1) + coefficient * bound))


def _positive_coefficients(e: Any, *, strict: bool) -> bool:
    """Whether ``e`` is a polynomial, over a positive denominator, with non-negative coefficients
    once each symbol is its smallest value and more; strict: and a positive constant.
    """
    import sympy

    numerator, denominator = fraction(e)
    if denominator != 1:
        return _positive_coefficients(denominator, strict=True) and _positive_coefficients(
            sympy.expand(numerator), strict=strict
        )
    symbols = sorted(e.free_symbols, key=str)
    if any(not (s.is_integer and s.is_nonnegative) for s in symbols):
        return False
    if not symbols:
        return bool(e > 0) if strict else bool(e >= 0)
    least = dict(_facts.get().least)
    shifted = e.subs({s: s + least.get(s, 1) for s in symbols if s.is_positive}, simultaneous=True)
    try:
        poly = sympy.Poly(sympy.expand(shifted), *symbols)
    except sympy.PolynomialError:
        return False
    if any(c.is_negative or not c.is_number for c in poly.coeffs()):
        return False
    return not strict or bool(poly.coeff_monomial(1) > 0)


def prove(fact: Fact) -> bool | None:
    """True where ``fact`` holds for every value of the symbols, False where it holds for none, else
    None.
    """
    return _proved(fact, _facts.get())


@lru_cache(maxsize=1 << 14)
def _proved(fact: Fact, _: _Facts) -> bool | None:
    """What :func:`prove` says under the facts in force, which are given to tell answers apart."""
    if fact.relation == "divides":
        answer = divides(fact.right, fact.left)
    elif fact.relation == "equal":
        answer = is_zero(fact.left - fact.right)
    else:
        answer = is_nonnegative(fact.right - fact.left)
    return answer if answer is None or fact.holds else not answer


@contextmanager
def forgetting_afterwards() -> Iterator[None]:
    """Facts learnt inside the ``with`` block hold until it ends."""
    token = _facts.set(_facts.get())
    try:
        yield
    finally:
        _facts.reset(token)


def learn(fact: Fact) -> None:
    """Take ``fact`` as given."""
    _facts.set(_with(_facts.get(), fact))


def lowest_terms(fact: Fact) -> Fact:
    """The same fact, in the caller's symbols, with what is common and positive on both sides left
    out.
    """
    import sympy

    facts = _facts.get()
    if fact.relation == "divides":
        numerator, denominator = fraction(
            _meant(_normal(fact.left), facts) / _meant(_normal(fact.right), facts)
        )
        return Fact("divides", as_int(numerator), as_int(denominator), fact.holds)
    difference = sympy.fraction(sympy.together(_meant(_normal(fact.left - fact.right), facts)))[0]
    constant, powers = sympy.factor_list(difference)
    difference = sympy.Integer(1 if constant > 0 else -1)
    for factor, power in powers:
        if not _is_positive(_normal(factor)):
            difference *= factor**power
    terms = sympy.Add.make_args(sympy.expand(difference))
    left = sympy.Add(*[t for t in terms if not t.could_extract_minus_sign()])
    return Fact(fact.relation, as_int(left), as_int(left - sympy.expand(difference)), fact.holds)


def is_involved(fact: Fact) -> bool:
    """Whether ``fact`` is about rounded quotients of rounded quotients: proofs of such things take
    long, and the fact is no help to anyone.
    """
    import sympy

    atoms = {
        atom for side in (fact.left, fact.right) for atom in sympy.sympify(side).atoms(sympy.floor)
    }
    return any(inner is not atom and atom.has(inner) for atom in atoms for inner in atoms)


def candidates(fact: Fact) -> list[Fact]:
    """Divisibilities on which the rounded quotients in ``fact`` depend, the weakest first."""
    import sympy

    facts = _facts.get()
    found: dict[Fact, None] = {}
    for side in (fact.left, fact.right):
        for atom in sorted(_normal(side).atoms(sympy.floor), key=str):
            numerator, denominator = map(sympy.expand, fraction(atom.args[0]))
            above = sympy.expand(
                numerator - denominator + 1
            )  # rounded up, if that is how it came about
            multiple = min(numerator, above, key=lambda e: len(sympy.Add.make_args(e)))
            found[
                lowest_terms(Fact("divides", _meant(multiple, facts), _meant(denominator, facts)))
            ] = None
    return sorted(
        found,
        key=lambda c: (
            c.right.is_number if not isinstance(c.right, int) else True,
            -sympy.count_ops(c.left),
        ),
        reverse=True,
    )


def _operand(value: Int) -> str:
    return str(value) if type(value) is int or value.is_Atom else f"({_text(value)})"


def _text(value: Int) -> str:
    """``value`` with quotients rounded down as Python writes them."""
    if type(value) is int:
        return str(value)
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

    return str(Printer().doprint(value))


def divisibility(expr: Int, n: Int) -> str:
    """The fact that ``n`` divides ``expr``, as :func:`assuming` reads it."""

    return str(Fact("divides", expr, n))


def quotient(expr: Int, n: Int) -> Int:
    """``expr / n`` where the division is known to be exact."""
    if type(expr) is int and type(n) is int:
        return expr // n
    import sympy

    return as_int(sympy.cancel(sympy.sympify(expr) / n))


def ceil_quotient(expr: Int, n: Int) -> Int | None:
    """``expr / n`` rounded up, where the quotient is an integer polynomial but for a constant; else
    None.
    """
    import sympy

    constant, rest = sympy.expand(sympy.cancel(sympy.sympify(expr) / n)).as_coeff_Add()
    return (
        as_int(rest + sympy.ceiling(constant)) if constant.is_Rational and _integral(rest) else None
    )


def as_int(expr: Int) -> Int:
    """A sympy Integer as a plain int; anything else unchanged."""
    return int(expr) if type(expr) is not int and getattr(expr, "is_Integer", False) else expr


def require(answer: bool | None, fact: str, context: str) -> bool:
    """``answer`` where there is one, else :class:`Undecided` naming ``fact``."""
    if answer is None:
        raise Undecided(fact, context)
    return answer
