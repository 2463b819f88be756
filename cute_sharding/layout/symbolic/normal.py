"""The normal form of an expression under the facts in force, and the simplest form, to print."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from cute_sharding.layout.symbolic.assumptions import Facts, in_force, meant, rewrite
from cute_sharding.layout.symbolic.coefficients import (
    always_divides,
    always_positive,
    never_negative,
)
from cute_sharding.layout.symbolic.expressions import Int, as_int, fraction


def normal(expr: Int) -> Any:
    """``expr`` expanded under the facts in force, so that equal polynomials are equal objects.
    Rounded quotients are written with ``floor``.
    """
    return _normalized(expr, in_force.get())


@lru_cache(maxsize=1 << 14)
def _normalized(expr: Int, facts: Facts) -> Any:
    import sympy

    expr = rewrite(expr, facts)
    if expr.has(sympy.floor, sympy.ceiling, sympy.Mod):
        expr = _floored(expr, facts)
    return _expanded(expr)


def _expanded(expr: Any) -> Any:
    """``expr`` expanded and in lowest terms, as it already is if no denominator has a symbol."""
    import sympy

    has_denominator = any(power.exp.is_negative is not False for power in expr.atoms(sympy.Pow))
    return sympy.expand(sympy.cancel(expr) if has_denominator else expr)


def _floored(expr: Any, facts: Facts) -> Any:
    """``expr`` with every rounded quotient as a floor in lowest terms, or as the quotient if it is
    exact.
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


def _floor(numerator: Any, denominator: Any, facts: Facts) -> Any:
    import sympy

    numerator, denominator = fraction(numerator / denominator)
    if (denominator.is_number and denominator < 0) or (
        not denominator.is_number and always_positive(sympy.expand(-denominator))
    ):
        numerator, denominator = sympy.expand(-numerator), sympy.expand(-denominator)
    elif not denominator.is_number and not always_positive(sympy.expand(denominator)):
        # Its sign is unknown, and the steps below need a positive denominator.
        return sympy.floor(numerator / denominator)
    if numerator.is_polynomial() and all(
        c.is_negative for c in numerator.as_coefficients_dict().values()
    ):
        return -_floor(denominator - numerator - 1, denominator, facts)
    if denominator == 1 or always_divides(denominator, numerator, facts):
        return _expanded(numerator / denominator)
    for beyond in (sympy.expand(numerator).as_coeff_Add()[0], denominator - 1):
        # A multiple plus a constant, or a quotient that was rounded up to here.
        if beyond != 0 and always_divides(denominator, sympy.expand(numerator - beyond), facts):
            return _expanded((numerator - beyond) / denominator) + sympy.floor(beyond / denominator)
    if not denominator.is_number:
        # Take out multiples of the denominator: floor((s n + r) / s) = n + floor(r / s).
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(numerator)):
            quotient, below = fraction(term / denominator)
            if below == 1:
                whole += quotient
            else:
                rest += term
        if rest == 0 or (
            never_negative(rest) and always_positive(sympy.expand(denominator - rest))
        ):
            return whole
        if whole != 0:
            return whole + sympy.floor(rest / denominator)
    return sympy.floor(sympy.expand(numerator / denominator))


def simplified(expr: Int, names: Iterable[tuple[Any, Any]] = ()) -> Int:
    """``expr`` in the simplest form under the facts in force, in the caller's symbols. If the facts
    make it an integer it may read as a fraction, such as ``s/4``.

    ``names`` are (expression, symbol) pairs: an expression that is part of ``expr`` is replaced by
    its symbol.
    """
    import sympy

    facts = in_force.get()
    expr = _normalized(expr, facts)
    for named, name in names:
        coefficient, form = _normalized(named, facts).as_coeff_Mul()
        if form.is_Symbol or (
            coefficient == 1 and isinstance(form, (sympy.floor, sympy.Max, sympy.Min))
        ):
            expr = expr.xreplace({form: name / coefficient})
    return as_int(sympy.factor_terms(meant(expr, facts)))
