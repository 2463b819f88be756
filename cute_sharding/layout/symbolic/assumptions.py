"""The facts in force: a caller's assumptions and learnt facts, as they apply to symbols."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_sharding.layout.symbolic.expressions import Int, fraction
from cute_sharding.layout.symbolic.facts import Fact, parse_fact

if TYPE_CHECKING:
    import sympy


class Facts(NamedTuple):
    """Facts in force: substitutions for symbols (with the meaning of each symbol that they
    introduce), and the facts that are no substitutions.
    """

    substitution: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    meaning: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    divisible: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()  # (expr, n): n divides expr
    nonnegative: tuple[sympy.Expr, ...] = ()
    zero: tuple[sympy.Expr, ...] = ()
    nonzero: tuple[sympy.Expr, ...] = ()
    indivisible: tuple[tuple[sympy.Expr, sympy.Expr], ...] = ()
    # (symbol, its smallest value), if that is not 1.
    least: tuple[tuple[sympy.Expr, int], ...] = ()


_NO_FACTS = Facts()

in_force: ContextVar[Facts] = ContextVar("cute_sharding_facts", default=_NO_FACTS)


@contextmanager
def assuming(*facts: str) -> Iterator[None]:
    """Add facts for the algebra to use inside the ``with`` block.

    A fact is text, as an :class:`Undecided` error names it: ``"s0 % 4 == 0"``, ``"s0 >= 8"``, ``"s0
    < s1"``, ``"s0 == s1"``.

    Raises:
        LayoutError: the text is no such comparison.

    >>> with assuming("s % 4 == 0"):
    ...     logical_divide(Layout(symbol("s")), Layout(4))
    (4,s/4):(1,4)
    """
    token = in_force.set(_extend(in_force.get(), facts))
    try:
        yield
    finally:
        in_force.reset(token)


@contextmanager
def forgetting_afterwards() -> Iterator[None]:
    """Facts learnt inside the ``with`` block hold until it ends."""
    token = in_force.set(in_force.get())
    try:
        yield
    finally:
        in_force.reset(token)


def learn(fact: Fact) -> None:
    """Add ``fact`` to the facts in force."""
    in_force.set(_with_fact(in_force.get(), fact))


def _extend(facts: Facts, texts: tuple[str, ...]) -> Facts:
    for text in texts:
        facts = _with_fact(facts, parse_fact(text))
    return facts


@lru_cache(maxsize=1 << 12)
def _with_fact(facts: Facts, fact: Fact) -> Facts:
    """``facts`` with ``fact`` added; the same pair gives the same object, so that caches keyed by
    it are hit.
    """
    import sympy

    a, b = sympy.sympify(fact.left), sympy.sympify(fact.right)
    if fact.relation == "divides":
        if not fact.holds:
            return facts._replace(indivisible=(*facts.indivisible, (a, b)))
        # In lowest terms, s / 4 for 2 s / 8: a symbol with a known divisor becomes a substitution.
        a, b = fraction(a / b)
        if isinstance(a, sympy.Symbol):
            multiple = sympy.Dummy(f"{a.name}_over", integer=True, positive=True)
            substituted = _substituted(facts, a, b * multiple, (multiple, a / b))
            if substituted is not None:
                return substituted
        return facts._replace(divisible=(*facts.divisible, (a, b)))
    if fact.relation == "equal":
        if not fact.holds:
            return facts._replace(nonzero=(*facts.nonzero, a - b))
        for target, value in ((a, b), (b, a)):
            substituted = (
                _substituted(facts, target, value) if isinstance(target, sympy.Symbol) else None
            )
            if substituted is not None:
                return substituted
        difference = sympy.expand(rewrite(a - b, facts))
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
        return facts._replace(zero=(*facts.zero, a - b))
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
        return _with_fact(facts, Fact("equal", a, b))
    return facts._replace(nonnegative=(*facts.nonnegative, b - a if fact.holds else a - b - 1))


def _at_least(facts: Facts, name: sympy.Symbol, value: int) -> Facts:
    """``facts`` with ``name >= value``."""
    written = rewrite(name, facts)
    coefficient, symbol_part = written.as_coeff_Mul()
    if symbol_part.is_Symbol and coefficient.is_Integer and coefficient > 0:
        known = dict(facts.least)
        known[symbol_part] = max(known.get(symbol_part, 1), -(-value // int(coefficient)))
        return facts._replace(least=tuple(known.items()))
    return facts._replace(nonnegative=(*facts.nonnegative, name - value))


def _substituted(
    facts: Facts, name: sympy.Symbol, value: sympy.Expr, meaning: tuple[Any, Any] | None = None
) -> Facts | None:
    """``facts`` with ``name`` written as ``value``; if ``name`` is already written as something
    else, both are kept. ``meaning``: what the symbol that ``value`` introduces stands for.
    """
    import sympy

    written = rewrite(name, facts)
    value = rewrite(value, facts)
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
    return facts._replace(
        substitution=(*facts.substitution, (written, value)),
        meaning=facts.meaning if meaning is None else (*facts.meaning, meaning),
        nonnegative=nonnegative,
        least=tuple(least.items()),
    )


def rewrite(expr: Int, facts: Facts) -> Any:
    """``expr`` with the substitutions of ``facts`` applied."""
    import sympy

    expr = sympy.sympify(expr)
    for old, new in facts.substitution:
        expr = expr.xreplace({old: new})
    return expr


def meant(expr: Any, facts: Facts) -> Any:
    """``expr`` without symbols that facts have introduced."""
    for name, value in reversed(facts.meaning):
        expr = expr.xreplace({name: value})
    return expr
