"""Sizes that are not numbers: they compute as ints, judged by counting through the numbers they may
be. (How they are compared: test_layout_proofs.py, test_layout_asking.py.)
"""

import random
import re

import pytest
import sympy
from layout_claims import NUMBERS, Anyone, Hints, as_size, at, draw, s, t, u, up

from cute_sharding.layout import Size, Undecided, asking, assuming, symbol
from cute_sharding.layout.size import expression, is_multiple, is_same, least, most, number, size


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(2))
def test_sizes_compute_as_ints(seed):
    rng = random.Random(f"compute {seed}")
    for _ in range(60):
        text = draw(rng, rng.randint(1, 4))
        found = repr(as_size(text))
        for one in rng.sample(NUMBERS, 20):
            assert at(found, one) == at(text, one), f"{text} is {found}, but not at {one}"


def test_numbers_that_come_out_are_ints():
    for value, expected in (
        (s - s, 0),
        (s * 0, 0),
        (s - s + 3, 3),
        (2 * s // s, 2),
        (4 * s % 2, 0),
        ((2 * s + 1) % 2, 1),
        (expression(s // s), 1),
    ):
        assert type(value) is int and value == expected
    assert divmod(4 * s + 3, 4) == (s, 3) and divmod(4, 2 * s - s) == (4 // s, 4 % s)
    assert size(sympy.Integer(4)) == 4 and type(size(sympy.Integer(4))) is int


def test_sizes_are_values():
    assert Size(symbol("s")) == s and len({s, Size(symbol("s")), 2 * s}) == 2
    assert s != "s" and s not in (None, "s", s + 1)
    assert repr(s // 4 * t) == "t*(s//4)"


@pytest.mark.parametrize(
    "operation",
    [lambda: s // 0, lambda: s % 0, lambda: divmod(s, s - s), lambda: 0 // (s - s)],
    ids=["//", "%", "divmod", "0 //"],
)
def test_division_by_zero_is_that_of_ints(operation):
    with pytest.raises(ZeroDivisionError):
        operation()


# -- found wrong once ------------------------------------------------------------------------------


def test_a_remainder_of_a_remainder():
    """sympy's own Mod squares here: Mod(2*Mod(t, 4), 3) becomes Mod(2*Mod(t, 4)**2, 3)."""
    found = repr(2 * t % 8 % 3)
    assert [at(found, {"t": n}) for n in range(1, 13)] == [2 * n % 8 % 3 for n in range(1, 13)]


def test_a_remainder_by_a_sum():
    """sympy's own Mod recurses without end here."""
    found = repr((t - 2) % (s + 1))
    assert all(at(found, one) == (one["t"] - 2) % (one["s"] + 1) for one in NUMBERS)


def test_a_divisor_that_sympy_writes_with_the_other_sign():
    """s / (1 - floor((1 - u) / t)) is kept as -s / (floor((1 - u) / t) - 1), a negative divisor,
    and rounds as before.
    """
    divisor = 1 - (1 - u) // t
    for text, quotient in (
        ("s // (1 - (1 - u)//t)", s // divisor),
        ("-(-s // (1 - (1 - u)//t))", -(-s // divisor)),
        ("up(s, 1 - (1 - u)//t)", up(s, divisor)),
    ):
        found = repr(quotient), repr(Size(expression(quotient)))
        assert all(
            at(one, numbers) == at(text, numbers) for one in found for numbers in NUMBERS[::7]
        ), found


# -- the functions beside the operators ------------------------------------------------------------


def test_expression_is_in_simplest_form():
    assert expression(5) == 5 and expression(s) == symbol("s")
    with assuming("s % 4 == 0"):
        assert expression(s // 4 * 4) == symbol("s") and repr(Size(expression(s // 4))) == "s/4"
        assert expression(-(-s // 4)) == expression(s // 4)


def test_is_multiple_asks_nothing():
    oracle = Anyone()
    with asking(oracle):
        assert (
            is_multiple(4 * s, 2)
            and is_multiple(s * t, t)
            and is_multiple(6, 3)
            and not is_multiple(6, 4)
        )
        assert not is_multiple(s, 2) and not is_multiple(4, s) and not is_multiple(2 * s + 1, 2)
    assert oracle.facts == []
    with assuming("s % 4 == 0"):
        assert is_multiple(s, 2) and is_multiple(s * t, 2 * t)


def test_is_same_asks_nothing():
    oracle = Anyone()
    with asking(oracle):
        assert is_same(2 * s, s + s) and is_same(4, 4) and not is_same(4, 5)
        assert not is_same(s, t) and not is_same(s, 4) and not is_same(4, s)
    assert oracle.facts == []
    with assuming("s == t", "u == 4"):
        assert is_same(s, t) and is_same(u, 4)


@pytest.mark.parametrize(("choose", "plain"), [(least, min), (most, max)], ids=["least", "most"])
def test_least_and_most_ask_nothing(choose, plain):
    oracle = Anyone()
    with asking(oracle):
        assert choose(3, 4) == plain(3, 4) and type(choose(3, 4)) is int
        assert is_same(choose(s, 2 * s), s if choose is least else 2 * s) and is_same(
            choose(2 * s, s), choose(s, 2 * s)
        )
        assert is_same(choose(0, s), 0 if choose is least else s)
        either = repr(choose(s, t))
    assert oracle.facts == []
    assert all(at(either, one) == plain(one["s"], one["t"]) for one in NUMBERS)
    with assuming("s <= t"):
        assert is_same(choose(s, t), s if choose is least else t)


def test_a_number_is_one_of_the_choices():
    oracle = Hints({"s": 3, "t": 1, "u": 1})
    with asking(oracle):
        assert number(7, range(3)) == 7
        assert number(s, range(1, 5)) == 3 and type(number(s, range(1, 5))) is int
        assert s == 3
        with pytest.raises(Undecided, match=re.escape("t == 2 or t == 4")):
            number(t, (2, 4))
    assert oracle.facts == ["s == 3"]


def test_a_number_without_anyone_to_ask():
    with pytest.raises(Undecided, match=re.escape("s == 1 or s == 2")):
        number(s, (1, 2))
    with assuming("s == 2"):
        assert number(s, (1, 2)) == 2
