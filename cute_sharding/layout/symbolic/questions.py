"""The questions to ask if no proof is found: a fact in lowest terms, and weaker facts that may
decide it.
"""

from __future__ import annotations

from cute_sharding.layout.symbolic.assumptions import in_force, meant
from cute_sharding.layout.symbolic.coefficients import always_positive
from cute_sharding.layout.symbolic.expressions import as_int, fraction
from cute_sharding.layout.symbolic.facts import Fact
from cute_sharding.layout.symbolic.normal import normal


def lowest_terms(fact: Fact) -> Fact:
    """The same fact in the caller's symbols, without common positive factors or terms of both
    sides.
    """
    import sympy

    facts = in_force.get()
    if fact.relation == "divides":
        numerator, denominator = fraction(
            meant(normal(fact.left), facts) / meant(normal(fact.right), facts)
        )
        return Fact("divides", as_int(numerator), as_int(denominator), fact.holds)
    difference = sympy.fraction(sympy.together(meant(normal(fact.left - fact.right), facts)))[0]
    constant, powers = sympy.factor_list(difference)
    difference = sympy.Integer(1 if constant > 0 else -1)
    for factor, power in powers:
        if not always_positive(normal(factor)):
            difference *= factor**power
    terms = sympy.Add.make_args(sympy.expand(difference))
    left = sympy.Add(*[t for t in terms if not t.could_extract_minus_sign()])
    return Fact(fact.relation, as_int(left), as_int(left - sympy.expand(difference)), fact.holds)


def is_involved(fact: Fact) -> bool:
    """Whether ``fact`` has rounded quotients of rounded quotients: proofs of such facts take long,
    and they help no reader.
    """
    import sympy

    atoms = {
        atom for side in (fact.left, fact.right) for atom in sympy.sympify(side).atoms(sympy.floor)
    }
    return any(inner is not atom and atom.has(inner) for atom in atoms for inner in atoms)


def candidates(fact: Fact) -> list[Fact]:
    """Divisibilities on which the rounded quotients in ``fact`` depend, the weakest first."""
    import sympy

    facts = in_force.get()
    found: dict[Fact, None] = {}
    for side in (fact.left, fact.right):
        for atom in sorted(normal(side).atoms(sympy.floor), key=str):
            numerator, denominator = map(sympy.expand, fraction(atom.args[0]))
            # The quotient rounded up, if that is where the expression comes from.
            above = sympy.expand(numerator - denominator + 1)
            multiple = min(numerator, above, key=lambda e: len(sympy.Add.make_args(e)))
            candidate = Fact("divides", meant(multiple, facts), meant(denominator, facts))
            found[lowest_terms(candidate)] = None
    return sorted(
        found,
        key=lambda c: (
            c.right.is_number if not isinstance(c.right, int) else True,
            -sympy.count_ops(c.left),
        ),
        reverse=True,
    )
