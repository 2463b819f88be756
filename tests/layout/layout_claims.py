"""Random expressions, facts and claims about the sizes s, t and u. They are text, to be read as
sizes, and at numbers by Python's own arithmetic. And oracles, who are asked about sizes.
"""

import re
from fractions import Fraction
from functools import cache
from itertools import product

import sympy

from cute_sharding.layout import Size, symbol
from cute_sharding.layout.size import least, most, size

NAMES = "stu"

SIZES = {name: Size(symbol(name)) for name in NAMES}

s, t, u = SIZES.values()

# What the symbols may be; every proof is judged at each of them that satisfies the facts.
NUMBERS = [dict(zip(NAMES, numbers)) for numbers in product(range(1, 13), repeat=3)]


def up(a, b):
    """a / b rounded up, as sympy's ceiling where it is an expression."""
    if type(a) is int and type(b) is int:
        return -(-a // b)
    return size(sympy.ceiling(sympy.sympify(getattr(a, "expr", a)) / getattr(b, "expr", b)))


AS_SIZES = {"most": most, "least": least, "up": up}

AS_NUMBERS = {
    "most": max,
    "least": min,
    "Max": max,
    "Min": min,
    "up": lambda a, b: -(-a // b),
    "F": Fraction,
}


@cache
def compiled(text):
    return compile(text, text, "eval")


def at(text, numbers):
    """The text at the numbers, by Python's own arithmetic; where there is a single slash, by that
    of fractions.
    """
    if re.search(r"(?<!/)/(?!/)", text):
        text, numbers = (
            re.sub(r"\b\d+\b", r"F(\g<0>)", text),
            {name: Fraction(n) for name, n in numbers.items()},
        )
    return eval(compiled(text), AS_NUMBERS, numbers)


def satisfying(facts):
    def is_true(fact, one):
        try:
            return at(fact, one)
        except ZeroDivisionError:
            return False

    return [one for one in NUMBERS if all(is_true(fact, one) for fact in facts)]


def as_size(text):
    return eval(compiled(text), AS_SIZES, SIZES)


def as_expr(text):
    value = as_size(text)
    return value.expr if isinstance(value, Size) else value


# -- who is asked ----------------------------------------------------------------------------------


class Hints:
    """An oracle that knows one case and keeps what was recorded."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.facts = []

    def holds(self, fact):
        return at(str(fact), self.numbers)

    def assume(self, fact):
        assert self.holds(fact), f"{fact} does not hold at {self.numbers}"
        self.facts.append(str(fact))


class Anyone:
    """An oracle for whom everything holds."""

    def __init__(self):
        self.facts = []

    def holds(self, fact):
        return True

    def assume(self, fact):
        self.facts.append(str(fact))


# -- random expressions, facts and claims ----------------------------------------------------------


def draw_positive(rng):
    return rng.choice(
        (
            "2",
            "3",
            "4",
            "6",
            "8",
            *NAMES,
            "(2*s)",
            "(4*t)",
            "(s*t)",
            "(s + 1)",
            "(t*u)",
            "(1 - (1 - u)//t)",
            "(1 + s//4)",
            "up(u, s)",
        )
    )


def draw(rng, depth):
    if depth == 0 or rng.random() < 0.15:
        return rng.choice((*NAMES, *NAMES, str(rng.randint(1, 6))))
    a, b, n = draw(rng, depth - 1), draw(rng, depth - 1), draw_positive(rng)
    return rng.choice(
        (
            f"({a} + {b})",
            f"({a} - {b})",
            *(f"({a} * {b})",) * 3,
            *(f"({a} // {n})",) * 2,
            f"({a} % {n})",
            f"up({a}, {n})",
            f"most({a}, {b})",
            f"least({a}, {b})",
        )
    )


def draw_fact(rng):
    """One that `assuming` reads."""
    a, b, c = rng.sample(NAMES, 3)
    n, k = rng.choice((2, 2, 3, 4, 4, 6, 8, 12)), rng.randint(1, 6)
    divisible = (
        f"{a} % {n} == 0",
        f"({a}*{b}) % {n} == 0",
        f"({a} + {k}) % {n} == 0",
        f"{a} % {b} == 0",
        f"{a} % (2*{b}) == 0",
        f"({a}*{b}) % ({n}*{c}) == 0",
    )
    ordered = (
        f"{a} >= {k}",
        f"{a} <= {k}",
        f"{a} > {k}",
        f"{a} < {b}",
        f"{a} <= {b}",
        f"{a} >= {n}*{b}",
        f"{a}//{n} >= {k}",
        f"{a} <= {b}*{c}",
        f"{a}//{n} <= {b}",
    )
    equal = (
        f"{a} == {b}",
        f"{a} == {k}",
        f"{a} == {n}*{b}",
        f"{a} == {b} + {k}",
        f"{n}*{a} == {k}*{b}",
        f"{a}*{b} == {c}",
        f"{a}//{n} == {b}",
        f"{a} % {n} == {k % n}",
    )
    unlike = (
        f"{a} != {k}",
        f"{a} != {b}",
        f"{a} % {n} != 0",
        f"({a}*{b}) % {n} != 0",
        f"{a} % {b} != 0",
    )
    return rng.choice((*divisible, *divisible, *ordered, *equal, *unlike))


def draw_facts(rng):
    """Facts that some numbers satisfy, and these."""
    while True:
        facts = [draw_fact(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
        numbers = satisfying(facts)
        if numbers:
            return facts, numbers


def draw_claim(rng):
    """(relation, left, right): two times in three the sides have much in common, so that there is
    something to prove.
    """
    if rng.random() < 0.25:
        return "divides", draw(rng, rng.randint(1, 3)), draw_positive(rng)
    a = draw(rng, rng.randint(1, 3))
    b = rng.choice(
        (
            draw(rng, rng.randint(0, 2)),
            f"({a} + {draw(rng, 1)} - {draw(rng, 0)})",
            f"({a} - {draw(rng, 2)} + {draw(rng, 0)})",
        )
    )
    return rng.choice(("equal", "at most", "at most")), *rng.sample((a, b), 2)


CLAIMS = {"divides": "({}) % ({}) == 0", "equal": "({}) == ({})", "at most": "({}) <= ({})"}

COMPARISONS = (
    "{} == {}",
    "{} != {}",
    "{} <= {}",
    "{} < {}",
    "{} >= {}",
    "{} > {}",
    "bool({} - {})",
)


def draw_hints(rng):
    return {name: rng.choice((rng.randint(1, 12), 4, 8, 12)) for name in NAMES}
