"""The post-conditions in the docstrings of the operations, each by enumeration over all indices of
small random layouts.
"""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layout_bruteforce import (
    complement_values,
    composition_exists,
    is_complement,
    is_left_inverse,
    is_logical_divide,
    is_logical_product,
    is_ranked_product,
    is_right_inverse,
    leaves_of,
    same_function,
    size_of,
    top_modes,
    values_of,
)

from cute_sharding.layout import (
    Layout,
    LayoutError,
    blocked_product,
    coalesce,
    complement,
    composition,
    flatten,
    group_modes,
    left_inverse,
    logical_divide,
    logical_product,
    make_layout,
    raked_product,
    right_inverse,
    tiled_divide,
    tiled_product,
    zipped_divide,
    zipped_product,
)

SETTINGS = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def leaves(draw, most=3, negative=False, empty=False):
    """Half the time any sizes and strides, half the time sizes stacked up with gaps: then inverses
    and complements exist.
    """
    count = draw(st.integers(1, most))
    sizes = draw(
        st.lists(
            st.sampled_from([0, 1, 2, 3, 4] if empty else [1, 2, 2, 3, 4, 6]),
            min_size=count,
            max_size=count,
        )
    )
    if draw(st.booleans()):
        strides = draw(
            st.lists(st.integers(-4 if negative else 0, 12), min_size=count, max_size=count)
        )
        return list(zip(sizes, strides))
    out, current = [], 1
    for n in sizes:
        current *= draw(st.sampled_from([1, 1, 2, 3]))
        out.append((n, current))
        current *= max(n, 1)
    return draw(st.permutations(out))


@st.composite
def layouts(draw, **kwargs):
    items = draw(leaves(**kwargs))
    if len(items) == 1 and draw(st.booleans()):
        return Layout(*items[0])
    parts = [items[0]]
    for item in items[1:]:
        parts = [*parts, item] if draw(st.booleans()) else [*parts[:-1], _pair(parts[-1], item)]
    return Layout(tuple(p[0] for p in parts), tuple(p[1] for p in parts))


def _pair(a, b):
    return (a[0], b[0]), (a[1], b[1])


@st.composite
def tiles(draw):
    return (
        draw(layouts(most=2))
        if draw(st.booleans())
        else Layout(draw(st.integers(1, 6)), draw(st.integers(1, 4)))
    )


def answer(operation, *args):
    """The result; an example without one is no example of the post-condition."""
    try:
        return operation(*args)
    except LayoutError:
        assume(False)


# -- coalesce, flatten, group ----------------------------------------------------------------------


@SETTINGS
@given(layouts(most=4, negative=True, empty=True))
def test_coalesce(a):
    found = coalesce(a)
    assert same_function(found, a) and found.depth <= 1
    modes = leaves_of(found)
    if found.depth:
        assert len(modes) >= 2 and all(n != 1 for n, _ in modes)
        assert all(outer != n * d for (_, outer), (n, d) in pairwise(modes))
    assert coalesce(found) == found


@SETTINGS
@given(layouts(most=4, negative=True), st.data())
def test_coalesce_with_a_profile(a, data):
    """The modes of the profile are coalesced one by one, the others left; a nested profile goes a
    level deeper.
    """
    count = data.draw(st.integers(0, a.rank))
    found = coalesce(a, (1,) * count)
    assert [found[i] for i in range(count)] == [coalesce(a[i]) for i in range(count)]
    assert [found[i] for i in range(count, a.rank)] == [a[i] for i in range(count, a.rank)]
    whole = make_layout(a, a)
    assert coalesce(whole, ((1,) * count, 1)) == make_layout(found, coalesce(a))
    with pytest.raises(LayoutError, match="profile"):
        coalesce(a, (1,) * (a.rank + 1))


@SETTINGS
@given(layouts(most=4, negative=True, empty=True), st.data())
def test_flatten_and_group_modes(a, data):
    assert same_function(flatten(a), a) and flatten(a).depth == (1 if a.depth else 0)
    assume(a.depth)
    begin = data.draw(st.integers(0, a.rank - 1))
    end = data.draw(st.integers(begin + 1, a.rank))
    found = group_modes(a, begin, end)
    assert same_function(found, a) and list(found[begin]) == list(a)[begin:end]
    assert list(found) == [*list(a)[:begin], a[begin:end], *list(a)[end:]]


# -- composition -----------------------------------------------------------------------------------


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
        (Layout((2, 0)), "empty"),
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
    with pytest.raises(LayoutError, match="names 3 modes"):
        zipped_divide(a, (1, 1, 1))


def test_a_tile_that_does_not_divide_runs_on():
    """Three tiles of four cover ten elements; the last tile reaches indices 10 and 11, which the
    caller leaves out.
    """
    found = logical_divide(Layout(10, 2), 4)
    assert found == Layout((4, 3), (2, 8))
    assert sorted(values_of(found)) == [2 * i for i in range(12)]


# -- products --------------------------------------------------------------------------------------


@SETTINGS
@given(layouts(), tiles())
def test_logical_product(a, b):
    found = answer(logical_product, a, b)
    assert found[0] == a and is_logical_product(a, b, found)
    rest = complement(a, a.size * b.cosize)
    assert all(
        found(i * b.size + j) == a(i) + rest(b(j)) for i in range(a.size) for j in range(b.size)
    )
    # Copies that start at different places share nothing.
    block, starts = set(values_of(a)), set(values_of(found[1]))
    assert len({x + y for x in block for y in starts}) == len(block) * len(starts)


@SETTINGS
@given(layouts(), st.data())
def test_products_by_mode(a, data):
    tiler = tuple(
        data.draw(st.one_of(st.none(), tiles(), st.integers(1, 4)))
        for _ in range(data.draw(st.integers(1, a.rank)))
    )
    found = answer(logical_product, a, tiler)
    for i, mode in enumerate(a):
        assert found[i] == (logical_product(mode, tiler[i]) if i < len(tiler) else mode)
    zipped = zipped_product(a, tiler)
    for i, t in enumerate(tiler):
        halves = make_layout(Layout(1, 0), a[i]) if t is None else found[i]
        assert (zipped[0][i], zipped[1][i]) == (halves[0], halves[1])
    assert tiled_product(a, tiler) == make_layout(zipped[0], *zipped[1])


@SETTINGS
@given(layouts(), tiles())
def test_blocked_and_raked_product(a, b):
    blocked, raked = answer(blocked_product, a, b), answer(raked_product, a, b)
    assert is_ranked_product(a, b, blocked, raked=False) and is_ranked_product(
        a, b, raked, raked=True
    )
    product = logical_product(a, b)
    assert sorted(values_of(blocked)) == sorted(values_of(raked)) == sorted(values_of(product))
    for mode in (*blocked, *raked):
        assert coalesce(mode) == mode


def test_blocked_and_raked_product_of_equal_ranks():
    """The block (2,5) over (3,4): whole blocks, or their elements dealt out."""
    block, tiler = Layout((2, 5)), Layout((3, 4))
    product = logical_product(block, tiler)
    blocked, raked = blocked_product(block, tiler), raked_product(block, tiler)
    for t0 in range(3):
        for t1 in range(4):
            for b0 in range(2):
                for b1 in range(5):
                    want = product((b0, b1), (t0, t1))
                    assert blocked((t0, b0), (t1, b1)) == raked((b0, t0), (b1, t1)) == want


# -- inverses --------------------------------------------------------------------------------------


def furthest_chain(a):
    """How far values 0, 1, 2, ... can be continued, each step by any part of another mode of A."""

    def go(current, modes):
        best = current
        for i, (n, d) in enumerate(modes):
            if d == current and n > 1:
                best = max(
                    [
                        best,
                        *(
                            go(current * part, modes[:i] + modes[i + 1 :])
                            for part in range(2, n + 1)
                        ),
                    ]
                )
        return best

    return go(1, leaves_of(a))


@SETTINGS
@given(layouts(most=4, negative=True))
def test_right_inverse(a):
    found = right_inverse(a)
    assert is_right_inverse(a, found)
    assert all(a(found(i)) == i for i in range(found.size))
    assert coalesce(found) == found
    assert found.size == furthest_chain(a)


@SETTINGS
@given(layouts(negative=True))
def test_left_inverse(a):
    """Where it is refused, A repeats a value, has a stride below 1, or strides that do not divide
    one another.
    """
    try:
        found = left_inverse(a)
    except LayoutError:
        modes = sorted((d, n) for n, d in leaves_of(coalesce(a)) if n > 1)
        repeats = len(set(values_of(a))) < a.size
        assert repeats or modes[0][0] < 1 or any(e % d for (d, _), (e, _) in pairwise(modes))
        return
    assert is_left_inverse(a, found)
    assert all(found(a(i)) == i for i in range(a.size))


@SETTINGS
@given(layouts())
def test_inverses_of_a_bijection(a):
    """Of a permutation of 0 to n - 1 the two inverses are one function, and undo each other."""
    assume(sorted(values_of(a)) == list(range(a.size)))
    left, right = left_inverse(a), right_inverse(a)
    assert same_function(left, right)
    assert same_function(composition(a, right), Layout(a.size)) and same_function(
        composition(left, a), Layout(a.size)
    )


def test_inverses_of_ints_and_empty_layouts():
    assert right_inverse(6) == left_inverse(6) == Layout(6)
    assert right_inverse(Layout((2, 0))).size == 0
    assert right_inverse(Layout(4, 2)) == Layout(1, 0)
    assert is_left_inverse(Layout((2, 0)), left_inverse(Layout((2, 0))))


# -- all of them -----------------------------------------------------------------------------------


@SETTINGS
@given(
    layouts(most=4, negative=True, empty=True),
    layouts(negative=True, empty=True),
    st.integers(0, 40),
)
def test_only_layout_errors_are_raised(a, b, bound):
    """And every result is a Layout that its own constructor accepts."""
    operations = [
        (coalesce, a),
        (flatten, a),
        (composition, a, b),
        (complement, a, bound),
        (right_inverse, a),
        (left_inverse, a),
    ]
    operations += [
        (op, a, b)
        for op in (
            logical_divide,
            zipped_divide,
            tiled_divide,
            logical_product,
            zipped_product,
            tiled_product,
            blocked_product,
            raked_product,
        )
    ]
    for operation, *args in operations:
        try:
            found = operation(*args)
        except LayoutError as error:
            assert str(error)
            continue
        assert Layout(found.shape, found.stride) == found and Layout.parse(repr(found)) == found
        assert list(found.leaves) == leaves_of(found)
        assert top_modes(found) is not None
