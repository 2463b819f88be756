"""The products: each post-condition by enumeration over all indices of small random layouts."""

from hypothesis import given
from hypothesis import strategies as st
from layout_bruteforce import is_logical_product, is_ranked_product, values_of
from layout_strategies import SETTINGS, answer, layouts, tiles

from cute_sharding.layout import (
    Layout,
    blocked_product,
    coalesce,
    complement,
    logical_product,
    make_layout,
    raked_product,
    tiled_product,
    zipped_product,
)


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
