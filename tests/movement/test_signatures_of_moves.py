"""The signatures that follow from maps of rows, beside those that were written by hand."""

import random
from sys import maxsize

import pytest
from movements import SIZES, TOGETHER, draw

from cute_sharding.movement.signatures import DERIVED
from cute_sharding.movement.table import BY_OVERLOAD as MOVES
from cute_sharding.ops import parse
from cute_sharding.ops.signature import ONE
from cute_sharding.ops.table import BY_OVERLOAD as WRITTEN

ROWS = {name: row for row in DERIVED for name in row.overloads}


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


OTHERS = {
    "rot90.default": quarter,
    "narrow_copy.default": narrowed,
    "transpose_copy.int": two,
    "permute_copy.default": order,
    "unsqueeze_copy.default": before,
    "t.default": lambda rng: (shape_of(rng, 0)[:2],),
}
ALIKE = {
    "unbind_copy.int": "unbind.int",
    "unsafe_split.Tensor": "split.Tensor",
    "unsafe_split_with_sizes.default": "split_with_sizes.default",
    "diagonal_copy.default": "diagonal.default",
    "t_copy.default": "t.default",
}


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
    name = ALIKE.get(name, name)
    if name in OTHERS:
        return OTHERS[name](rng)
    if "tion_pad" in name:
        return padded(name, rng)
    op = MOVES[name].op
    case = draw(rng, ops=(op,))
    args = case.args
    if rng.random() < 0.2:
        if name == "flip.default":
            return (), [0]
        if name == "roll.default":
            x = case.shapes[0]
            return x, [3], []
        if name in ("slice.Tensor", "slice_backward.default"):
            whole = rng.choice([(None, None), (0, maxsize), (0, None), (None, maxsize, 1)])
            head = args[:1] if name == "slice.Tensor" else args[:2]
            x = case.shapes[0] if name == "slice.Tensor" else args[0]
            return x, *head, *whole, *((1,) if len(whole) == 2 else ())
    if op in TOGETHER:
        return case.shapes, *args
    if op.endswith("gradient") and "pad" in op:
        return case.shapes[0], *args
    return case.shapes[0], *args


def tensors(args):
    first, *rest = args
    return first if isinstance(first, list) else [first]


def said(pattern, ndims, results):
    """Of each dim whether it is whole, and else the first dim of its name."""
    signature = parse(pattern, ndims, results)
    first = {}
    whole = signature.whole | {ONE}

    def of(names, made):
        return tuple(
            "whole"
            if name in whole or (made and name not in given)
            else first.setdefault(name, len(first))
            for name in names
        )

    given = {name for names in signature.operands for name in names}
    return (
        [of(names, False) for names in signature.operands],
        [of(names, True) for names in signature.results],
        signature.added,
        signature.unread,
        signature.sized,
        signature.picked,
        signature.windows,
    )


@pytest.mark.parametrize("name", ROWS)
def test_they_are_as_written(name):
    rng = random.Random(name)
    differ, count = [], 0
    for _ in range(300):
        args = arguments(name, rng)
        row, written = ROWS[name], WRITTEN[name]
        found, expected = row.pattern(*args), written.pattern(*args)
        ndims = [len(x) for x in tensors(args)]
        if "pad" in name and "backward" in name:
            ndims.append(len(args[1]))
        if found is None or expected is None or not ndims[0]:  # scalars have no pattern
            if found != expected and ndims[0]:
                differ.append((args, found, expected))
            continue
        count += 1
        outs = 2 if "split" in name or "unbind" in name else 1
        outs = max(outs, len(found.partition("->")[2].split(",")))
        if said(found, tuple(ndims), outs) != said(expected, tuple(ndims), outs):
            differ.append((args, found, expected))
        assert row.has_rows(*args) == written.has_rows(*args)
    assert (row.linear, row.empty, row.shares) == (written.linear, written.empty, written.shares)
    print(name, count, len(differ))
    assert not differ, (len(differ), count, *differ[:3])
