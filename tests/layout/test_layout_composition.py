"""Composition is exact: an answer wherever one exists, the right values, and LayoutError everywhere
else.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_bruteforce import (
    composition_exists,
    composition_values,
    is_composition,
    leaves_of,
    nest,
    random_compact_leaves,
    random_leaves,
    size_of,
    values_of,
)
from layout_strategies import SETTINGS, answer, layouts, tiles

from cute_sharding.layout import Layout, LayoutError, composition, make_layout

PAIRS = 22_000


def random_pair(rng):
    """A small pair: modes of size 0 and 1, strides of 0 and below, nesting; B's strides often meet
    A's mode boundaries.
    """
    if rng.random() < 0.5:
        leaves = random_leaves(
            rng, sizes=(1, 2, 2, 3, 4, 6), strides=(0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3)
        )
    else:
        leaves = [(n, -d if rng.random() < 0.2 else d) for n, d in random_compact_leaves(rng)]
    if rng.random() < 0.02:
        leaves[0] = (0, leaves[0][1])
    boundaries = [1]
    for n, _ in reversed(leaves):
        boundaries.append(boundaries[-1] * max(n, 1))
    tile, size = [], 1
    for _ in range(rng.randint(1, 3)):
        n = 0 if rng.random() < 0.01 else rng.choice((1, 2, 2, 3, 4, 6, 8))
        d = (
            rng.choice(boundaries) * rng.choice((0, 1, 1, 1, 2, 3))
            if rng.random() < 0.6
            else rng.randint(0, 13)
        )
        if rng.random() < 0.02:
            d = -d
        if size * n > 48:
            n = 1
        size *= max(n, 1)
        tile.append((n, d))
    return nest(rng, leaves), nest(rng, tile)


def cancelling_pair(rng):
    """A's jumps (see layout/algebra/jumps.py) are equal and opposite, so that a composition may
    exist although it crosses them.
    """
    sizes = [rng.choice((2, 2, 3, 4)) for _ in range(rng.randint(1, 3))]
    strides = [rng.randint(-2, 3)]
    jump = rng.choice((1, 2))
    for n in sizes:
        strides.append(n * strides[-1] + rng.choice((jump, -jump, 0)))
    leaves = list(zip([*sizes, rng.choice((1, 2, 3))], strides))[::-1]
    return nest(rng, leaves), nest(
        rng, [(rng.choice((2, 2, 2, 3, 4)), rng.randint(1, 9)) for _ in range(rng.randint(1, 3))]
    )


@pytest.mark.parametrize(
    ("draw", "pairs", "least"), [(random_pair, PAIRS, 0.15), (cancelling_pair, 4000, 0.3)]
)
def test_answers_exactly_where_an_answer_exists(draw, pairs, least, share):
    rng, pairs = random.Random(20_000), share(pairs, 4)
    answered = 0
    for _ in range(pairs):
        a, b = draw(rng)
        try:
            found = composition(a, b)
        except LayoutError:
            assert not composition_exists(a, b), (
                f"composition({a}, {b}) exists: {composition_values(a, b)}"
            )
            continue
        answered += 1
        assert composition_exists(a, b) and is_composition(a, b, found), (
            f"composition({a}, {b}) == {found} is wrong"
        )
    print(f"\n{draw.__name__}: {pairs} pairs, {answered} answered")
    # Both sides of the question are asked often enough to mean something.
    assert least * pairs < answered < (1 - least / 2) * pairs


@SETTINGS
@given(layouts(negative=True), layouts(empty=True))
def test_composition(a, b):
    found = answer(composition, a, b)
    assert found.size == b.size
    assert all(found(i) == a(b(i)) for i in range(b.size))


@SETTINGS
@given(layouts(negative=True), st.data())
def test_composition_by_mode(a, data):
    tiler = tuple(
        data.draw(st.one_of(st.none(), tiles(), st.integers(1, 4)))
        for _ in range(data.draw(st.integers(0, a.rank)))
    )
    found = answer(composition, a, tiler)
    assert found.rank == a.rank
    for i, mode in enumerate(a):
        assert found[i] == (composition(mode, tiler[i]) if i < len(tiler) else mode)


def test_every_pair_of_two_small_modes():
    """All of them: A of two modes up to 3, B of one mode up to 6."""
    for a in [
        Layout((m, n), (d, e))
        for m in (1, 2, 3)
        for n in (1, 2, 3)
        for d in (-1, 0, 1, 2, 3)
        for e in (-1, 0, 1, 2)
    ]:
        for b in [Layout(n, d) for n in range(7) for d in range(5)]:
            try:
                found = composition(a, b)
            except LayoutError:
                assert not composition_exists(a, b), (a, b)
            else:
                assert is_composition(a, b, found), (a, b, found)


def test_a_runs_on_along_its_outermost_leaf():
    """Beyond A's last index there is no coordinate; A goes on in the direction of its first leaf,
    as A(index) does.
    """
    a = Layout((2, 3), (10, 1))
    assert [a(i) for i in range(6, 12)] == [20, 21, 22, 30, 31, 32]
    assert composition(a, Layout(4, 3)) == Layout(4, 10)
    assert composition(a, Layout((5, 3))) == Layout((5, 3), (10, 1))
    assert composition(Layout((1, 3), (10, 1)), Layout(2, 3)) == Layout(2, 10)
    assert composition(Layout(1, 7), Layout(3)) == Layout(3, 7)


def test_b_may_not_reach_a_negative_index():
    with pytest.raises(LayoutError, match="the stride -1 of leaf"):
        composition(Layout(4), Layout(2, -1))
    with pytest.raises(LayoutError, match="negative"):
        composition(Layout(8), Layout((2, 2), (4, -1)))  # 4 - 1 is fine, but (0, 1) is not
    assert size_of(composition(Layout(8), Layout((0, 2), (4, -1)))) == 0


def test_negative_strides_of_a():
    a = Layout((2, 3), (-3, -1))
    assert composition(a, Layout((3, 2), (1, 3))) == Layout((3, 2), (-1, -3))
    assert composition(Layout(6, -1), Layout((2, 3))) == Layout((2, 3), (-3, -1))


def test_b_has_no_index_but_zero_in_a_layout_without_values():
    with pytest.raises(LayoutError, match="A has a value only for index 0"):
        composition(Layout((2, 0)), Layout(2))
    with pytest.raises(LayoutError):
        composition(Layout(()), Layout(2))
    assert values_of(composition(Layout(()), Layout(3, 0))) == [0, 0, 0]


def test_index_zero_of_a_layout_without_values():
    """Whether A(0) has a value is one question: composition may not answer it otherwise than A
    itself.
    """
    a, b = Layout((2, 0)), Layout(1)
    try:
        value = a(b(0))
    except LayoutError:
        with pytest.raises(LayoutError):
            composition(a, b)
    else:
        assert composition(a, b)(0) == value


def test_jumps_may_cancel():
    """A climbs 0, 1, then jumps by +1 at 2 and by -1 at 4; steps of 3 meet both at once."""
    a = Layout((3, 2, 2), (5, 3, 1))
    assert leaves_of(a)[::-1] == [(2, 1), (2, 3), (3, 5)]
    b = Layout((2, 2), (3, 3))
    assert composition_values(a, b) == [0, 4, 4, 8]
    assert composition(a, b) == Layout((2, 2), (4, 4))
    with pytest.raises(LayoutError):
        composition(a, Layout((2, 2), (1, 1)))


def test_the_result_keeps_the_nesting_of_b():
    a = Layout((6, 2), (8, 2))
    for b in (
        Layout(4),
        Layout((4,)),
        Layout(((4,), 3), ((1,), 4)),
        Layout((3, (2, (2, 1))), (4, (2, (1, 7)))),
    ):
        assert is_composition(a, b, composition(a, b))  # checks the nesting too
    assert composition(a, Layout(((4,), 3), ((1,), 4))) == Layout((((2, 2),), 3), (((8, 2),), 16))
    assert composition(a, Layout(())) == Layout(())


def test_the_error_names_the_leaves():
    with pytest.raises(
        LayoutError,
        match=r"with A = \(2,3\):\(6,4\) and B = 4:1 .* leaf 4:1 of B .* 3:4 ends and 2:6 begins",
    ):
        composition(Layout((2, 3), (6, 4)), Layout(4))
    with pytest.raises(LayoutError, match=r"leaves 2:1, 4:1 of B .* 4:1 ends and 2:9 begins"):
        composition(Layout((2, 4), (9, 1)), Layout((2, 4), (1, 1)))


def test_tilers():
    """An int n is n:1, a tuple goes mode by mode, None and a mode without a tiler stay."""
    a = Layout((4, 6, 2))
    assert composition(a, 2) == composition(a, Layout(2))
    assert composition(a, None) is a
    assert composition(a, (Layout(2, 2), None)) == Layout((2, 6, 2), (24, 2, 1))
    assert composition(a, (2, Layout((3, 2), (1, 3)))) == make_layout(
        Layout(2, 12), Layout((3, 2), (2, 6)), Layout(2, 1)
    )
    assert composition(Layout((4, (2, 3))), (2, (1, 3))) == Layout((2, (1, 3)), (6, (0, 1)))
    with pytest.raises(LayoutError, match="has 4 entries"):
        composition(a, (1, 1, 1, 1))


def test_a_large_composition_is_not_enumerated():
    """Exact also where the sizes forbid enumeration."""
    million = 10**6
    a = Layout((million, million), (2 * million, 1))
    assert composition(a, Layout((million, 1000), (million, 1000))) == Layout(
        (million, 1000), (2 * million, 1000)
    )
    with pytest.raises(LayoutError):
        composition(a, Layout(10**9, 999))
