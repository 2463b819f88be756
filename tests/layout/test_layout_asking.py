"""Comparisons of sizes that are not proved: what is asked of whom, for how long it holds, and what
Undecided names where there is no one to ask.
"""

import random

import pytest
from layout_claims import (
    COMPARISONS,
    Anyone,
    Hints,
    as_size,
    at,
    draw_claim,
    draw_hints,
    s,
    satisfying,
    t,
    u,
)

from cute_sharding.layout import Fact, Undecided, asking, assuming
from cute_sharding.layout.size import least, most
from cute_sharding.layout.symbolic import learn


@pytest.mark.parametrize("seed", range(1))
def test_comparisons_are_those_of_the_hints_and_follow_from_what_was_recorded(seed):
    rng = random.Random(f"compare {seed}")
    asked = 0
    for _ in range(8):
        oracle = Hints(draw_hints(rng))
        with asking(oracle):
            for _ in range(3):
                before = len(oracle.facts)
                text = rng.choice(COMPARISONS).format(*draw_claim(rng)[1:])
                answer = bool(as_size(text))
                assert answer is at(text, oracle.numbers), (
                    f"{text} is answered {answer} at {oracle.numbers}"
                )
                asked += len(oracle.facts) > before
                for one in satisfying(oracle.facts):
                    assert at(text, one) is answer, (
                        f"{text} is answered {answer} under {oracle.facts}, but not at {one}"
                    )
    assert asked > 4


@pytest.mark.parametrize(
    "compare",
    [
        lambda: s < t,
        lambda: s == t,
        lambda: s % 3 == 2,
        lambda: (s * t) // 4 == 8,
        lambda: s % 5 == 0,
        lambda: most(s, t) == 7,
    ],
)
def test_a_comparison_is_asked_once(compare):
    oracle = Hints({"s": 5, "t": 7, "u": 1})
    with asking(oracle):
        answer = compare()
        assert compare() is answer
    assert len(oracle.facts) == 1


@pytest.mark.parametrize("seed", range(2))
def test_undecided_names_a_fact_that_settles_the_question(seed):
    rng = random.Random(f"undecided {seed}")
    undecided = 0
    for _ in range(20):
        text = rng.choice(COMPARISONS).format(*draw_claim(rng)[1:])
        try:
            as_size(text)
        except Undecided as error:
            undecided += 1
            with assuming(error.fact):
                answer = bool(as_size(text))
            for one in satisfying([error.fact]):
                assert at(text, one) is answer, (
                    f"{text} is answered {answer} under {error.fact}, but not at {one}"
                )
    assert undecided > 8


@pytest.mark.parametrize(
    "compare",
    [
        lambda: most(s, t) == 5,
        lambda: least(s, t) <= 2,
        lambda: least(s, t) % 2 == 0,
        lambda: most(s, t) // 3 > u,
    ],
)
def test_undecided_names_a_fact_of_the_larger_and_the_smaller(compare):
    with pytest.raises(Undecided) as caught:
        compare()
    with assuming(caught.value.fact):
        assert compare() in (True, False)


# -- whom is asked, and for how long ---------------------------------------------------------------


def assert_nothing_is_known():
    for compare in (lambda: s == 4, lambda: s <= t, lambda: s % 2 == 0):
        with pytest.raises(Undecided):
            compare()


def test_facts_end_with_the_block():
    with asking(Anyone()):
        assert s % 2 == 0 and s <= t
        learn(Fact("equal", u.expr, 4))
        assert u == 4
    assert_nothing_is_known()
    with pytest.raises(Undecided):
        assert u == 4


def test_facts_end_with_the_block_also_after_an_exception():
    with pytest.raises(KeyError), asking(Anyone()):
        assert s == 4
        raise KeyError
    assert_nothing_is_known()


def test_blocks_nest():
    outer, inner = Anyone(), Anyone()
    with asking(outer):
        assert s % 2 == 0
        with asking(inner):
            assert s % 2 == 0  # known already
            assert t % 3 == 0
        assert t % 3 == 0
        with pytest.raises(KeyError), assuming("u == 5"):
            assert u == 5
            raise KeyError
        assert u % 5 == 0
    assert inner.facts == ["t % 3 == 0"]
    assert outer.facts == ["s % 2 == 0", "t % 3 == 0", "u % 5 == 0"]
    assert_nothing_is_known()


def test_facts_supplied_before_are_not_asked():
    oracle = Hints({"s": 8, "t": 3, "u": 1})
    with assuming("s % 4 == 0", "t >= 2"), asking(oracle):
        assert s % 2 == 0 and s >= 4 and t != 1 and s // 4 * 4 == s
    assert oracle.facts == []


def test_an_oracle_that_does_not_know_leaves_it_undecided():
    class NoOne:
        def holds(self, fact):
            return None

    with asking(NoOne()), pytest.raises(Undecided, match="s == t"):
        assert s == t


# -- the weakest fact ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "facts"),
    [
        (lambda: s % 4 == 0, ["s % 4 == 0"]),
        (lambda: s // 4 * 4 == s, ["s % 4 == 0"]),
        (lambda: -(-s // 4) * 4 == s, ["s % 4 == 0"]),
        (lambda: t * (s // 4) * 4 == s * t, ["s % 4 == 0"]),
        (lambda: (s * t) % 4 == 0, ["(s*t) % 4 == 0"]),  # not of s or of t
        (lambda: (4 * s) % 8 == 0, ["s % 2 == 0"]),
        (lambda: (2 * s) // t * t == 2 * s, ["(2*s) % t == 0"]),
        (lambda: s < t, ["t > s"]),
        (lambda: s * u <= t * u, ["s <= t"]),
        (lambda: 4 * s < 4 * t, ["t > s"]),
        (lambda: s * t == s, ["t != 1"]),
        (lambda: 2 * s != 2 * s + t - 4, ["4 != t"]),
        (lambda: s + t >= s, []),
        (lambda: s * t >= s, []),
        (lambda: s // 3 <= s, []),
        (lambda: s != 0, []),
        (lambda: -(-s // 4) >= 1, []),
        (lambda: s * t * 4 % (2 * t) == 0, []),
    ],
)
def test_the_weakest_fact_is_asked(compare, facts):
    oracle = Hints({"s": 8, "t": 16, "u": 5})
    with asking(oracle):
        compare()
    assert oracle.facts == facts
