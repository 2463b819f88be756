"""Sizes that are not known as numbers, for code that is written for ints.

A :class:`Size` is a sympy expression in positive integer symbols that computes like an int. A
comparison returns True or False at once, and never a guess:

1. by proof, from the expressions and the facts in force (cute_sharding/layout/symbolic);
2. else by the *current* sizes, if there is an oracle (:func:`asking`), such as a compiler, which
   knows the sizes of the call that it compiles for and can have the answer checked before each
   later call. It is asked the weakest fact that decides the comparison: a divisibility on which
   rounded quotients in it depend, else the comparison itself (or, with quotients of quotients, the
   numbers). From then on the answer is a fact;
3. else :class:`~cute_sharding.layout.errors.Undecided` is raised, which names that fact.

So an algorithm on ints, run on Sizes, is a proof for all sizes for which the answers hold, and the
same code serves ints and Sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import combinations
from typing import Any, Protocol

from cute_sharding.layout.errors import LayoutError, Undecided
from cute_sharding.layout.symbolic import (
    Fact,
    Int,
    as_int,
    candidates,
    divides,
    forgetting_afterwards,
    is_involved,
    learn,
    lowest_terms,
    prove,
    remainder,
    simplified,
)


class Oracle(Protocol):
    """An oracle, which knows the sizes of the current case.

    >>> class Sizes(Oracle):
    ...     def __init__(self, **sizes):
    ...         self.sizes = {symbol(name): n for name, n in sizes.items()}
    ...         self.asked = []
    ...
    ...     def holds(self, fact):
    ...         sides = (fact.left, fact.right)
    ...         numbers = [n if isinstance(n, int) else int(n.subs(self.sizes)) for n in sides]
    ...         return fact.is_true_of(*numbers)
    ...
    ...     def assume(self, fact):
    ...         self.asked.append(str(fact))
    >>> oracle = Sizes(s=12)
    >>> with asking(oracle):
    ...     Size(symbol("s")) % 4 == 0
    True
    >>> oracle.asked
    ['s % 4 == 0']
    """

    def holds(self, fact: Fact) -> bool | None:
        """Whether ``fact`` holds in this case; None if that is not known. The question alone does
        not make it a fact.
        """

    def assume(self, fact: Fact) -> None:
        """Have ``fact``, which holds in this case, checked from now on."""


_oracle: ContextVar[Oracle | None] = ContextVar("cute_sharding_oracle", default=None)


@contextmanager
def asking(oracle: Oracle) -> Iterator[None]:
    """Inside the ``with`` block, ask ``oracle`` about comparisons that cannot be proved; the
    answers are facts until the block ends.

    >>> class Eight(Oracle):  # every symbol is 8 now
    ...     def holds(self, fact):
    ...         return fact.is_true_of(*(n if isinstance(n, int) else 8 for n in fact_sides(fact)))
    ...
    ...     def assume(self, fact):
    ...         print("asked:", fact)
    >>> def fact_sides(fact):
    ...     return fact.left, fact.right
    >>> with asking(Eight()):
    ...     Size(symbol("s")) <= 4, Size(symbol("s")) >= 5
    asked: s > 4
    (False, True)
    """
    token = _oracle.set(oracle)
    try:
        with forgetting_afterwards():
            yield
    finally:
        _oracle.reset(token)


class Size:
    """An integer that is a sympy expression in positive integer symbols and computes like an int;
    sizes of a shape may be such.

    Comparisons are proved, or the oracle of :func:`asking` is asked.

    Attributes:
        expr: the expression.

    Raises:
        Undecided: a comparison is not proved, and no oracle knows it.

    >>> s = Size(symbol("s"))
    >>> (4 * s) % 4, 4 * s // 4, s + 1 > s
    (0, s, True)
    >>> s == 3
    Traceback (most recent call last):
    cute_sharding.layout.errors.Undecided: the answer depends on the fact `s == 3`. If \
the fact is true, put the call inside: with assuming('s == 3'): ...
    """

    __slots__ = ("expr",)

    expr: Any

    def __init__(self, expr: Any) -> None:
        self.expr = expr

    def __repr__(self) -> str:
        return str(Fact("equal", self.expr, 0)).removesuffix(" == 0")

    def __hash__(self) -> int:
        return hash(self.expr)

    def __add__(self, other: Int) -> Int:
        return size(self.expr + _expr(other))

    def __sub__(self, other: Int) -> Int:
        return size(self.expr - _expr(other))

    def __rsub__(self, other: Int) -> Int:
        return size(_expr(other) - self.expr)

    def __mul__(self, other: Int) -> Int:
        return size(self.expr * _expr(other))

    def __neg__(self) -> Int:
        return size(-self.expr)

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: Int) -> Int:
        return _quotient(self.expr, _expr(other))

    def __rfloordiv__(self, other: Int) -> Int:
        return _quotient(_expr(other), self.expr)

    def __mod__(self, other: Int) -> Int:
        return _remainder(self.expr, _expr(other))

    def __rmod__(self, other: Int) -> Int:
        return _remainder(_expr(other), self.expr)

    def __divmod__(self, other: Int) -> tuple[Int, Int]:
        return self // other, self % other

    def __rdivmod__(self, other: Int) -> tuple[Int, Int]:
        return other // self, other % self

    def __bool__(self) -> bool:
        return not decide(Fact("equal", self.expr, 0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, Size)):
            return NotImplemented
        return decide(Fact("equal", self.expr, _expr(other)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __le__(self, other: Int) -> bool:
        return decide(Fact("at most", self.expr, _expr(other)))

    def __lt__(self, other: Int) -> bool:
        return not decide(Fact("at most", _expr(other), self.expr))

    def __ge__(self, other: Int) -> bool:
        return decide(Fact("at most", _expr(other), self.expr))

    def __gt__(self, other: Int) -> bool:
        return not decide(Fact("at most", self.expr, _expr(other)))


def size(expr: Any) -> Int:
    """An int if ``expr`` is a number, else a Size."""
    expr = as_int(expr)
    return expr if type(expr) is int else Size(expr)


def _expr(value: Int) -> Any:
    return value.expr if isinstance(value, Size) else value


def _quotient(a: Any, b: Any) -> Int:
    import sympy

    if b == 0:
        raise ZeroDivisionError(f"{Size(a)} cannot be divided by 0")
    if divides(b, a):
        return size(simplified(sympy.sympify(a) / b))
    return size(sympy.floor(sympy.sympify(a) / b))


def _remainder(a: Any, b: Any) -> Int:
    if b == 0:
        raise ZeroDivisionError(f"{Size(a)} modulo 0 is not defined")
    return 0 if divides(b, a) else size(remainder(a, b))


def expression(value: Int, names: Iterable[tuple[Any, Any]] = ()) -> Any:
    """A size as an int, or as a sympy expression in its simplest form; ``names`` as for
    :func:`~cute_sharding.layout.symbolic.simplified`.
    """
    return simplified(value.expr, names) if isinstance(value, Size) else value


def is_multiple(a: Int, b: Int) -> bool:
    """Whether ``b`` is known to divide ``a``; the oracle is not asked."""
    if type(a) is int is type(b):
        return a % b == 0
    if isinstance(a, Size) or isinstance(b, Size):
        return bool(divides(_expr(b), _expr(a)))
    return a % b == 0


def is_same(a: Int, b: Int) -> bool:
    """Whether ``a`` and ``b`` are known to be equal; the oracle is not asked."""
    if isinstance(a, Size) or isinstance(b, Size):
        return prove(Fact("equal", _expr(a), _expr(b))) is True
    return bool(a == b)


def is_at_most(a: Int, b: Int) -> bool:
    """Whether ``a`` is at most ``b``; False if the oracle does not know."""
    try:
        return a <= b
    except Undecided:
        if _oracle.get() is None:
            raise
        return False


def least(a: Int, b: Int) -> Int:
    """The smaller one; an expression if it is not known which. The oracle is not asked."""
    return _chosen("Min", a, b) if isinstance(a, Size) or isinstance(b, Size) else min(a, b)


def most(a: Int, b: Int) -> Int:
    """The larger one; an expression if it is not known which. The oracle is not asked."""
    return _chosen("Max", a, b) if isinstance(a, Size) or isinstance(b, Size) else max(a, b)


def _chosen(which: str, a: Int, b: Int) -> Int:
    import sympy

    x, y = _expr(a), _expr(b)
    ordered = prove(Fact("at most", x, y))
    if ordered is None:
        reverse = prove(Fact("at most", y, x))
        ordered = None if reverse is None else not reverse
    if ordered is None:
        return size(getattr(sympy, which)(x, y))
    return a if ordered == (which == "Min") else b


def number(value: Int, choices: Iterable[int]) -> int:
    """The one of ``choices`` that ``value`` is; the oracle is asked if that is not known."""
    if not isinstance(value, Size):
        return int(value)
    oracle = _oracle.get()
    facts = [Fact("equal", value.expr, choice) for choice in choices]
    for fact in facts:
        if (prove(fact) or (oracle is not None and oracle.holds(fact))) and decide(fact):
            return int(fact.right)
    raise Undecided(" or ".join(map(str, facts)))


def decide(fact: Fact) -> bool:
    """Whether ``fact`` holds: proved, or answered by the oracle.

    Raises:
        Undecided: neither.
    """
    answer = prove(fact)
    if answer is not None:
        return answer
    oracle = _oracle.get()
    fact = lowest_terms(fact)
    answer = prove(fact)
    if answer is not None:
        return answer
    if oracle is None:
        raise Undecided(str(_settling(fact)))
    useful = [c for c in candidates(fact) if oracle.holds(c)]
    for count in (1, 2):
        for chosen in combinations(useful, count):
            with forgetting_afterwards():
                for c in chosen:
                    learn(c)
                answer = prove(fact)
            if answer is not None:
                for c in chosen:
                    oracle.assume(c)
                    learn(c)
                return answer
    if is_involved(fact):
        _fix(oracle, fact)
        answer = prove(fact)
        if answer is None:
            raise Undecided(str(fact))
        return answer
    answer = oracle.holds(fact)
    if answer is None:
        raise Undecided(str(_settling(fact)))
    asked = fact if answer else Fact(fact.relation, fact.left, fact.right, not fact.holds)
    oracle.assume(asked)
    learn(asked)
    if prove(fact) is not answer:
        raise LayoutError(
            f"cute_sharding asked PyTorch whether {asked}, but could not use the answer: please "
            "report this message"
        )  # else the same would be asked again and again
    return answer


def _settling(fact: Fact) -> Fact:
    """The fact to name if ``fact`` is undecided: a divisibility that would decide it, or ``fact``
    itself.
    """
    for candidate in candidates(fact):
        with forgetting_afterwards():
            learn(candidate)
            if prove(fact) is not None:
                return candidate
    return fact


def _fix(oracle: Oracle, fact: Fact) -> None:
    """Ask for the numbers of the symbols in ``fact``: if blocks of blocks do not divide, no weaker
    fact states the answer briefly.
    """
    import sympy

    for name in sorted(
        sympy.sympify(fact.left).free_symbols | sympy.sympify(fact.right).free_symbols, key=str
    ):
        below, above = 0, 1
        while not oracle.holds(Fact("at most", name, above)):
            if above > 1 << 64 or oracle.holds(Fact("at most", name, above)) is None:
                raise Undecided(str(fact))
            below, above = above, 2 * above
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (
                (below, middle) if oracle.holds(Fact("at most", name, middle)) else (middle, above)
            )
        value = Fact("equal", name, above)
        oracle.assume(value)
        learn(value)
