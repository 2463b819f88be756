"""Facts: those that Undecided names help, and what is assumed is used, until the block ends."""

from itertools import product

import pytest
from layout_bruteforce import is_composition, is_left_inverse, same_function
from layout_symbols import holds, right_complement, s, settle, substituted, t, u

from cute_sharding.layout import (
    Layout,
    LayoutError,
    Undecided,
    assuming,
    complement,
    composition,
    left_inverse,
    logical_divide,
    logical_product,
)


@pytest.mark.parametrize(
    ("operation", "args", "facts", "want"),
    [
        (logical_divide, (Layout(s), 4), ["s % 4 == 0"], Layout((4, s / 4), (1, 4))),
        (complement, (Layout(4), s), ["s % 4 == 0"], Layout(s / 4, 4)),
        (
            composition,
            (Layout((2, s), (9, 1)), Layout((2, 4), (s, 1))),
            ["s >= 4"],
            Layout((2, 4), (9, 1)),
        ),
        (composition, (Layout((2, s), (9, 1)), Layout(3)), ["s >= 3"], Layout(3, 1)),
        (composition, (Layout((2, s), (9, 1)), Layout(3)), ["s == 3"], Layout(3, 1)),
        (composition, (Layout((2, s), (9, 1)), Layout(3)), ["s > t", "t >= 2"], Layout(3, 1)),
        (composition, (Layout((2, u), (50, 1)), Layout(3, 2 * s)), ["u >= 6*s"], Layout(3, 2 * s)),
        (
            composition,
            (Layout((2, u), (50, 1)), Layout(6, 2 * s)),
            ["u % (2*s) == 0", "6 % (u/(2*s)) == 0"],
            None,
        ),
        (left_inverse, (Layout((t, s), (u, 1)),), ["s < u", "u % s == 0"], None),
        (
            left_inverse,
            (Layout((4, s), (u, 2 * t)),),
            ["u > 2*t", "u % (2*t) == 0", "2*t*s <= u"],
            None,
        ),
        (complement, (Layout((t, s), (u, 1)), 1), ["s < u", "u % s == 0"], Layout(u / s, s)),
    ],
)
def test_facts_settle_it(operation, args, facts, want):
    """Undecided at first, with a fact in the message; with the facts it is decided, and right for
    numbers that satisfy them.
    """
    with pytest.raises(Undecided) as caught:
        operation(*args)
    assert caught.value.fact in str(caught.value) and "assuming" in str(caught.value)
    with assuming(*facts):
        found = operation(*args)
    assert want is None or found == want
    check = {
        composition: is_composition,
        left_inverse: is_left_inverse,
        complement: right_complement,
        logical_divide: lambda a, b, r: same_function(r, logical_divide(a, b)),
    }[operation]
    tried = 0
    for numbers in product((1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 4, 6, 12, 24)):
        if all(holds(fact, numbers) for fact in facts):
            tried += 1
            assert check(*substituted(args, numbers), substituted(found, numbers)), numbers
    assert tried
    with pytest.raises(Undecided):
        operation(*args)  # the facts end with the block


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (
            composition,
            (Layout((2, u), (50, 1)), Layout(6, 2 * s)),
        ),  # u % (2*s): a product on the right of %
        (
            composition,
            (Layout((2, s + 1), (50, 1)), Layout(6, 3)),
        ),  # (s + 1) % 3: a sum on the left of %
        (
            composition,
            (Layout((s, t + 1), (4, 1)), Layout(s, 2)),
        ),  # then s % ((t + 1)/2): a fraction
        (complement, (Layout(3 * s, u), 6)),  # 6 % (3*s*u)
        (complement, (Layout((3, s), (s + 1, 1)), 1)),  # (s + 1) % s
        (complement, (Layout((4, s * t), (s, u)), 1)),
        (logical_divide, (Layout((2 * t, 3 * s)), Layout(5 * s, 2))),
        (logical_product, (Layout((2, s + 1), (2 * t, 1)), Layout(3))),
        (left_inverse, (Layout((4, s), (u, 2 * t)),)),
    ],
)
def test_the_fact_that_undecided_names_is_enough(operation, args):
    """Supplying fact after fact ends, in an answer or a refusal; no fact is asked for twice."""
    found, facts = settle(operation, args, most=8)
    assert found is not None and facts


def test_every_fact_can_be_read():
    for fact in (
        "s % 4 == 0",
        "(s + 1) % 3 == 0",
        "u % (2*s) == 0",
        "3 % (u/(2*s)) == 0",
        "(s/2 + 1/2) % 2 == 0",
        "s*t % 6 == 0",
        "s == 4",
        "s < t",
        "s >= 4",
    ):
        with assuming(fact):
            pass


def test_two_facts_about_one_symbol():
    """A multiple of 2 and of u is a multiple of either."""
    for facts in (
        ("t % 2 == 0", "t % u == 0"),
        ("t % u == 0", "t % 2 == 0"),
        ("t % 4 == 0", "t % 6 == 0"),
    ):
        with assuming(*facts):
            assert complement(Layout(2), t).size == t / 2
    with assuming("t % u == 0", "t % 6 == 0"):
        assert complement(Layout(6), t).size == t / 6 and complement(Layout(u), t).size == t / u
    with assuming("t % 4 == 0", "t % 6 == 0"):
        assert complement(Layout(12), t).size == t / 12
        with pytest.raises(Undecided):
            complement(Layout(24), t)


def test_a_fact_may_define_a_symbol_by_itself():
    """``t % (s*t) == 0`` holds where s is 1; it is no contradiction."""
    with assuming("t % (s*t) == 0"):
        assert substituted(complement(Layout(s * t), t), (1, 3, 1)).size == 1


def test_facts_do_not_leak():
    with pytest.raises(ZeroDivisionError), assuming("s % 4 == 0"):
        raise ZeroDivisionError
    with pytest.raises(Undecided):
        complement(Layout(4), s)
    with assuming("s % 2 == 0"):
        with assuming("s % 3 == 0"):
            assert complement(Layout(6), s) == Layout(s / 6, 6)
        with pytest.raises(Undecided):
            complement(Layout(6), s)


@pytest.mark.parametrize(
    "fact", ["", "s", "s %", "1 < s < 4", "s in t", "s % 4", "f(s) == 0", "(s, 2) < 3"]
)
def test_a_fact_that_is_no_comparison_is_refused(fact):
    with pytest.raises(LayoutError, match="cannot read"), assuming(fact):
        pass
