"""Coalesce, flatten and group: each post-condition by enumeration over all indices of small random
layouts.
"""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_bruteforce import leaves_of, same_function
from layout_strategies import SETTINGS, layouts

from cute_sharding.layout import LayoutError, coalesce, flatten, group_modes, make_layout


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
