"""Whatever is assigned is right: each device computes from the rows it has, and its results are the
rows they say, or contributions to them. Judged on numpy, device by device, by index arrays.
"""

import random
from functools import partial
from math import prod

import numpy as np
import pytest
from enumeration import devices, rows_after
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cute_sharding import plan_redistribution
from cute_sharding.propagation.signatures import Operand, Part, assign, received_for
from cute_sharding.relations.signature import parse

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)]
# (pattern, what one device computes, the operands of which it is linear)
PRODUCTS = [
    ("m k, k n -> m n", "ab,bc->ac", (0, 1)),
    ("b m k, b k n -> b m n", "zab,zbc->zac", (0, 1)),
    ("k, k ->", "a,a->", (0, 1)),
    ("m k, n k, m n -> k", "ab,cb,ac->b", ()),
    ("a b, b -> b a", "ab,b->ba", (0, 1)),
]
SIZES = {"z": 3, "a": 7, "b": 6, "c": 5}


def part_of(
    full: np.ndarray, parts: tuple[Part, ...], mesh: tuple[int, ...], device: tuple[int, ...]
) -> np.ndarray:
    """What a device holds of a tensor, by its cuts."""
    for d in range(full.ndim):
        chain = tuple(
            (part[1], n, k)
            for part, n, k in zip(parts, mesh, device)
            if isinstance(part, tuple) and part[0] == d
        )
        if chain:
            full = np.take(full, list(rows_after(full.shape[d], chain)), axis=d)
    return full


def contribution(full: np.ndarray, parts: tuple[Part, ...], device: tuple[int, ...]) -> np.ndarray:
    """Of a tensor whose sum is pending: all of it on the first device of those mesh dims, and
    nothing elsewhere.
    """
    return (
        full
        if all(k == 0 for part, k in zip(parts, device) if isinstance(part, str))
        else np.zeros_like(full)
    )


def assert_right(compute, fulls, expected, found, mesh):
    totals: dict = {}
    for device in devices(mesh):
        given = [
            part_of(contribution(full, parts, device), parts, mesh, device)
            for full, parts in zip(fulls, found.operands)
        ]
        [parts] = found.results
        pending = [m for m, part in enumerate(parts) if isinstance(part, str)]
        place = tuple(0 if m in pending else k for m, k in enumerate(device))
        totals[place] = totals.get(place, 0) + compute(*given)
    for place, total in totals.items():
        wanted = part_of(expected, found.results[0], mesh, place)
        assert np.array_equal(total, wanted), (found, place)


def draw_parts(rng, shape, mesh, *, pending=False):
    parts: list[Part] = []
    for _ in mesh:
        d = rng.randrange(-1, len(shape))
        parts.append(
            (d, rng.choice((1, 2, 3)))
            if d >= 0
            else "sum"
            if pending and rng.random() < 0.5
            else None
        )
    return tuple(parts)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_products_of_what_devices_hold(mesh):
    rng, numbers = random.Random(f"products {mesh}"), np.random.default_rng(0)
    received = 0
    for _ in range(40):
        pattern, equation, linear = rng.choice(PRODUCTS)
        inputs = equation.split("->")[0].split(",")
        shapes = [tuple(SIZES[letter] for letter in names) for names in inputs]
        fulls = [numbers.integers(-3, 4, shape) for shape in shapes]
        operands = [Operand(shape, draw_parts(rng, shape, mesh, pending=True)) for shape in shapes]
        found = assign(parse(pattern, tuple(map(len, shapes))), operands, mesh, linear=linear)
        assert_right(
            lambda *x, equation=equation: np.einsum(equation, *x),
            fulls,
            np.einsum(equation, *fulls),
            found,
            mesh,
        )
        received += found.received > 0
    assert received > 6


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 2, 2)], ids=str)
def test_something_else_is_cut_where_less_is_received_so(mesh):
    """Of products, and of ops that need all of a dim."""
    rng, numbers = random.Random(f"spare {mesh}"), np.random.default_rng(2)
    ops = [(pattern, equation, partial(np.einsum, equation)) for pattern, equation, _ in PRODUCTS]
    ops += [("a [b] -> a [b]", "ab", partial(np.cumsum, axis=1))]
    ops += [("[a] b -> [a] b", "ab", partial(np.cumsum, axis=0))]
    fewer = 0
    for _ in range(60):
        pattern, equation, compute = rng.choice(ops)
        shapes = [tuple(SIZES[x] for x in names) for names in equation.split("->")[0].split(",")]
        replicated = rng.sample(range(len(mesh)), rng.randint(0, len(mesh) - 1))
        operands = [
            Operand(shape, tuple(None if m in replicated else part for m, part in enumerate(parts)))
            for shape in shapes
            for parts in [draw_parts(rng, shape, mesh, pending=pattern != "[a] b -> [a] b")]
        ]
        signature = parse(pattern, tuple(map(len, shapes)))
        fulls = [numbers.integers(-3, 4, shape) for shape in shapes]
        own, found = (assign(signature, operands, mesh, spare=some) for some in (False, True))
        assert_right(compute, fulls, compute(*fulls), found, mesh)
        assert (found == own) if own.received == 0 else (found.received <= own.received)
        fewer += found.received < own.received
    assert fewer > 5


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_term_that_is_added_counts_once(mesh):
    rng, numbers = random.Random(f"terms {mesh}"), np.random.default_rng(1)
    pending = 0
    for _ in range(40):
        shapes = [rng.choice([(5,), (7, 5), (1, 5)]), (7, 6), (6, 5)]
        fulls = [numbers.integers(-3, 4, shape) for shape in shapes]
        operands = [Operand(shape, draw_parts(rng, shape, mesh)) for shape in shapes]
        names = ["m", "n"][2 - len(shapes[0]) :]
        found = assign(
            parse(f"+{' '.join(names)}, m k, k n -> m n", tuple(map(len, shapes))), operands, mesh
        )
        assert_right(lambda c, a, b: c + a @ b, fulls, fulls[0] + fulls[1] @ fulls[2], found, mesh)
        pending += any(isinstance(part, str) for part in found.results[0])
    assert pending > 3


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("reduce", "compute", "combine"), [("max", np.max, np.maximum), ("avg", np.mean, None)]
)
def test_reductions_that_are_right_for_some_blocks_alone(mesh, reduce, compute, combine):
    """An average stays pending over blocks of one size, a maximum over blocks that are not
    empty.
    """
    rng = random.Random(f"{reduce} {mesh}")
    kinds = set()
    for _ in range(60):
        n = rng.choice((1, 2, 3, 4, 6, 8, 12, 24, 25))
        full = np.array([rng.randrange(-1000, 1000) * 24 for _ in range(n)], dtype=float)
        found = assign(
            parse("a ->", (1,)), [Operand((n,), draw_parts(rng, (n,), mesh))], mesh, reduce=reduce
        )
        values = [
            compute(part_of(full, found.operands[0], mesh, device)) for device in devices(mesh)
        ]  # empty ones raise, or warn
        assert np.isclose(
            np.mean(values) if combine is None else combine.reduce(values), compute(full)
        )
        kinds.add(any(isinstance(part, str) for part in found.results[0]))
    assert kinds == {True, False}


def test_whole_dims_are_gathered_and_free_ones_kept():
    signature = parse("a [b] -> a [b]", (2,))
    assert assign(signature, [Operand((8, 6), ((0, 2),))], (2,)).results == (((0, 2),),)
    found = assign(signature, [Operand((8, 4), ((1, 2),))], (2,))
    assert found.results == ((None,),) and found.received == 16


@pytest.mark.parametrize("part", ["sum", "max", (0, 1), (0, 2), None])
def test_what_is_not_read_stays_as_it_is_and_decides_nothing(part):
    rows, unread = Operand((5, 6), ((0, 1),)), Operand((4, 9), (part,))
    found = assign(parse("a b, _ -> a b", (2, 2)), [rows, unread], (2,))
    assert found.operands == (rows.parts, unread.parts)
    assert found.results == (rows.parts,) and found.received == 0


def test_the_cheaper_operand_is_moved():
    signature = parse("m k, k n -> m n", (2, 2))
    wide, narrow = Operand((100, 6), ((1, 3),)), Operand((6, 2), ((0, 1),))
    assert assign(signature, [wide, narrow], (2,)).operands == (((1, 3),), ((0, 3),))
    assert assign(
        signature, [Operand((2, 6), ((1, 1),)), Operand((6, 100), ((0, 3),))], (2,)
    ).operands == (((1, 3),), ((0, 3),))


@pytest.mark.costly
def test_many_mesh_dims_are_decided_one_after_the_other():
    mesh = (2,) * 8
    shape = (2**8, 2**8)
    parts = tuple((m % 2, 1 + m) for m in range(8))
    found = assign(
        parse("a b, b c -> a c", (2, 2)), [Operand(shape, parts), Operand(shape, parts[::-1])], mesh
    )
    assert found.received < prod(shape)


_PLACED = {
    None: Replicate(),
    "sum": Partial(),
    **{(d, 1): Shard(d) for d in (0, 1)},
    (0, 2): _StridedShard(0, split_factor=2),
    (1, 3): _StridedShard(1, split_factor=3),
}


@pytest.mark.parametrize("mesh", [(4,), (16,), (2, 3), (8, 8), (16, 4)], ids=str)
def test_what_is_priced_is_what_runs(mesh):
    """An assignment's price is what the plan receives that `plan_redistribution` makes, which is
    the one that programs run: also where hosts or slow links make it another than the shortest.
    """
    rng, parts = random.Random(0), list(_PLACED)
    compared = 0
    while compared < 25:
        operand = Operand(
            (rng.choice([6, 64, 100]), rng.choice([5, 64])), tuple(rng.choices(parts, k=len(mesh)))
        )
        target = tuple(rng.choices(parts, k=len(mesh)))
        if any(b == "sum" != a for a, b in zip(operand.parts, target)):
            continue
        before, after = ([_PLACED[part] for part in cuts] for cuts in (operand.parts, target))
        plan = plan_redistribution(operand.shape, mesh, before, after)
        assert received_for(operand, target, mesh) == plan.received_elements, (operand, target)
        compared += 1


@pytest.mark.parametrize("part", [(1, 1), (0, 1), "sum", None], ids=str)
def test_of_what_only_sizes_are_read_nothing_is_received(part):
    rows, sized = Operand((4, 3), ((0, 1),)), Operand((4, 6), (part,))
    pool = parse("a [y], =a [x] -> a [x]", (2, 2))
    assert str(pool) == "a [y], =a [x] -> a [x]" and pool.sized == {1}
    found = assign(pool, [rows, sized], (2,))
    assert found.received == 0
    assert found.operands == (rows.parts, ((0, 1),)), "the sizes that it needs"
    assert found.results == (((0, 1),),)


def test_the_result_is_cut_as_the_operand_of_which_it_has_the_sizes():
    """It will meet that: to bring a small gradient there is less than a large one later."""
    small, large, sized = (
        Operand((4, n), (part,)) for n, part in ((3, (0, 1)), (9, (0, 1)), (6, (0, 2)))
    )
    pool = parse("a [y], =a [x] -> a [x]", (2, 2))
    assert assign(pool, [small, sized], (2,)).results == (((0, 2),),)
    assert assign(pool, [large, sized], (2,)).results == (((0, 1),),)


def test_windows_are_cut_where_they_are_whole():
    """Two windows on each of two devices; of three, one would be divided."""
    patches = parse("n c y*4, o c [k] -> n o y", (3, 3))
    weight = Operand((6, 3, 4), (None,))
    for factor in (1, 2):
        found = assign(patches, [Operand((1, 3, 16), ((2, factor),)), weight], (2,))
        assert found.received == 0
        assert found.results == (((2, factor),),)
    uneven = [Operand((1, 3, 12), ((2, 1),)), weight]  # windows of rows 0 to 7 and 8 to 11
    assert assign(patches, uneven, (2,)).results == (((2, 1),),)
    assert assign(patches, uneven, (2,)).received == 6  # rows 6 and 7 of three channels
    assert assign(patches, uneven, (2,), exchanges=False).results == ((None,),)
