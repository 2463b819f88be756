"""Rows in common as strided runs: the very pairs that counting finds, in runs whose number does not
grow with the tensor.
"""

import random
from itertools import pairwise, product

import pytest
from enumeration import rows_after

from cute_sharding.sharding import rows
from cute_sharding.sharding.rows import count_rows, meet, rows_held, span

SIZES = (0, 1, 2, 3, 5, 7, 8, 12, 24, 31, 36, 60, 64, 97, 120, 210)


def drawn(rng, n):
    """Up to three cuts, with split factors small, dividing or not, and beyond n."""

    def cut():
        parts = rng.randint(1, 8)
        return (
            rng.choice([1, 1, 2, 3, 4, rng.randint(1, n + 1), rng.randint(1, n + 5)]),
            parts,
            rng.randrange(parts),
        )

    return tuple(cut() for _ in range(rng.randint(0, 3)))


def pairs(run):
    """What the docstring of Run says, in that order."""
    turns = product(*(range(count) for count, _, _ in run.loops))
    steps = [
        tuple(
            sum(i * loop[side] for i, loop in zip(turn, run.loops, strict=True)) for side in (1, 2)
        )
        for turn in turns
    ]
    return [(run.x + dx + j, run.y + dy + j) for dx, dy in steps for j in range(run.length)]


def all_pairs(found):
    return [pair for run in found for pair in pairs(run)]


def in_common(n, one, other):
    """(position on the one device, position on the other) of every row that both hold."""
    position = {row: at for at, row in enumerate(rows_after(n, other))}
    return [(at, position[row]) for at, row in enumerate(rows_after(n, one)) if row in position]


def cases(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        n = rng.choice(SIZES)
        yield n, drawn(rng, n), drawn(rng, n)


def test_held_rows_and_where_they_lie():
    for n, chain, _ in cases(0, 1500):
        assert sorted(all_pairs(rows_held(n, chain))) == [
            (row, at) for at, row in enumerate(rows_after(n, chain))
        ], (n, chain)


def test_rows_in_common_and_where_they_lie():
    met = 0
    for n, one, other in cases(1, 2000):
        expected = in_common(n, one, other)
        found = meet(n, one, other)
        assert sorted(all_pairs(found)) == expected, (n, one, other)
        assert count_rows(found) == len(expected)
        met += bool(expected)
    assert met > 400


def test_both_sides_ascend_within_a_run():
    """So a run can be copied in one go, and a prefix of it is a prefix on both sides. The runs come
    in the order of their first rows.
    """
    for n, one, other in cases(2, 1500):
        found = meet(n, one, other)
        assert [run.x for run in found] == sorted(run.x for run in found)
        for run in found:
            listed = pairs(run)
            assert listed and len(listed) == run.size and listed[-1][0] + 1 == run.reach
            assert all(
                x < next_x and y < next_y for (x, y), (next_x, next_y) in pairwise(listed)
            ), (n, one, other, run)


def test_shares_are_even_and_make_up_the_whole():
    rng = random.Random(3)
    for n, one, other in cases(4, 1000):
        found, parts = meet(n, one, other), rng.randint(1, 8)
        shares = [all_pairs(share(found, k, parts)) for k in range(parts)]
        assert [pair for share in shares for pair in share] == all_pairs(found), (
            n,
            one,
            other,
            parts,
        )
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        # A share of a share, as where several mesh dims replicate the source.
        again = [all_pairs(share(share(found, 0, parts), k, 3)) for k in range(3)]
        assert [pair for share in again for pair in share] == shares[0]


def share(found, k, parts):
    """The k-th of so many shares, as even as can be."""
    total = count_rows(found)
    return span(found, k * total // parts, (k + 1) * total // parts)


# -- cost: counted in calls, so that it does not depend on the machine -----------------------------


@pytest.fixture
def steps(monkeypatch):
    """How many pairs of runs were looked at for an answer, and the answer: (n, one, other) ->
    (count, runs).
    """
    looked = 0
    original = rows._meet_runs

    def counted(one, other):
        nonlocal looked
        looked += 1
        return original(one, other)

    def run(n, one, other):
        nonlocal looked
        rows_held.cache_clear()
        meet.cache_clear()
        looked = 0
        found = meet(n, one, other)
        return looked, found

    monkeypatch.setattr(rows, "_meet_runs", counted)
    return run


BILLION = 10**9
WINDOWS = 420 * 10**9  # periods of 6, 10, 14, 15, 20, 21 rows and so on divide it


@pytest.mark.parametrize(
    "n, one, other, most",
    [
        # Where sizes divide, a run or two, however the cuts nest; or a handful, where they start
        # and end out of step.
        (2**40, ((1, 64, 5),), ((1, 8, 0),), 1),
        (2**40, ((2**30, 8, 3),), ((2**20, 4, 1),), 2),
        (2**40, ((2**10, 8, 3), (1, 4, 1)), ((2**28, 2, 1), (2**9, 4, 2)), 2),
        (60**6, ((60**4, 5, 2), (60**2, 3, 1)), ((60**3, 4, 2), (60, 2, 1)), 15),
        # Where periods do not divide one another, those of one window, of lcm(6, 10) or lcm(14, 21)
        # rows, and what is left behind the last.
        (WINDOWS, ((WINDOWS // 6, 3, 1),), ((WINDOWS // 10, 5, 3),), 4),
        (WINDOWS, ((WINDOWS // 14, 2, 1),), ((WINDOWS // 21, 3, 1),), 4),
        (
            WINDOWS,
            ((WINDOWS // 60, 2, 1), (WINDOWS // 12, 3, 0)),
            ((WINDOWS // 20, 4, 1), (WINDOWS // 70, 2, 1)),
            20,
        ),
        (BILLION, ((BILLION // 6, 4, 1),), ((BILLION // 10, 8, 3),), 49),
        # A short period meets a long one: those of the long one count.
        (10**6, ((10**6 // 7, 4, 1),), ((2, 5, 1),), 8),
        (BILLION + 7, ((BILLION // 30, 7, 2), (1, 3, 1)), ((1, 5, 2), (BILLION // 42, 4, 1)), 49),
    ],
)
def test_few_runs_of_a_huge_tensor(steps, n, one, other, most):
    looked, found = steps(n, one, other)
    assert 0 < len(found) <= most
    assert looked <= 40 + 8 * most


@pytest.mark.parametrize("p, q", [(6, 10), (7, 12), (16, 24), (5, 35), (30, 42)])
def test_more_windows_are_no_more_work(steps, p, q):
    def of(n):
        looked, found = steps(n, ((n // p, 2, 1),), ((n // q, 3, 1),))
        return looked, len(found), count_rows(found) / n

    assert of(p * q * 10**2) == of(p * q * 10**12)


def test_at_worst_the_square_root(steps):
    """Periods without a common divisor, near the square root of n: a window is as long as the
    tensor.
    """
    n, root = 10**6, 10**3
    for p in range(root - 7, root + 40, 6):
        for q in (root + 1, root // 2 + 1, root // 3, 2 * root + 1):
            looked, found = steps(n, ((n // p, 2, 1),), ((n // q, 2, 0),))
            assert len(found) <= 2 * root
            assert looked <= 3 * root, (p, q, looked)
