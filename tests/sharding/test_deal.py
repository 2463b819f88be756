"""The key lemma, on every small case: two shardings deal every device the same positions if and
only if their deals are equal.
"""

from collections import defaultdict
from itertools import pairwise, product
from math import prod

import pytest
from enumeration import dealt, rows_after

from cute_sharding.layout import Size, asking, symbol
from cute_sharding.sharding.rows import (
    deal,
    dim_of,
    kinds_of_device,
    local_size,
    row_at,
    rows,
    runs,
    smallest_factor,
)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def ways(total):
    """Every dim, inside every shape of ``total`` elements, with every split factor: (rows, elements
    below, split factor).
    """
    for inner in divisors(total):
        for n in divisors(total // inner):  # and total // inner // n above
            for split_factor in range(1, n + 2):
                yield n, inner, split_factor


def positions(total, n, inner, split_factor, parts):
    """What each device gets of the flat positions [0, total)."""
    hands = []
    for device in range(parts):
        mine = dealt(list(range(n)), split_factor, parts, device)
        hands.append(
            tuple(
                (outer * n + row) * inner + i
                for outer in range(total // inner // n)
                for row in mine
                for i in range(inner)
            )
        )
    return tuple(hands)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 7])
def test_equal_positions_if_and_only_if_equal_deals(parts):
    for total in range(1, 37):
        deals_of, positions_of = defaultdict(set), defaultdict(set)
        for n, inner, split_factor in ways(total):
            hands = positions(total, n, inner, split_factor, parts)
            name = deal(n, inner, split_factor, parts)
            deals_of[hands].add(name)
            positions_of[name].add(hands)
        assert all(len(names) == 1 for names in deals_of.values()), (total, parts)
        assert all(len(hands) == 1 for hands in positions_of.values()), (total, parts)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_dim_and_split_factors_are_read_off_the_deal(parts):
    """On every shape: only one dim can be dealt so, with exactly the split factors of one range."""
    for total in (6, 8, 12, 16, 18, 24, 30):
        shapes = [(a, b, total // a // b) for a in divisors(total) for b in divisors(total // a)]
        for n, inner, split_factor in ways(total):
            name = deal(n, inner, split_factor, parts)
            if name is None:
                continue
            for shape in shapes:
                fitting = set()
                for dim, size in enumerate(shape):
                    below = prod(shape[dim + 1 :])
                    fitting |= {
                        (dim, f) for f in range(1, size + 1) if deal(size, below, f, parts) == name
                    }
                dim, below = dim_of(name[0], shape)
                assert below == prod(shape[dim + 1 :])
                found = smallest_factor(name, shape[dim], below, parts)
                # They are neighbours, the smallest of which is found.
                assert fitting == (
                    set()
                    if found is None
                    else {(dim, f) for f in range(found, found + len(fitting))}
                ), (name, shape)


def test_no_dim_is_long_enough():
    assert dim_of(12, [2, 3]) == (-1, 6)


CASES = [
    (n, f, parts)
    for n in range(14)
    for f in range(1, max(n, 1) + 2)
    for parts in (1, 2, 3, 4, 6, 9)
]


def test_runs_and_sizes_are_what_a_device_gets():
    for n, split_factor, parts in CASES:
        for device in range(parts):
            expected = dealt(list(range(n)), split_factor, parts, device)
            got = sorted(
                start + k * period + i
                for start, length, period, count in runs(n, split_factor, parts, device)
                for k in range(count)
                for i in range(length)
            )
            assert got == expected, (n, split_factor, parts, device)
            assert local_size(n, split_factor, parts, device) == len(expected)


class Hints:
    """An oracle (layout/size.py) that knows one number of rows, and keeps what was assumed."""

    def __init__(self, n):
        self.n, self.facts = n, []

    def holds(self, fact):
        return bool(eval(str(fact), {"n": self.n, "Max": max, "Min": min}))

    def assume(self, fact):
        self.facts.append(fact)


@pytest.mark.parametrize(("split_factor", "parts"), [(1, 3), (2, 2), (3, 4), (10, 4)])
def test_sizes_of_any_number_of_rows(split_factor, parts):
    """Where nobody knows how many rows there are, for all numbers that satisfy what was assumed for
    one.
    """
    for hint, device in product((1, 8, 12, 30), range(parts)):
        oracle = Hints(hint)
        with asking(oracle):
            found = repr(local_size(Size(symbol("n")), split_factor, parts, device))
        numbers = [n for n in range(1, 40) if all(Hints(n).holds(fact) for fact in oracle.facts)]
        assert hint in numbers
        for n in numbers:
            assert eval(found, {"n": n, "Max": max, "Min": min}) == local_size(
                n, split_factor, parts, device
            ), (hint, device, n, found, oracle.facts)


def test_one_device_of_each_size():
    for n, split_factor, parts in [
        *CASES,
        (100, 7, 11),
        (1000, 3, 64),
        (1003, 10, 1000),
        (7, 2, 10**6),
    ]:
        chosen = kinds_of_device(n, split_factor, parts)
        sizes = [local_size(n, split_factor, parts, device) for device in chosen]
        assert len(set(sizes)) == len(sizes) <= 5
        assert all(0 <= device < parts for device in chosen)
        if parts <= 1000:
            assert set(sizes) == {
                local_size(n, split_factor, parts, device) for device in range(parts)
            }, (n, split_factor, parts)


def test_rows_after_several_mesh_dims():
    for n in (0, 1, 5, 6, 8, 13, 24):
        for f1, m1 in ((1, 2), (2, 3), (3, 2), (n or 1, 2)):
            for f2, m2 in ((1, 3), (2, 2), (5, 2)):
                for f3, m3 in ((1, 1), (1, 2), (2, 4)):
                    for device in (
                        (a, b, c) for a in range(m1) for b in range(m2) for c in range(m3)
                    ):
                        chain = [
                            (f, m, k)
                            for f, m, k in zip((f1, f2, f3), (m1, m2, m3), device, strict=True)
                        ]
                        expected = list(rows_after(n, tuple(chain)))
                        intervals = rows(n, chain)
                        assert [
                            row for start, stop in intervals for row in range(start, stop)
                        ] == expected
                        assert all(a[1] < b[0] for a, b in pairwise(intervals)), (
                            "maximal and ascending"
                        )
                        assert [row_at(n, chain, i) for i in range(len(expected))] == expected
                        with pytest.raises(
                            IndexError,
                            match=f"is out of range for the {len(expected)} rows on the device",
                        ):
                            row_at(n, chain, len(expected))
