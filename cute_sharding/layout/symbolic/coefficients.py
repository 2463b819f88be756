"""Proofs from the coefficients of one expression: its sign, for all values of its symbols, and its
divisors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from cute_sharding.layout.symbolic.assumptions import Facts, in_force, rewrite
from cute_sharding.layout.symbolic.expressions import fraction, is_integral


def never_negative(e: Any) -> bool:
    """Whether the integer ``e`` is proved not negative: a bound below it is above -1."""
    import sympy

    if _rounds(e):
        return any(_positive_coefficients(b + 1, strict=True) for b in _bounds(e))
    return not e.has(sympy.floor, sympy.Max, sympy.Min) and _positive_coefficients(e, strict=False)


def always_positive(e: Any) -> bool:
    """Whether the integer ``e`` is proved positive."""
    import sympy

    if _rounds(e):
        return any(_positive_coefficients(b, strict=True) for b in _bounds(e))
    return not e.has(sympy.floor, sympy.Max, sympy.Min) and _positive_coefficients(e, strict=True)


def _rounds(e: Any) -> bool:
    import sympy

    return bool(e.has(sympy.floor))


def _bounds(e: Any) -> Iterator[Any]:
    """Expressions without floor that are lower bounds of ``e``."""
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
    # Its sign is unknown: else sympy would use it to evaluate Min and Max.
    stand_in = sympy.Dummy("rounded", integer=True)
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
    once each symbol is written as its smallest value plus a rest; strict: and a positive constant.
    """
    return _positive_above(e, strict, in_force.get().least)


@lru_cache(maxsize=1 << 14)  # as of fractions: the same is asked for each fact that is tried
def _positive_above(e: Any, strict: bool, least: tuple[tuple[Any, int], ...]) -> bool:
    import sympy

    numerator, denominator = fraction(e)
    if denominator != 1:
        return _positive_above(denominator, True, least) and _positive_above(
            sympy.expand(numerator), strict, least
        )
    symbols = sorted(e.free_symbols, key=str)
    if any(not (s.is_integer and s.is_nonnegative) for s in symbols):
        return False
    if not symbols:
        return bool(e > 0) if strict else bool(e >= 0)
    smallest = dict(least)
    shifted = e.xreplace({s: s + smallest.get(s, 1) for s in symbols if s.is_positive})
    try:
        poly = sympy.Poly(shifted, *symbols)
    except sympy.PolynomialError:
        return False
    if any(c.is_negative or not c.is_number for c in poly.coeffs()):
        return False
    return not strict or bool(poly.coeff_monomial(1) > 0)


def always_divides(n: Any, expr: Any, facts: Facts) -> bool | None:
    """Whether ``n`` divides ``expr``, both in normal form; None if there is no proof."""
    import sympy

    n, expr = sympy.sympify(n), sympy.sympify(expr)
    numerator, denominator = fraction(expr / n)
    if denominator == 1:
        return True if is_integral(numerator) else None
    if denominator.is_Integer and numerator.is_Integer:
        return False
    for known, divisor in facts.divisible:
        quotient, rest = fraction(expr * rewrite(divisor, facts) / (rewrite(known, facts) * n))
        if rest == 1 and is_integral(quotient):
            return True
    for known, divisor in facts.indivisible:
        # n does not divide e if it does not divide a multiple of e.
        if (
            sympy.cancel(rewrite(divisor, facts) / n) == 1
            and fraction(rewrite(known, facts) / expr)[1] == 1
        ):
            return False
    # A constant remainder of a polynomial that is otherwise divisible disproves it, as in (4 s + 1)
    # % 4.
    if n.is_Integer and expr.is_polynomial():
        constant, rest = sympy.expand(expr).as_coeff_Add()
        if constant.is_Integer and constant % n != 0 and always_divides(n, rest, facts):
            return False
    return None
