"""The algebra against ``torch.distributed._pycute``, which is row-major too.

Where it and the definition disagree, the definition wins; so it does in the examples at the end.
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
from cute_sharding.layout import Layout


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


# What pycute or CuTe answer by a wrong layout: the right one, or None where there is none.
WHERE_OTHERS_ARE_WRONG = {
    "four steps through a mode of three": ("composition", Layout((2, 3), (6, 4)), Layout(4), None),
    "a mode across the end of another": ("composition", Layout((3, 4), (1, 6)), Layout(4, 3), None),
    "along a mode of one": ("composition", Layout(1, 3), Layout(2), Layout(2, 3)),
    "complement of overlapping modes": ("complement", Layout((6, 4), (1, 1)), 1, None),
    "complement of equal modes": ("complement", Layout((2, 2), (1, 1)), 32, None),
    "complement without a gap that fits": ("complement", Layout((2, 2), (2, 3)), 2, None),
    "complement of an int": ("complement", 4, 16, Layout(4, 4)),
    "divided by a tile with a gap": ("logical_divide", Layout(8), Layout((2, 3), (4, 1)), None),
    "three copies of a gap": ("logical_product", Layout(2, 2), Layout(3), None),
    "as many copies as an int says": ("logical_product", Layout(6), 2, Layout((6, 2), (1, 6))),
    "copies that overlap": (
        "blocked_product",
        *(Layout((4, 3), (12, 4)), Layout((2, 3), (3, 1))),
        None,
    ),
    "left inverse of a constant": ("left_inverse", Layout(3, 0), None),
    "left inverse of overlapping modes": ("left_inverse", Layout((6, 3), (1, 1)), None),
}


@pytest.mark.parametrize("case", WHERE_OTHERS_ARE_WRONG)
def test_where_others_are_wrong(case):
    name, *args, wanted = WHERE_OTHERS_ARE_WRONG[case]
    found = attempt(getattr(cs, name), *args)
    assert found == wanted


def test_answers_where_others_have_none_or_less():
    """Inverses with gaps between strides, or by a part of a mode; every second of the copies."""
    a, b = Layout(3, 4), Layout(2, 6)
    assert is_logical_product(a, b, cs.logical_product(a, b))
    a = Layout((2, 2), (2, 6))
    assert [cs.left_inverse(a)(a(i)) for i in range(4)] == [0, 1, 2, 3]
    a = Layout((4, 3), (1, 2))
    assert cs.right_inverse(a).size == 6 and is_right_inverse(a, cs.right_inverse(a))
