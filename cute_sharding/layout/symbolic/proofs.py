"""The predicates: each answers ``True`` (proved), ``False`` (disproved) or ``None`` (neither)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any

from cute_sharding.layout.errors import Undecided
from cute_sharding.layout.symbolic.assumptions import Facts, in_force
from cute_sharding.layout.symbolic.coefficients import (
    always_divides,
    always_positive,
    never_negative,
)
from cute_sharding.layout.symbolic.expressions import Int, fraction
from cute_sharding.layout.symbolic.facts import Fact
from cute_sharding.layout.symbolic.normal import normal

# The most inequalities for which sums of two are tried.
FACTS_ADDED = 6


def is_zero(expr: Int) -> bool | None:
    """Whether ``expr`` is 0 for every value of its symbols."""
    if type(expr) is int:
        return expr == 0
    e = normal(expr)
    if e.is_number:
        return bool(e == 0)
    facts = in_force.get()
    if any(normal(e - z) == 0 or normal(e + z) == 0 for z in facts.zero):
        return True
    if always_positive(e) or always_positive(-e):
        return False
    import sympy

    constant, powers = sympy.factor_list(fraction(e)[0])
    if len(powers) > 1 or constant not in (1, -1):
        answers = [is_zero(factor) for factor, _ in powers]
        if True in answers:
            return True
        if None not in answers:
            return False
    if any(normal(e - z) == 0 or normal(e + z) == 0 for z in facts.nonzero):
        return False
    return None


def is_nonnegative(expr: Int) -> bool | None:
    """Whether ``expr`` is 0 or more for every value of its symbols."""
    if type(expr) is int:
        return expr >= 0
    import sympy

    e = normal(expr)
    if e.is_number:
        return bool(e >= 0)
    if never_negative(e):
        return True
    if always_positive(-e):
        return False
    if isinstance(e, (sympy.Min, sympy.Max)):
        parts = {is_nonnegative(part) for part in e.args}
        # A negative argument decides the sign of Min, a non-negative one that of Max.
        settling = isinstance(e, sympy.Max)
        if settling in parts:
            return settling
        if None not in parts:
            return not settling
    sums = list(_that_may_be_missing(e))
    if any(never_negative(normal(e - n)) for n in sums):
        return True
    if any(always_positive(normal(-e - n)) for n in sums):
        return False
    return None


def _that_may_be_missing(e: Any) -> Iterator[Any]:
    """The known non-negative expressions, and sums of two, that may complete a proof about ``e``:
    they share symbols with it, and no Min or Max remains.
    """
    import sympy

    known = [normal(n) for n in in_force.get().nonnegative]
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
    """Whether ``a`` is less than ``b`` for every value of their symbols."""
    return is_nonnegative(b - a - 1)


def divides(n: Int, expr: Int) -> bool | None:
    """Whether ``n`` divides ``expr`` for every value of the symbols; ``n`` must be positive."""
    if type(n) is int and type(expr) is int:
        return expr % n == 0
    return always_divides(normal(n), normal(expr), in_force.get())


def prove(fact: Fact) -> bool | None:
    """True if ``fact`` holds for every value of the symbols, False if for none, else None."""
    return _proved(fact, in_force.get())


@lru_cache(maxsize=1 << 14)
def _proved(fact: Fact, _: Facts) -> bool | None:
    """:func:`prove` under the facts in force, which are an argument so that they key the cache."""
    if fact.relation == "divides":
        answer = divides(fact.right, fact.left)
    elif fact.relation == "equal":
        answer = is_zero(fact.left - fact.right)
    else:
        answer = is_nonnegative(fact.right - fact.left)
    return answer if answer is None or fact.holds else not answer


def require(answer: bool | None, relation: str, left: Int, right: Int, context: str = "") -> bool:
    """``answer`` unless it is None; then raise :class:`Undecided`, which names the fact."""
    if answer is None:
        raise Undecided(str(Fact(relation, left, right)), context)
    return answer
