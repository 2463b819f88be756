"""Layouts in the symbols s, t and u: numbers put in their place, the facts that an operation asks
for, and post-conditions at numbers as special as a size of 1.
"""

from fractions import Fraction

from layout_bruteforce import is_complement, leaves_of, values_of

from cute_sharding.layout import (
    Layout,
    LayoutError,
    Undecided,
    assuming,
    make_layout,
    symbol,
)

NAMES = "stu"

s, t, u = map(symbol, NAMES)


def substituted(value, numbers):
    """``value``, an expression or a layout or a tuple of them, with its symbols replaced by
    ``numbers``.
    """
    if isinstance(value, Layout):
        return Layout(substituted(value.shape, numbers), substituted(value.stride, numbers))
    if isinstance(value, tuple):
        return tuple(substituted(part, numbers) for part in value)
    if isinstance(value, int):
        return value
    found = value.subs(dict(zip((s, t, u), numbers)), simultaneous=True)
    assert found.is_Integer, f"{value} is {found} at {numbers}"
    return int(found)


def holds(fact, numbers):
    """Whether a fact, read as Python, is true of the numbers."""
    try:
        return bool(
            eval(fact, {}, {name: Fraction(number) for name, number in zip(NAMES, numbers)})
        )
    except ZeroDivisionError:
        return False


def settle(operation, args, most):
    """The result and the facts supplied, one after the other, as each Undecided asks; None for more
    than ``most`` facts.
    """
    facts = []
    while True:
        try:
            with assuming(*facts):
                return operation(*args), facts
        except Undecided as undecided:
            assert undecided.fact in str(undecided)
            assert undecided.fact not in facts, (
                f"{operation.__name__}{args}: supplying {undecided.fact!r} does not settle it"
            )
            if len(facts) == most:
                return None, facts
            facts.append(undecided.fact)
        except LayoutError as error:
            return error, facts


def tiles_the_range(a, found, bound):
    """The post-condition of complement but for "no smaller one": a size that turns out 1 could have
    been left out.
    """
    modes = [(n, d) for n, d in leaves_of(a) if d]
    whole = values_of(make_layout(*[Layout(n, d) for n, d in modes], found))
    return sorted(whole) == list(range(len(whole))) and len(whole) >= bound


def right_complement(a, bound, found):
    return tiles_the_range(a, found, bound) and (
        any(n == 1 for n, _ in leaves_of(a)) or is_complement(a, bound, found)
    )
