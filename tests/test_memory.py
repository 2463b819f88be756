"""What is remembered, and its bound (cute_sharding/_memory.py)."""

import random

import pytest

from cute_sharding import _memory
from cute_sharding._memory import AT_FIRST, RECOGNIZED, remembered


@pytest.fixture
def functions():
    """Two that note what they compute, in a memory of their own."""
    kept, _memory._memory = _memory._memory, _memory._Memory()
    computed = []

    @remembered
    def one(n):
        computed.append(("one", n))
        return [n]

    @remembered
    def other(n, *, by=1):
        computed.append(("other", n, by))
        return [n * by]

    yield one, other, computed
    _memory._memory = kept


def test_results_are_those_of_the_function(functions):
    one, other, computed = functions
    rng = random.Random(0)
    for _ in range(20_000):
        n, by = rng.randrange(3000), rng.randrange(3)
        assert one(n) == [n] and other(n, by=by) == [n * by]
    assert len(computed) < 40_000


def test_all_are_bounded_together(functions):
    one, other, _ = functions
    for n in range(10 * AT_FIRST):
        one(n)
        other(n)
        sizes = one.cache_info().currsize + other.cache_info().currsize
        assert sizes <= AT_FIRST
    assert _memory._memory.most == AT_FIRST


@pytest.mark.parametrize("shapes", [AT_FIRST // 4, 3 * AT_FIRST, 20 * AT_FIRST, RECOGNIZED // 2])
def test_what_is_asked_for_again_and_again_soon_stays(functions, shapes):
    one, _, computed = functions
    for _ in range(12):
        for n in range(shapes):
            one(n)
    computed.clear()
    for n in range(shapes):
        one(n)
    assert not computed
    assert _memory._memory.most <= max(4 * shapes, AT_FIRST)


def test_forget(functions):
    one, _, computed = functions
    one(3)
    _memory.forget()
    one(3)
    assert computed == [("one", 3), ("one", 3)]


def test_a_process_that_soon_ends_forgets_nothing(functions):
    one, _, computed = functions
    _memory.remember_all()
    for n in [*range(10 * AT_FIRST)] * 2:
        one(n)
    assert len(computed) == 10 * AT_FIRST
