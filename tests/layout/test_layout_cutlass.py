"""The algebra against CuTe itself: the ``nvidia-cutlass-dsl`` package, which computes static
layouts on the CPU.

CuTe is column-major: the first mode varies fastest. Every tuple is reversed, at each level, on the
way in and on the way out; the two halves of a divide or a product are not modes of that order (half
0 is the tile or the block in both), so those are reversed inside only. CuTe takes sizes of at least
1. Asked for a complement that does not exist it returns a size of 0, and a divide or product by
that kills the process (SIGFPE): those get no such cases here, and pycute's tests hold them.
"""

import random

import pytest
from layout_bruteforce import (
    Found,
    complement_values,
    is_by_mode,
    is_complement,
    is_composition,
    is_left_inverse,
    is_logical_divide,
    is_logical_product,
    is_ranked_product,
    is_right_inverse,
    nest,
    random_compact_leaves,
    random_leaves,
    size_of,
    unzipped,
    values_of,
)
from layout_oracles import Tally, attempt

from cute_sharding import layout as cs
from cute_sharding.layout import Layout


@pytest.fixture(scope="module", autouse=True)
def imported():
    """CuTe is imported where it is asked: each process that collects tests reads this file."""
    global cute
    why = "nvidia-cutlass-dsl is not installed (it cannot be installed with torch 2.15)"
    cute = pytest.importorskip("cutlass.cute", reason=why)


def reverse(value):
    return tuple(map(reverse, reversed(value))) if isinstance(value, tuple) else value


def theirs(argument):
    """An argument as CuTe takes it; call it inside a jit function only."""
    if isinstance(argument, (Layout, Found)):
        return cute.make_layout(reverse(argument.shape), stride=reverse(argument.stride))
    return (
        tuple(theirs(part) for part in reversed(argument))
        if isinstance(argument, tuple)
        else argument
    )


def whole(value):
    """A result whose modes are all of one order."""
    return reverse(value)


def halves(value):
    """A result ``(tile, rest)`` or ``(block, copies)``."""
    return tuple(map(reverse, value))


def tiled(value):
    """A result ``(tile, rest0, rest1, ...)``."""
    return (reverse(value[0]), *reverse(value[1:]))


def run_all(operation, cases, back):
    """CuTe's answers to a list of argument tuples; None where it raises."""
    found = []

    def one(args):
        try:
            result = operation(*map(theirs, args))
            found.append(Found(back(result.shape), back(result.stride)))
        except Exception:
            found.append(None)

    # Plain Python calls inside a jit function run while it is traced, which is when static layouts
    # are computed.
    def body():
        for args in cases:
            one(args)

    @cute.jit
    def traced():
        body()

    traced()
    assert len(found) == len(cases)
    return found


def random_layout(rng, **kwargs):
    leaves = (
        random_leaves(rng, **kwargs) if rng.random() < 0.4 else random_compact_leaves(rng, **kwargs)
    )
    return nest(rng, leaves)


def small_tile(rng):
    return nest(rng, random_compact_leaves(rng, most=2, sizes=(1, 2, 3), gaps=(1, 1, 2)))


def pairs(rng, count, second):
    return [(random_layout(rng), second(rng)) for _ in range(count)]


def either(rng):
    return small_tile(rng) if rng.random() < 0.6 else random_layout(rng)


def divide_pairs(rng, count, second):
    cases = []
    while len(cases) < count:
        a, b = random_layout(rng), second(rng)
        if complement_values(b, size_of(a)) is not None:
            cases.append((a, b))
    return cases


def product_pairs(rng, count, second):
    cases = []
    while len(cases) < count:
        a, b = random_layout(rng), second(rng)
        if complement_values(a, size_of(a) * (1 + max(values_of(b)))) is not None:
            cases.append((a, b))
    return cases


def by_mode_cases(rng, count, tiler):
    """A layout with a tuple for its shape and a tiler for each of its modes."""
    cases = []
    while len(cases) < count:
        a = random_layout(rng)
        if isinstance(a.shape, tuple):
            cases.append((a, tuple(tiler(rng) for _ in range(a.rank))))
    return cases


def compare(name, cases, back, right, *, same=None, agreed=None):
    """``right(*args)`` gives the check of a result for these arguments."""
    tally = Tally(f"cutlass {name}")
    for args, found in zip(cases, run_all(getattr(cute, name), cases, back)):
        tally.case(
            args, attempt(getattr(cs, name), *args), found, right(*args), same and same(*args)
        )
    tally.check(len(cases), agreed=agreed)
    return tally


def test_coalesce(count):
    rng = random.Random(1)
    compare(
        "coalesce",
        [(random_layout(rng),) for _ in range(count)],
        whole,
        lambda a: lambda r: values_of(r) == values_of(a),
        agreed=count,
    )


def test_flatten_and_group_modes(count):
    rng = random.Random(2)
    layouts = [random_layout(rng, most=4) for _ in range(count)]
    for a, found in zip(layouts, run_all(cute.flatten, [(a,) for a in layouts], whole)):
        ours = cs.flatten(a)
        assert (ours.shape, ours.stride) == (found.shape, found.stride)
    wide = [a for a in layouts if a.rank >= 3]
    for a, found in zip(
        wide, run_all(lambda a: cute.group_modes(a, 0, 2), [(a,) for a in wide], whole)
    ):
        ours = cs.group_modes(a, a.rank - 2, a.rank)
        assert (ours.shape, ours.stride) == (found.shape, found.stride)


def test_composition(count):
    rng = random.Random(3)
    compare(
        "composition",
        pairs(rng, count, either),
        whole,
        lambda a, b: lambda r: is_composition(a, b, r),
    )


def test_composition_with_negative_strides(count):
    rng = random.Random(4)
    cases = pairs(rng, count, either)
    cases = [(nest(rng, [(n, rng.choice((1, -1)) * d) for n, d in a.leaves]), b) for a, b in cases]
    compare("composition", cases, whole, lambda a, b: lambda r: is_composition(a, b, r))


def test_composition_by_mode(count):
    rng = random.Random(5)
    compare(
        "composition",
        by_mode_cases(rng, count, small_tile),
        whole,
        lambda a, t: lambda r: is_by_mode(is_composition, a, t, r),
    )


def test_complement(count):
    rng = random.Random(6)
    cases = [(random_layout(rng), rng.choice((1, 1, 2, 5, 12, 24, 48))) for _ in range(count)]
    compare("complement", cases, whole, lambda a, bound: lambda r: is_complement(a, bound, r))


def test_right_inverse(count):
    """Right inverses differ in how far they reach, and where A repeats a value in what they pick:
    ours reaches at least as far.
    """
    rng = random.Random(7)

    def same(a):
        injective = len(set(values_of(a))) == size_of(a)

        def compare_values(ours, found):
            mine, other = values_of(ours), values_of(found)
            return len(mine) >= len(other) and (mine[: len(other)] == other or not injective)

        return compare_values

    compare(
        "right_inverse",
        [(random_layout(rng),) for _ in range(count)],
        whole,
        lambda a: lambda r: is_right_inverse(a, r),
        same=same,
    )


def test_left_inverse(count):
    """Left inverses are determined on A's values only; both being right is all there is to
    compare.
    """
    rng = random.Random(8)
    cases = [(random_layout(rng),) for _ in range(count)]
    compare(
        "left_inverse",
        cases,
        whole,
        lambda a: lambda r: is_left_inverse(a, r),
        same=lambda a: lambda x, y: True,
    )


def test_logical_divide(count):
    rng = random.Random(9)
    compare(
        "logical_divide",
        divide_pairs(rng, count, either),
        halves,
        lambda a, b: lambda r: is_logical_divide(a, b, r),
    )


def test_logical_product(count):
    rng = random.Random(10)
    compare(
        "logical_product",
        product_pairs(rng, count, either),
        halves,
        lambda a, b: lambda r: is_logical_product(a, b, r),
    )


@pytest.mark.parametrize("name", ["zipped_divide", "tiled_divide"])
def test_divide_by_mode(name, count):
    rng = random.Random(name)
    cases = by_mode_cases(rng, count, small_tile)

    def right(a, tiler):
        def check(r):
            if name == "tiled_divide":
                r = Found((r.shape[0], r.shape[1:]), (r.stride[0], r.stride[1:]))
            return is_by_mode(is_logical_divide, a, tiler, unzipped(r))

        return check

    compare(name, cases, tiled if name == "tiled_divide" else halves, right)


@pytest.mark.parametrize("name", ["zipped_product", "tiled_product"])
def test_product_of_layouts(name, count):
    """A layout for a tiler: zipped and tiled are then logical_product, tiled with the copies as
    modes of their own.
    """
    rng = random.Random(name)
    cases = [
        (a, b) for a, b in product_pairs(rng, 2 * count, small_tile) if isinstance(b.shape, tuple)
    ][:count]

    def right(a, b):
        def check(r):
            if name == "tiled_product":
                r = Found((r.shape[0], r.shape[1:]), (r.stride[0], r.stride[1:]))
            return is_logical_product(a, b, r)

        return check

    compare(name, cases, tiled if name == "tiled_product" else halves, right)


@pytest.mark.parametrize("name", ["blocked_product", "raked_product"])
def test_blocked_and_raked_product(name, count):
    rng = random.Random(name)
    compare(
        name,
        product_pairs(rng, count, either),
        whole,
        lambda a, b: lambda r: is_ranked_product(a, b, r, raked=name == "raked_product"),
    )
