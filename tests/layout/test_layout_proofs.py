"""What is proved, simplified and brought to lowest terms, judged by counting through the numbers
that the symbols may be.
"""

import random

import pytest
from layout_claims import (
    CLAIMS,
    NUMBERS,
    as_expr,
    at,
    draw,
    draw_claim,
    draw_facts,
    s,
    t,
    u,
    up,
)

from cute_sharding.layout import Fact, LayoutError, Size, assuming
from cute_sharding.layout.size import expression, least, most
from cute_sharding.layout.symbolic import candidates, lowest_terms, prove, simplified


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.costly
def test_what_is_proved_holds_for_all_numbers(seed):
    rng = random.Random(f"prove {seed}")
    proved = {True: 0, False: 0, None: 0}
    for _ in range(24):
        facts, numbers = draw_facts(rng)
        for _ in range(4):
            relation, left, right = draw_claim(rng)
            fact = Fact(relation, as_expr(left), as_expr(right), rng.random() < 0.8)
            with assuming(*facts):
                answer = prove(fact)
            proved[answer] += 1
            if answer is not None:
                claim = CLAIMS[relation].format(left, right)
                wrong = next(
                    (one for one in numbers if at(claim, one) is not (answer is fact.holds)), None
                )
                assert wrong is None, (
                    f"{claim} was proved {answer is fact.holds} under {facts}, but not at {wrong}"
                )
    assert proved[True] > 4 and proved[False] > 4, proved


@pytest.mark.parametrize("seed", range(2))
def test_simplified_is_the_same_number(seed):
    rng = random.Random(f"simplified {seed}")
    changed = 0
    for _ in range(24):
        facts, numbers = draw_facts(rng)
        text = draw(rng, rng.randint(1, 3))
        with assuming(*facts):
            found = repr(Size(simplified(as_expr(text))))
        changed += found != repr(Size(as_expr(text)))
        for one in rng.sample(numbers, min(len(numbers), 40)):
            assert at(found, one) == at(text, one), (
                f"{text} was simplified to {found} under {facts}, but not at {one}"
            )
    assert changed > 2


def test_candidates_are_the_divisibilities_of_what_is_rounded():
    fact = Fact("equal", (4 * s // 8).expr, (t // u).expr)
    assert {str(candidate) for candidate in candidates(fact)} == {"s % 2 == 0", "t % u == 0"}


def test_lowest_terms_say_the_same():
    rng = random.Random("lowest terms")
    for _ in range(60):
        relation, left, right = draw_claim(rng)
        fact = Fact(relation, as_expr(left), as_expr(right), rng.random() < 0.8)
        lowest = str(lowest_terms(fact))
        for one in rng.sample(NUMBERS, 40):
            assert at(lowest, one) is (
                at(CLAIMS[relation].format(left, right), one) is fact.holds
            ), f"{fact} became {lowest}, which is not the same at {one}"


def test_a_fact_that_no_number_satisfies_is_no_reason_to_crash():
    """Contradictory facts prove anything, but are no error of the algebra."""
    with assuming("s == 3", "s == 4"):
        assert s in (3, 4) or s not in (3, 4)
    with pytest.raises(LayoutError), assuming("s === 3"):
        pass


# -- found wrong once ------------------------------------------------------------------------------


def test_a_multiple_that_turns_out_to_be_a_number():
    with assuming("s % 4 == 0", "s == 8"):
        assert s == 8 and s <= 9 and s % 3 == 2 and expression(s) == 8
    with assuming("s % 4 == 0", "s % 6 == 0", "2*s == 24"):
        assert s // 12 == 1


def test_a_product_of_quotients_of_which_one_is_negative():
    """An upper bound of one factor is a lower bound of the product only where the other is known
    not to be negative.
    """
    product_of_two = -(3 * s // 2) * ((5 - t) // 2)
    assert at(repr(product_of_two), {"s": 1, "t": 9}) == 2
    with assuming("t >= 9"):
        assert prove(Fact("at most", 3, product_of_two.expr)) is None


def test_the_smaller_of_two_of_which_one_may_be_negative():
    """The sign of what is rounded is not known: up(s, 10) - 2 * up(up(s, 10), 4) is -1 at s = 8."""
    piece = up(s, 10)
    block = up(piece, 4)
    assert at(repr(most(0, least(block, piece - 2 * block))), {"s": 8}) == 0
    assert prove(Fact("at most", 0, least(block, piece - 2 * block).expr)) is None
