"""Deciding facts about sizes and strides, ints or sympy expressions in positive integer symbols.

Each predicate answers ``True`` (proved), ``False`` (disproved) or ``None`` (neither). The proofs
are polynomial identities: every symbol stands for a positive integer, so a polynomial whose
coefficients are all non-negative once each symbol ``s`` is written ``1 + t`` is non-negative, and
``a`` divides ``b`` when ``b / a`` cancels to integer coefficients. A caller's facts
(:func:`assuming`) enter as substitutions (``s % 4 == 0`` writes ``s`` as ``4 * s'``), so they need
no rules of their own.

Each module uses only those above it:

- :mod:`.expressions`: arithmetic on ints and expressions in symbols, and reading them from text.
- :mod:`.facts`: facts about them, and their text.
- :mod:`.assumptions`: the facts in force.
- :mod:`.coefficients`: proofs from the coefficients of one expression.
- :mod:`.normal`: the normal form of an expression under those facts, and the simplest one.
- :mod:`.proofs`: the predicates.
- :mod:`.questions`: the facts to ask about if no proof is found.
"""

from cute_sharding.layout.symbolic.assumptions import assuming, forgetting_afterwards, learn
from cute_sharding.layout.symbolic.expressions import (
    Int,
    as_int,
    ceil_quotient,
    fraction,
    is_static,
    parse_expr,
    quotient,
    remainder,
    symbol,
)
from cute_sharding.layout.symbolic.facts import Fact, parse_fact
from cute_sharding.layout.symbolic.normal import simplified
from cute_sharding.layout.symbolic.proofs import (
    FACTS_ADDED,
    divides,
    is_less,
    is_nonnegative,
    is_zero,
    prove,
    require,
)
from cute_sharding.layout.symbolic.questions import candidates, is_involved, lowest_terms

__all__ = [
    "FACTS_ADDED",
    "Fact",
    "Int",
    "as_int",
    "assuming",
    "candidates",
    "ceil_quotient",
    "divides",
    "forgetting_afterwards",
    "fraction",
    "is_involved",
    "is_less",
    "is_nonnegative",
    "is_static",
    "is_zero",
    "learn",
    "lowest_terms",
    "parse_expr",
    "parse_fact",
    "prove",
    "quotient",
    "remainder",
    "require",
    "simplified",
    "symbol",
]
