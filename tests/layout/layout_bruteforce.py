"""Definitions by enumeration, written without the algebra: what the tests compare the algebra with.

Nothing here calls an operation of the package. Layouts come in as objects with nested ``shape`` and
``stride``; everything else is computed from those two tuples.
"""

from __future__ import annotations

import random
from itertools import product
from math import prod

from cute_sharding.layout import Layout


class Found:
    """An oracle's answer: a nested shape and stride, whatever they hold."""

    def __init__(self, shape, stride):
        self.shape, self.stride = shape, stride

    def __repr__(self):
        return f"{self.shape}:{self.stride}"


def leaves_of(layout):
    """The (size, stride) pairs of the leaf modes, outermost first."""

    def walk(shape, stride):
        if isinstance(shape, tuple):
            assert isinstance(stride, tuple) and len(shape) == len(stride), (shape, stride)
            return [leaf for n, d in zip(shape, stride) for leaf in walk(n, d)]
        assert not isinstance(stride, tuple), (shape, stride)
        return [(shape, stride)]

    return walk(layout.shape, layout.stride)


def size_of(layout):
    return prod(n for n, _ in leaves_of(layout))


def value_at(leaves, index):
    """The layout function: last leaf fastest, and the first leaf never ends. None where there is no
    value.
    """
    if index < 0:
        return None
    if not leaves:
        return 0 if index == 0 else None
    if any(n == 0 for n, _ in leaves[1:]):
        return 0 if index == 0 else None
    value = 0
    for n, d in reversed(leaves[1:]):
        value += index % n * d
        index //= n
    return value + index * leaves[0][1]


def values_of(layout):
    """The values at the indices 0, 1, ..., size - 1: nested loops over the coordinates, in
    lexicographic order.
    """
    result = [0]
    for n, d in leaves_of(layout):
        result = [value + i * d for value in result for i in range(n)]
    return result


def same_function(a, b):
    return values_of(a) == values_of(b)


def top_modes(layout):
    """The top-level modes as layouts; an int shape is one mode."""
    if not isinstance(layout.shape, tuple):
        return [layout]
    return [Found(n, d) for n, d in zip(layout.shape, layout.stride)]


def depth_of(shape):
    return 1 + max(map(depth_of, shape), default=0) if isinstance(shape, tuple) else 0


def is_layout_function(values):
    """Whether some layout of ``len(values)`` elements has these values: tries every size of an
    innermost leaf.
    """
    n = len(values)
    if n == 0:
        return True
    if values[0] != 0:
        return False
    if n == 1:
        return True
    for r in range(2, n + 1):
        if n % r:
            continue
        if any(
            values[k + i] != values[k] + i * values[1] for k in range(0, n, r) for i in range(r)
        ):
            continue
        if is_layout_function(values[::r]):
            return True
    return False


def composition_values(a, b):
    """``[A(B(i)) for i]``, with None where A has no value."""
    leaves = leaves_of(a)
    return [value_at(leaves, x) for x in values_of(b)]


def composition_exists(a, b):
    """Whether a layout with one mode of the right size for each leaf of B has the values
    ``A(B(i))``.

    Such a layout adds up what its modes contribute, and what a mode contributes shows where the
    other coordinates are 0.
    """
    if size_of(b) == 0:
        return True
    outer = leaves_of(a)
    contributions = []
    for n, d in leaves_of(b):
        values = [value_at(outer, i * d) for i in range(n)]
        if None in values or not is_layout_function(values):
            return False
        contributions.append(values)
    return composition_values(a, b) == [sum(part) for part in product(*contributions)]


def complement_values(layout, bound):
    """The values, ascending, of the smallest set C with A' + C = [0, N) one to one and N >= bound,
    or None where there is none.

    C is forced: the smallest integer not reached so far is reached by C alone (A' is non-negative
    and holds 0).
    """
    leaves = [(n, d) for n, d in leaves_of(layout) if d != 0]
    tile = values_of(Found(tuple(n for n, _ in leaves), tuple(d for _, d in leaves)))
    if size_of(layout) == 0 or min(tile) < 0 or len(set(tile)) != len(tile):
        return None
    covered: set[int] = set()
    chosen: list[int] = []
    first = 0
    # A' + C = [0, N) is periodic once it tiles at all, and the first N is at most twice the reach
    # of A'.
    limit = 2 * (max(tile) + 1) + bound
    while first <= limit:
        new = {first + t for t in tile}
        if covered & new:
            return None
        covered |= new
        chosen.append(first)
        while first in covered:
            first += 1
        if len(covered) == first and first >= bound:
            return chosen if bound else []
    return None


def nest(rng: random.Random, leaves):
    """The leaves as a layout, grouped at random; now and then an int shape or a mode of mode of
    one.
    """
    if len(leaves) == 1 and rng.random() < 0.5:
        return Layout(*leaves[0])

    def group(items, depth):
        parts = []
        i = 0
        while i < len(items):
            take = rng.randint(1, len(items) - i)
            if depth < 2 and rng.random() < 0.3:
                parts.append(group(items[i : i + take], depth + 1))
                i += take
            else:
                parts.append(items[i])
                i += 1
        return tuple([p[0] for p in parts]), tuple([p[1] for p in parts])

    return Layout(*group(list(leaves), 0))


def random_leaves(
    rng: random.Random, *, most=3, sizes=(1, 2, 2, 3, 4, 6), strides=(0, 1, 2, 3, 4, 6, 8, 12)
):
    return [(rng.choice(sizes), rng.choice(strides)) for _ in range(rng.randint(1, most))]


def random_compact_leaves(
    rng: random.Random, *, most=3, sizes=(1, 2, 2, 3, 4), gaps=(1, 1, 1, 2, 3), shuffled=True
):
    """Leaves whose strides divide one another: sizes stacked up with gaps between them, in any
    order.
    """
    current = 1
    out = []
    for _ in range(rng.randint(1, most)):
        current *= rng.choice(gaps)
        n = rng.choice(sizes)
        out.append((n, current))
        current *= n
    if shuffled:
        rng.shuffle(out)
    else:
        out.reverse()
    return out


def refines(shape, profile):
    """Whether ``shape`` is ``profile`` with leaves replaced by modes of the same size."""
    if isinstance(profile, tuple):
        return (
            isinstance(shape, tuple)
            and len(shape) == len(profile)
            and all(map(refines, shape, profile))
        )
    return size_of(Found(shape, shape)) == profile


# -- the definitions of the operations: whether ``r`` is what the operation promises ---------------


def is_composition(a, b, r):
    want = composition_values(a, b)
    return refines(r.shape, b.shape) and None not in want and values_of(r) == want


def is_complement(a, bound, r):
    return values_of(r) == complement_values(a, bound)


def is_right_inverse(a, r):
    """``A(R(i)) == i`` within A."""
    size, leaves, values = size_of(a), leaves_of(a), values_of(r)
    return all(0 <= x < size and value_at(leaves, x) == i for i, x in enumerate(values))


def is_left_inverse(a, r):
    """``L(A(i)) == i``."""
    leaves = leaves_of(r)
    return all(value_at(leaves, x) == i for i, x in enumerate(values_of(a)))


def divide_values(a, b):
    """For mode 0 (inside a tile) and mode 1 (over the tiles), the indices of A; None where B has no
    complement.
    """
    rest = complement_values(b, size_of(a))
    return None if rest is None else (values_of(b), rest)


def is_logical_divide(a, b, r):
    indices = divide_values(a, b)
    if (
        indices is None
        or not isinstance(r.shape, tuple)
        or len(r.shape) != 2
        or not refines(r.shape[0], b.shape)
    ):
        return False
    leaves = leaves_of(a)
    return [size_of(m) for m in top_modes(r)] == [len(part) for part in indices] and values_of(
        r
    ) == [value_at(leaves, x + y) for x in indices[0] for y in indices[1]]


def product_values(a, b):
    """The values that B's values stand for: the offsets of the copies of A; None where A has no
    complement.
    """
    rest = complement_values(a, size_of(a) * (max(values_of(b), default=-1) + 1))
    if rest is None or min(values_of(b), default=0) < 0:
        return None
    return rest


def is_logical_product(a, b, r):
    offsets = product_values(a, b)
    if (
        offsets is None
        or not isinstance(r.shape, tuple)
        or len(r.shape) != 2
        or not refines(r.shape[1], b.shape)
    ):
        return False
    first, second = top_modes(r)
    return (
        values_of(first) == values_of(a)
        and refines(first.shape, a.shape)
        and values_of(second) == [offsets[y] for y in values_of(b)]
    )


def is_ranked_product(a, b, r, *, raked):
    """:func:`blocked_product` and :func:`raked_product`: mode i holds mode i of both, the copies
    outside or inside.
    """
    offsets = product_values(a, b)
    rank = max(len(top_modes(a)), len(top_modes(b)))
    if offsets is None or not isinstance(r.shape, tuple) or len(r.shape) != rank:
        return False

    def padded(layout):
        modes = [values_of(m) for m in top_modes(layout)]
        return [[0]] * (rank - len(modes)) + modes

    for block, copies, mode in zip(padded(a), padded(b), top_modes(r)):
        moved = [offsets[y] for y in copies]
        want = (
            [x + y for x in block for y in moved]
            if raked
            else [y + x for y in moved for x in block]
        )
        if values_of(mode) != want:
            return False
    # Right in each mode alone; together the modes add up their offsets, which must be the offsets
    # of the sums.
    return [offsets[y] for y in values_of(b)] == [
        sum(part) for part in product(*([offsets[y] for y in mode] for mode in padded(b)))
    ]


def is_by_mode(check, a, tiler, r):
    """Whether mode i of ``r`` is right for mode i of A and tiler i, and the modes without a tiler
    are A's.
    """
    modes, results = top_modes(a), top_modes(r)
    if len(modes) != len(results):
        return False
    pairs = zip(modes, [*tiler, *[None] * (len(modes) - len(tiler))], results)
    return all(values_of(m) == values_of(x) if t is None else check(m, t, x) for m, t, x in pairs)


def unzipped(r):
    """``((p0, p1, ...), (q0, q1, ...))`` as ``((p0, q0), (p1, q1), ...)``: a zipped result, mode by
    mode.
    """
    first, second = top_modes(r)
    return Found(tuple(zip(first.shape, second.shape)), tuple(zip(first.stride, second.stride)))
