"""The inverses: each post-condition by enumeration over all indices of small random layouts."""

from itertools import pairwise

from hypothesis import assume, given
from layout_bruteforce import (
    is_left_inverse,
    is_right_inverse,
    leaves_of,
    same_function,
    values_of,
)
from layout_strategies import SETTINGS, layouts

from cute_sharding.layout import (
    Layout,
    LayoutError,
    coalesce,
    composition,
    left_inverse,
    right_inverse,
)


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
