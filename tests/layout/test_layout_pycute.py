"""The algebra against ``torch.distributed._pycute``, which is row-major too.

Where it and the definition disagree, the definition wins; the examples at the end hold such
answers.
"""

import random

import pytest

pytest.importorskip("torch.distributed._pycute")

import torch.distributed._pycute as pycute
from layout_bruteforce import (
    Found,
    is_by_mode,
    is_complement,
    is_composition,
    is_left_inverse,
    is_logical_divide,
    is_logical_product,
    is_right_inverse,
    nest,
    random_compact_leaves,
    random_leaves,
    refines,
    size_of,
    top_modes,
    unzipped,
    values_of,
)
from layout_oracles import Tally, attempt

from cute_sharding import layout as cs
from cute_sharding.layout import Layout, LayoutError


def theirs(layout):
    """A layout, an int, None or a tuple of them, as pycute takes it."""
    if isinstance(layout, tuple):
        return tuple(theirs(part) for part in layout)
    return pycute.Layout(layout.shape, layout.stride) if isinstance(layout, Layout) else layout


def run(operation, *args):
    """pycute's answer, or None where it raises (it asserts, divides by zero, or unpacks an empty
    tuple).
    """
    try:
        found = operation(*map(theirs, args))
    except Exception:
        return None
    return None if found is None else Found(found.shape, found.stride)


def random_layout(rng, **kwargs):
    leaves = (
        random_leaves(rng, **kwargs) if rng.random() < 0.4 else random_compact_leaves(rng, **kwargs)
    )
    return nest(rng, leaves)


def random_tiler(rng, a, build, *, nones=True):
    """One tiler for each of the first modes of A."""
    return tuple(
        None if nones and rng.random() < 0.15 else build(mode)
        for mode in top_modes(a)[: rng.randint(1, a.rank)]
    )


def small_tile(rng):
    return nest(rng, random_compact_leaves(rng, most=2, sizes=(1, 2, 3), gaps=(1, 1, 2)))


def test_coalesce(count):
    rng, tally = random.Random(1), Tally("coalesce")
    for _ in range(count):
        a = random_layout(rng)
        tally.case(
            (a,),
            cs.coalesce(a),
            run(pycute.coalesce, a),
            lambda r: values_of(r) == values_of(a) and refines(size_of(r), size_of(a)),
        )
        assert cs.coalesce(a).shape == pycute.coalesce(theirs(a)).shape
    tally.check(count, agreed=count)


def test_coalesce_by_profile(count):
    rng, tally = random.Random(2), Tally("coalesce by profile")
    for _ in range(count):
        a = random_layout(rng)
        profile = (1,) * rng.randint(1, a.rank)

        def right(r):
            return [values_of(m) for m in top_modes(r)] == [values_of(m) for m in top_modes(a)]

        tally.case((a, profile), cs.coalesce(a, profile), run(pycute.coalesce, a, profile), right)
    tally.check(count, agreed=count)


def test_composition(count):
    rng, tally = random.Random(3), Tally("composition")
    for _ in range(2 * count):
        a, b = random_layout(rng), random_layout(rng)
        if size_of(b) > 100:
            continue
        tally.case(
            (a, b),
            attempt(cs.composition, a, b),
            run(pycute.composition, a, b),
            lambda r: is_composition(a, b, r),
        )
    tally.check(count)


def test_composition_by_mode(count):
    rng, tally = random.Random(4), Tally("composition by mode")
    for _ in range(count):
        a = random_layout(rng)
        tiler = random_tiler(rng, a, lambda mode: small_tile(rng))
        tally.case(
            (a, tiler),
            attempt(cs.composition, a, tiler),
            run(pycute.composition, a, tiler),
            lambda r: is_by_mode(is_composition, a, tiler, r),
        )
    tally.check(count)


def test_complement(count):
    rng, tally = random.Random(5), Tally("complement")
    for _ in range(count):
        a, bound = random_layout(rng), rng.choice((1, 1, 2, 5, 12, 24, 48))
        tally.case(
            (a, bound),
            attempt(cs.complement, a, bound),
            run(pycute.complement, a, bound),
            lambda r: is_complement(a, bound, r),
        )
    tally.check(count)


def test_right_inverse(count):
    """Right inverses differ in how far they reach, and where A repeats a value in what they pick:
    ours reaches at least as far.
    """
    rng, tally = random.Random(6), Tally("right_inverse")
    longer = 0
    for _ in range(count):
        a = random_layout(rng)
        injective = len(set(values_of(a))) == size_of(a)

        def same(ours, found):
            nonlocal longer
            mine, other = values_of(ours), values_of(found)
            longer += len(mine) > len(other)
            return len(mine) >= len(other) and (mine[: len(other)] == other or not injective)

        tally.case(
            (a,),
            cs.right_inverse(a),
            run(pycute.right_inverse, a),
            lambda r: is_right_inverse(a, r),
            same,
        )
    tally.check(count)
    print("ours reaches further:", longer)


def test_left_inverse(count):
    """Left inverses are determined on A's values only; both being right is all there is to
    compare.
    """
    rng, tally = random.Random(7), Tally("left_inverse")
    for _ in range(count):
        a = random_layout(rng)
        tally.case(
            (a,),
            attempt(cs.left_inverse, a),
            run(pycute.left_inverse, a),
            lambda r: is_left_inverse(a, r),
            lambda x, y: True,
        )
    tally.check(count)


def test_logical_divide(count):
    rng, tally = random.Random(8), Tally("logical_divide")
    for _ in range(count):
        a, b = random_layout(rng), small_tile(rng) if rng.random() < 0.7 else random_layout(rng)
        tally.case(
            (a, b),
            attempt(cs.logical_divide, a, b),
            run(pycute.logical_divide, a, b),
            lambda r: is_logical_divide(a, b, r),
        )
    tally.check(count)


def test_logical_product(count):
    rng, tally = random.Random(9), Tally("logical_product")
    for _ in range(count):
        a, b = random_layout(rng), small_tile(rng) if rng.random() < 0.7 else random_layout(rng)
        tally.case(
            (a, b),
            attempt(cs.logical_product, a, b),
            run(pycute.logical_product, a, b),
            lambda r: is_logical_product(a, b, r),
        )
    tally.check(count)


@pytest.mark.parametrize("kind", ["divide", "product"])
@pytest.mark.parametrize("form", ["logical", "zipped", "tiled"])
def test_by_mode(kind, form, count):
    rng, tally = random.Random(f"{kind} {form}"), Tally(f"{form}_{kind} by mode")
    name = f"{form}_{kind}"
    ours, other = getattr(cs, name), getattr(pycute, name)
    check = is_logical_divide if kind == "divide" else is_logical_product
    for _ in range(count):
        a = random_layout(rng)
        tiler = random_tiler(rng, a, lambda mode: small_tile(rng), nones=form == "logical")

        def right(r):
            if form == "logical":
                return is_by_mode(check, a, tiler, r)
            modes = top_modes(r)
            if form == "tiled":  # ((tiles), rest0, rest1, ...): gather the rests again
                r = Found((r.shape[0], r.shape[1:]), (r.stride[0], r.stride[1:]))
            tiles, rests = map(top_modes, top_modes(r))
            untouched = rests[len(tiler) :]
            paired = unzipped(
                Found(
                    (r.shape[0], r.shape[1][: len(tiler)]), (r.stride[0], r.stride[1][: len(tiler)])
                )
            )
            return (
                len(modes) >= 2
                and len(tiles) == len(tiler)
                and is_by_mode(
                    check,
                    Found(a_modes(a).shape[: len(tiler)], a_modes(a).stride[: len(tiler)]),
                    tiler,
                    paired,
                )
                and [values_of(m) for m in untouched]
                == [values_of(m) for m in top_modes(a)[len(tiler) :]]
            )

        tally.case((a, tiler), attempt(ours, a, tiler), run(other, a, tiler), right)
    tally.check(count)


def a_modes(a):
    """A with a tuple for its shape, so that modes can be sliced."""
    return a if isinstance(a.shape, tuple) else Found((a.shape,), (a.stride,))


# -- where pycute is wrong -------------------------------------------------------------------------


def test_pycute_returns_a_wrong_layout_for_composition_across_a_boundary():
    """Four steps through a mode of three: pycute drops the fourth element."""
    a, b = Layout((2, 3), (6, 4)), Layout(4, 1)
    found = pycute.composition(theirs(a), theirs(b))
    assert (found.shape, found.stride) == (3, 4)
    assert [a(b(i)) for i in range(4)] == [0, 4, 8, 6]
    with pytest.raises(LayoutError, match="4:1 of B"):
        cs.composition(a, b)


def test_pycute_returns_a_wrong_layout_for_composition_with_a_mode_of_one():
    """It drops A's mode of size 1, along which A itself goes on."""
    a, b = Layout(1, 3), Layout(2, 1)
    found = pycute.composition(theirs(a), theirs(b))
    assert found(1) == 0 != theirs(a)(theirs(b)(1)) == 3
    assert cs.composition(a, b) == Layout(2, 3)


def test_pycute_returns_a_wrong_layout_for_complement_of_overlapping_modes():
    a = Layout((6, 4), (1, 1))
    found = pycute.complement(theirs(a), 1)
    assert (found.shape, found.stride) == (0, 4)
    with pytest.raises(LayoutError, match="does not exist"):
        cs.complement(a, 1)


def test_pycute_returns_a_wrong_layout_for_complement_of_modes_that_leave_no_fitting_gap():
    """{0, 2, 3, 5} leaves 1 and 4 over, and 1 + {0, 2, 3, 5} meets 3."""
    a = Layout((2, 2), (2, 3))
    assert pycute.complement(theirs(a), 2).shape == (0, 2)
    with pytest.raises(LayoutError, match="does not exist"):
        cs.complement(a, 2)


def test_pycute_ignores_the_bound_of_a_complement_of_an_int():
    assert pycute.complement(4, 16).shape == 1
    assert cs.complement(4, 16) == Layout(4, 4)


def test_pycute_returns_a_wrong_layout_for_left_inverse_of_strides_with_gaps():
    a = Layout((2, 2), (2, 6))
    found = pycute.left_inverse(theirs(a))
    assert [found(a(i)) for i in range(4)] != [0, 1, 2, 3]
    assert [cs.left_inverse(a)(a(i)) for i in range(4)] == [0, 1, 2, 3]


def test_pycute_returns_a_wrong_layout_for_left_inverse_of_a_constant():
    a = Layout(3, 0)
    assert pycute.left_inverse(theirs(a))(0) == 0
    with pytest.raises(LayoutError, match="does not exist"):
        cs.left_inverse(a)


def test_pycute_returns_a_wrong_layout_for_logical_divide_by_a_tile_with_a_gap():
    """The tile {0, 1, 2, 4, 5, 6} leaves 3 and 7 over; pycute returns one tile and drops them."""
    a, b = Layout(8), Layout((2, 3), (4, 1))
    found = pycute.logical_divide(theirs(a), theirs(b))
    assert (found.shape, found.stride) == (((2, 3), 1), ((4, 1), 0))
    with pytest.raises(LayoutError, match="complement"):
        cs.logical_divide(a, b)


def test_pycute_returns_a_wrong_layout_for_logical_product_of_a_gap():
    """Copies 0, 1, 2 of {0, 2} start at 0, 1, 4: no layout of size 3, and pycute returns two
    copies.
    """
    a, b = Layout(2, 2), Layout(3)
    found = pycute.logical_product(theirs(a), theirs(b))
    assert (found.shape, found.stride) == ((2, 2), (2, 1))
    with pytest.raises(LayoutError):
        cs.logical_product(a, b)


def test_pycute_divides_where_a_product_by_an_int_is_asked_for():
    a = Layout(6, 1)
    found = pycute.logical_product(theirs(a), 2)
    assert (found.shape, found.stride) == ((2, 3), (1, 2))
    assert cs.logical_product(a, 2) == Layout((6, 2), (1, 6))


def test_pycute_right_inverse_stops_before_a_part_of_a_mode():
    """Half of the mode 4:1 is enough for the mode 3:2 to go on; pycute uses modes whole or not at
    all.
    """
    a = Layout((4, 3), (1, 2))
    assert cs.right_inverse(a).size == 6 > pycute.right_inverse(theirs(a)).size() == 4
    assert is_right_inverse(a, cs.right_inverse(a))
