"""Complement and the divides: each post-condition by enumeration over all indices of small random
layouts.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_bruteforce import (
    complement_values,
    composition_exists,
    is_complement,
    is_logical_divide,
    leaves_of,
    size_of,
    values_of,
)
from layout_strategies import SETTINGS, answer, layouts, tiles

from cute_sharding.layout import (
    Layout,
    LayoutError,
    coalesce,
    complement,
    composition,
    logical_divide,
    make_layout,
    tiled_divide,
    zipped_divide,
)

# -- complement ------------------------------------------------------------------------------------


@SETTINGS
@given(layouts(negative=True), st.integers(1, 60))
def test_complement(a, bound):
    """It exists exactly where enumeration finds one; it is the smallest, coalesced, and its strides
    descend.
    """
    try:
        found = complement(a, bound)
    except LayoutError:
        assert complement_values(a, bound) is None
        return
    assert is_complement(a, bound, found)
    reached = sorted(x + y for x in set(values_of(a)) for y in values_of(found))
    assert reached == list(range(len(reached))) and len(reached) >= bound
    assert coalesce(found) == found
    strides = [d for _, d in leaves_of(found)]
    assert strides == sorted(strides, reverse=True)


def test_complement_of_the_odd_ones():
    assert complement(4, 16) == Layout(4, 4)
    assert complement(Layout(4, 0), 6) == Layout(6, 1)  # a stride of 0 fills nothing
    assert complement(Layout(1, 5), 6) == Layout(6, 1)
    assert complement(Layout(4), 0).size == 0
    assert complement(Layout(4, 2)) == Layout(2, 1)
    for bad, message in (
        (Layout(4, -1), "negative"),
        (Layout((2, 0)), "of size 0"),
        (Layout((2, 2), (1, 1)), "does not exist"),
        (Layout((2, 2), (2, 3)), "does not exist"),
    ):
        with pytest.raises(LayoutError, match=message):
            complement(bad, 8)


# -- divides ---------------------------------------------------------------------------------------


@SETTINGS
@given(layouts(), tiles())
def test_logical_divide(a, b):
    """By enumeration, and equal to the composition that the docstring names, refusals included."""
    try:
        found = logical_divide(a, b)
    except LayoutError:
        rest = complement_values(b, size_of(a))
        assert rest is None or not composition_exists(a, make_layout(b, complement(b, size_of(a))))
        return
    assert is_logical_divide(a, b, found)
    rest = complement(b, a.size)
    assert found == composition(a, make_layout(b, rest))
    assert all(
        found[0](i) + found[1](j) == a(b(i) + rest(j))
        for i in range(b.size)
        for j in range(rest.size)
    )


@SETTINGS
@given(layouts(), st.data())
def test_divides_by_mode(a, data):
    tiler = tuple(
        data.draw(st.one_of(st.none(), tiles(), st.integers(1, 4)))
        for _ in range(data.draw(st.integers(1, a.rank)))
    )
    found = answer(logical_divide, a, tiler)
    assert found.rank == a.rank
    for i, mode in enumerate(a):
        assert found[i] == (logical_divide(mode, tiler[i]) if i < len(tiler) else mode)
    zipped, tiled = zipped_divide(a, tiler), tiled_divide(a, tiler)
    assert zipped.rank == 2 and zipped[0].rank == len(tiler)
    for i, t in enumerate(tiler):
        halves = make_layout(Layout(1, 0), a[i]) if t is None else found[i]
        assert (zipped[0][i], zipped[1][i]) == (halves[0], halves[1])
    assert list(zipped[1])[len(tiler) :] == list(a)[len(tiler) :]
    assert tiled == make_layout(zipped[0], *zipped[1])
    assert sorted(values_of(zipped)) == sorted(values_of(found))


@SETTINGS
@given(layouts(), tiles())
def test_divides_by_a_layout(a, b):
    """A single tiler divides A as a whole."""
    found = answer(logical_divide, a, b)
    assert zipped_divide(a, b) == found
    assert tiled_divide(a, b) == make_layout(found[0], *found[1])
    assert logical_divide(a, None) is a and zipped_divide(a, None) == make_layout(Layout(1, 0), a)


def test_a_divide_by_nested_tilers():
    a = Layout((4, (6, 8)))
    assert logical_divide(a, (2, (3, 4))) == make_layout(
        logical_divide(a[0], 2), make_layout(logical_divide(a[1, 0], 3), logical_divide(a[1, 1], 4))
    )
    assert zipped_divide(a, (2, (3, 4))) == Layout(
        ((2, (3, 4)), (2, (2, 2))), ((48, (8, 1)), (96, (24, 4)))
    )
    with pytest.raises(LayoutError, match="has 3 entries"):
        zipped_divide(a, (1, 1, 1))


def test_a_tile_that_does_not_divide_runs_on():
    """Three tiles of four cover ten elements; the last tile reaches indices 10 and 11, which the
    caller leaves out.
    """
    found = logical_divide(Layout(10, 2), 4)
    assert found == Layout((4, 3), (2, 8))
    assert sorted(values_of(found)) == [2 * i for i in range(12)]
