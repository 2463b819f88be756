"""The signatures that follow from maps of rows: as they would be written by hand; and on numbers,
of which torch computes some rows.
"""

import random
from math import prod
from sys import maxsize

import pytest
import torch
from movements import DRAWN, SIZES, TOGETHER, draw

from cute_sharding.relations import Link, Move, Rows
from cute_sharding.relations.signature import LINEAR, Linear, parse
from cute_sharding.relations.table import SIGNATURES, TABLE
from cute_sharding.relations.table.names import ThisCall
from cute_sharding.relations.table.row import pattern_of_move
from cute_sharding.sharding.rows import Run

DERIVED = [row for row in TABLE if row.is_moved and row.signed]
ROWS = {name: row for row in DERIVED for name in row.signed}


def shape_of(rng, least):
    return tuple(rng.choice(SIZES[:6]) for _ in range(rng.randint(least, 4)))


def quarter(rng):
    x = shape_of(rng, 2)
    return x, rng.randint(-5, 5), rng.sample(range(-len(x), 0), 2)


def narrowed(rng):
    x = shape_of(rng, 1)
    d = rng.randrange(-len(x), len(x))
    start = rng.randint(0, x[d])
    return x, d, start, rng.randint(0, x[d] - start)


def two(rng):
    x = shape_of(rng, 0)
    n = max(len(x), 1)
    return x, rng.randrange(-n, n), rng.randrange(-n, n)


def order(rng):
    x = shape_of(rng, 0)
    return x, [d - rng.choice([0, len(x)]) for d in rng.sample(range(len(x)), len(x))]


def before(rng):
    x = shape_of(rng, 0)
    return x, rng.randint(-len(x) - 1, len(x))


def images(rng, *, of_channels=1, of_sizes=1):
    """Images, whose channels or sizes a factor divides."""
    x, factor = shape_of(rng, 3), rng.randint(1, 3)
    *batch, channels, height, width = x
    sizes = height * factor**of_sizes, width * factor**of_sizes
    return (*batch, channels * factor**of_channels, *sizes), factor


def in_groups(rng):
    images, channels, *sizes = shape_of(rng, 3)
    groups = rng.randint(1, 3)
    return (images, channels * groups, *sizes), groups


# How arguments are drawn: by the name of the row's op, or its overload.
OTHERS = {
    "pixel_shuffle.default": lambda rng: images(rng, of_channels=2, of_sizes=0),
    "pixel_unshuffle.default": lambda rng: images(rng, of_channels=0),
    "channel_shuffle.default": in_groups,
    "torch.rot90": quarter,
    "torch.narrow_copy": narrowed,
    "torch.transpose": two,
    "torch.permute": order,
    "torch.unsqueeze": before,
    "torch.t": lambda rng: (shape_of(rng, 0)[:2],),
    "torch.alias_copy": lambda rng: (shape_of(rng, 0),),
    "torch.view_as_real": lambda rng: (shape_of(rng, 0),),
    "torch.view_as_complex": lambda rng: ((*shape_of(rng, 1), 2),),
}
# Of slices, how many arguments come before those that say which.
WHOLE = {"slice.Tensor": 1, "slice_backward.default": 2}


def padded(name, rng):
    """Rows of the tensor before and after those of the last dims, or what comes of them."""
    n = int(name.partition("_pad")[2][0])
    x = tuple(rng.randint(1, 6) for _ in range(n + rng.choice([1, 2])))
    pads, longer = [], list(x)
    for d in range(1, n + 1):
        low, high = (rng.randint(0, x[-d] - 1) for _ in "ab")
        pads += [low, high]
        longer[-d] += low + high
    return (tuple(longer), x, pads) if "backward" in name else (x, pads)


def arguments(name, rng):
    op = ROWS[name].op or name
    if op in OTHERS:
        return OTHERS[op](rng)
    if "tion_pad" in name:
        return padded(name, rng)
    if op not in DRAWN:
        pytest.fail(
            f"{name}: say how its arguments are drawn, of a row of movement in DRAWN and DONE of "
            f"tests/movements.py for {op!r}, of others in OTHERS here"
        )
    case = draw(rng, ops=(op,))
    name = (*ROWS[name].overloads, name)[0]
    shapes, args = case.shapes, case.args
    if rng.random() < 0.2 and name in WHOLE:
        x = shapes[0] if name == "slice.Tensor" else args[0]
        return x, *args[: WHOLE[name]], 0, maxsize, 1
    return shapes if op in TOGETHER else shapes[0], *args


def values(name, args):
    """Numbers for the tensors among the arguments, of which each is another; and the rest."""
    first, *rest = args
    several = first if isinstance(first, list) else [first]
    if "pad" in name and "backward" in name:  # the second operand's size is all that counts
        rest[0] = torch.zeros(rest[0], dtype=torch.double)
    given = [torch.randperm(prod(x)).reshape(x).double() for x in several]
    if "view_as_real" in name:
        given = [torch.complex(x, 1 - 2 * x) for x in given]
    return given, rest


def called(name, tensors, rest, *, together):
    op = getattr(torch.ops.aten, name.partition(".")[0])
    result = getattr(op, name.partition(".")[2])(tensors if together else tensors[0], *rest)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def signature_of(name, args):
    shapes = args[0] if isinstance(args[0], list) else [args[0]]
    if "pad" in name and "backward" in name:
        shapes = [*shapes, args[1]]
    pattern = ROWS[name].pattern(*args)
    if pattern is None or not shapes[0]:  # a scalar has no pattern
        return None
    return parse(pattern, tuple(map(len, shapes)), 1)


def with_rows(x, names, name, rows):
    return x.index_select(names.index(name), rows) if name in names else x


LATER = ThisCall(0)  # a number that another call may have otherwise
X = (4, 5, 6)
AS_WRITTEN = [
    ("slice.Tensor", (X, 1, 0, 3), "d0 [d1] d2 -> d0 [to1] d2"),
    ("slice.Tensor", (X, 1, None, None, 2), "d0 [d1] d2 -> d0 [to1] d2"),
    ("slice.Tensor", (X, 1), "d0 d1 d2 -> d0 d1 d2"),
    ("slice.Tensor", (X, -2, 0, maxsize), "d0 d1 d2 -> d0 d1 d2"),
    ("slice.Tensor", (X, 1, 0, 5), "d0 [d1] d2 -> d0 [to1] d2"),  # another may have six
    ("slice.Tensor", (X, 1, LATER, maxsize), "d0 [d1] d2 -> d0 [to1] d2"),
    ("slice_backward.default", (X, [4, 9, 6], 1, 2, 7, 1), "d0 [d1] d2 -> d0 [to1] d2"),
    ("slice_backward.default", (X, X, 1, 0, maxsize, 1), "d0 d1 d2 -> d0 d1 d2"),
    ("slice_backward.default", (X, X, 1, LATER, maxsize, 1), "d0 [d1] d2 -> d0 [to1] d2"),
    ("select.int", (X, 1, 2), "d0 [d1] d2 -> d0 d2"),
    ("select_backward.default", (X, [4, 5, 2, 6], 2, 1), "d0 d1 d2 -> d0 d1 [to2] d2"),
    ("unbind.int", (X, -1), "d0 d1 [d2] -> d0 d1"),
    ("unbind_copy.int", (X,), "[d0] d1 d2 -> d1 d2"),
    ("unbind.int", ((0, 5),), "... ->"),
    ("split.Tensor", (X, 3, 1), "d0 [d1] d2 -> d0 [to1] d2"),
    ("split.Tensor", ((0, 5), 0), "[d0] d1 -> [to0] d1"),
    ("unsafe_split.Tensor", (X, 9, 1), "d0 [d1] d2 -> d0 [to1] d2"),
    ("split_with_sizes_copy.default", (X, [3, 2], 1), "d0 [d1] d2 -> d0 [to1] d2"),
    ("cat.default", ([(4, 5), (4, 2)], 1), "d0 [d1], d0 [d1] -> d0 [to1]"),
    ("cat.default", ([(4, 5)], -1), "d0 [d1] -> d0 [to1]"),
    ("cat.default", ([(4, 5), (0,)],), "[d0] d1, [d0] -> [to0] d1"),  # it is left out
    ("cat.default", ([(4, 5), (3,)],), None),
    ("block_diag.default", ([(4, 5), (2, 3)],), "[d0] [d1], [d0] [d1] -> [to0] [to1]"),
    ("roll.default", (X, [1, 0], [0, 2]), "[d0] d1 [d2] -> [to0] d1 [to2]"),
    ("roll.default", (X, [3]), "[...] -> [...]"),
    ("flip.default", (X, [0, -1]), "[d0] d1 [d2] -> [to0] d1 [to2]"),
    ("flip.default", ((4, 1), [1]), "d0 [d1] -> d0 [to1]"),
    ("constant_pad_nd.default", (X, [0, 0, 1, -1]), "d0 [d1] d2 -> d0 [to1] d2"),
    ("constant_pad_nd.default", (X, [LATER, 0, 1, 1]), "d0 [d1] [d2] -> d0 [to1] [to2]"),
    ("tril.default", (X, 1), "d0 [d1] [d2] -> d0 [to1] [to2]"),
    ("triu.default", ((4, 5), -1), "[d0] [d1] -> [to0] [to1]"),
    ("reflection_pad1d.default", (X, [0, 0]), "d0 d1 [d2] -> d0 d1 [to2]"),
    ("replication_pad2d.default", (X, [1, 0, 0, 1]), "d0 [d1] [d2] -> d0 [to1] [to2]"),
    (
        "reflection_pad1d_backward.default",
        ((4, 5, 8), X, [1, 1]),
        "d0 d1 [d2], =d0 d1 [to2] -> d0 d1 [to2]",
    ),
    ("diagonal.default", (X, 0, 0, 2), "[d0] d1 [d2] -> d1 [to1]"),
    ("diag_embed.default", (X,), "d0 d1 [d2] -> d0 d1 [to2] [to3]"),
    ("diag_embed.default", (X, 1, 0, -2), "d0 d1 [d2] -> [to0] d0 [to2] d1"),
    ("rot90.default", (X, 1, [0, 2]), "d0 d1 [d2] -> [to0] d1 d0"),
    ("rot90.default", (X, 2, [0, 2]), "[d0] d1 [d2] -> [to0] d1 [to2]"),
    ("rot90.default", (X, 3, [0, 2]), "[d0] d1 d2 -> d2 d1 [to2]"),
    ("rot90.default", (X, -4, [0, 2]), "d0 d1 d2 -> d0 d1 d2"),
    ("narrow_copy.default", (X, 1, 0, 5), "d0 [d1] d2 -> d0 [to1] d2"),
    ("t.default", ((4, 5),), "d0 d1 -> d1 d0"),
    ("t_copy.default", ((4,),), "d0 -> d0"),
    ("alias_copy.default", (X,), "d0 d1 d2 -> d0 d1 d2"),
    ("transpose_copy.int", (X, 0, -1), "d0 d1 d2 -> d2 d1 d0"),
    ("permute_copy.default", (X, [1, -1, 0]), "d0 d1 d2 -> d1 d2 d0"),
    ("unsqueeze_copy.default", (X, -2), "d0 d1 d2 -> d0 d1 [to2] d2"),
    ("pixel_shuffle.default", ((2, 8, 3, 4), 2), "d0 [d1] [d2] [d3] -> d0 [to1] [to2] [to3]"),
    ("pixel_shuffle.default", ((2, 8, 3, 4), 3), None),
    ("pixel_unshuffle.default", ((8, 4, 6), 2), "[d0] [d1] [d2] -> [to0] [to1] [to2]"),
    ("channel_shuffle.default", ((2, 8, 3, 4), 2), "d0 [d1] d2 d3 -> d0 [to1] d2 d3"),
    ("view_as_real_copy.default", ((4, 5),), "d0 d1 -> d0 d1 [to2]"),
    ("view_as_real_copy.default", ((),), "... -> [to0]"),
    ("view_as_complex_copy.default", ((4, 5, 2),), "d0 d1 [d2] -> d0 d1"),
    ("unfold.default", (X, 1, 2, 3), "d0 [d1] d2 -> d0 [to1] d2 [to3]"),
    ("unfold_backward.default", ((1, 17, 8), (1, 40), 1, 8, 2), "d0 [d1] [d2] -> d0 [to1]"),
    ("unfold_copy.default", (X, 1, 2, 3), "d0 [d1] d2 -> d0 [to1] d2 [to3]"),
    ("select.int", (X, 3, 0), None),  # torch says what is wrong
]


@pytest.mark.parametrize(
    ("name", "args", "pattern"), AS_WRITTEN, ids=[f"{name}-{args}" for name, args, _ in AS_WRITTEN]
)
def test_they_are_as_one_would_write_them(name, args, pattern):
    assert ROWS[name].pattern(*args) == pattern


def test_every_row_is_written_here():
    written = {name for name, _, _ in AS_WRITTEN}
    for row in DERIVED:
        if "tion_pad" not in row.signed[0]:
            assert written & {*row.signed}, row.signed


def test_no_overload_has_two_rows():
    every = [name for row in TABLE for name in (*row.overloads, *row.by_names)]
    assert len({*every}) == len(every) and {*SIGNATURES} <= {*every}


# How contributions of two devices are combined.
COMBINED = {
    "sum": torch.add,
    "avg": lambda a, b: (a + b) / 2,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combines(name, args, reduce):
    """Whether the op on combined operands gives its combined results."""
    (some, rest), (others, _) = values(name, args), values(name, args)
    both = [COMBINED[reduce](a, b) for a, b in zip(some, others)]
    found, *of_each = (
        called(name, given, rest, together=isinstance(args[0], list))
        for given in (both, some, others)
    )
    return all(map(torch.equal, found, map(COMBINED[reduce], *of_each)))


@pytest.mark.parametrize("name", ROWS)
def test_what_may_stay_pending(name):
    """Of elements that are combined the op makes what its results are combined to."""
    rng, found = random.Random(name), set()
    for _ in range(10):
        args = arguments(name, rng)
        linear = ROWS[name].commuting(*args)
        kept = linear.kept if isinstance(linear, Linear) else LINEAR if 0 in linear else ()
        for reduce in {*kept} & COMBINED.keys():
            assert combines(name, args, reduce), (reduce, args)
            found.add(reduce)
    assert ("sum" in found) == bool(ROWS[name].linear)


@pytest.mark.parametrize("op", ["view_as_real", "view_as_complex"])
def test_products_of_numbers_that_are_read_in_another_way_are_not_pending(op):
    name = f"{op}_copy.default"
    rng = random.Random(op)
    assert not all(combines(name, arguments(name, rng), "product") for _ in range(10))
    assert ROWS[name].may_stay("sum") and not ROWS[name].may_stay("max")


def test_what_may_be_empty():
    for name, row in ROWS.items():
        assert row.filled == ("tion_pad" in name or "pixel" in name)


def test_a_dim_of_a_result_is_whole_where_one_operand_has_other_rows():
    plain = Rows(0), Rows(0)
    some = Rows(0, (Run(0, 2, (), 2),)), Rows(0)
    links = (Link(0, 0, (plain,)), Link(1, 0, (some,)))
    move = Move(((2,), (4,)), ((2,),), links, adds=True)
    assert pattern_of_move(move) == "[d0], [d0] -> [d0]"


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_free_dims_are_computed_of_the_same_rows(name):
    """Of some rows of a dim that has a name the op makes the same rows of its results."""
    rng = random.Random(name)
    names_seen = named = 0
    for _ in range(150):
        args = arguments(name, rng)
        signature = signature_of(name, args)
        if signature is None:
            continue
        given, rest = values(name, args)
        together = isinstance(args[0], list)
        expected = called(name, given, rest, together=together)
        frees = {*signature.operands[0]} - signature.whole
        named += bool(frees)
        for free in frees:
            n = given[0].shape[signature.operands[0].index(free)]
            rows = torch.tensor(sorted(rng.sample(range(n), rng.randint(min(n, 1), n))))
            rows = rows.to(torch.int64)
            if ROWS[name].filled and not n:
                continue
            some = [with_rows(x, d, free, rows) for x, d in zip(given, signature.operands)]
            of_some = told(name, rest, signature, free, rows)
            found = called(name, some, of_some, together=together)
            (names,) = signature.results
            assert len(found) == len(expected) and free in names
            for x, whole in zip(found, expected):
                assert torch.equal(x, with_rows(whole, names, free, rows)), (args, signature)
            names_seen += 1
    assert names_seen > 20 or not named


def told(name, rest, signature, free, rows):
    """The op's other arguments: sizes, and what sizes are read of, are those of some rows."""
    first, *others = rest or [None]
    if name in ("slice_backward.default", "select_backward.default", "unfold_backward.default"):
        sizes = list(first)
        sizes[signature.results[0].index(free)] = len(rows)
        return [sizes, *others]
    if isinstance(first, torch.Tensor):
        return [with_rows(first, signature.operands[1], free, rows), *others]
    return rest
