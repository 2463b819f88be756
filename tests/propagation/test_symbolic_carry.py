"""Carrying of sizes that are not numbers: what is answered under recorded facts is right for all
numbers that satisfy them, by counting out who holds what.
"""

import random
from collections import Counter
from math import prod

import numpy as np
import pytest
import sympy
from enumeration import devices, rows_of

from cute_sharding.layout import Size, Undecided, asking, assuming, symbol
from cute_sharding.layout.size import expression
from cute_sharding.propagation.views import carry
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import View

NAMES = "stu"
SYMBOLS = [symbol(name) for name in NAMES]
s, t, u = map(Size, SYMBOLS)

# Elements of a tensor that is counted out, device by device.
MOST_ELEMENTS = 1500

# Recorded of one case.
MOST_FACTS = 5
LONGEST_FACT = 80


def at(value, numbers):
    """``value``, with its sizes as they are where the symbols are ``numbers``."""
    if isinstance(value, (tuple, list)):
        return tuple(at(item, numbers) for item in value)
    if isinstance(value, Size):
        value = value.expr
    if isinstance(value, sympy.Basic):
        value = value.xreplace(dict(zip(SYMBOLS, map(sympy.Integer, numbers))))
        assert value.is_Integer, f"{value} is no integer at {numbers}"
        return int(value)
    return value


def is_true(fact, numbers):
    return fact.is_true_of(*at((fact.left, fact.right), numbers))


class Hints:
    """An oracle that knows one case, and has enough after a few facts, or one that is too long:
    proofs from those are slow.
    """

    def __init__(self, numbers):
        self.numbers = numbers
        self.facts = []
        self.enough = False

    def holds(self, fact):
        self.enough |= len(self.facts) == MOST_FACTS or len(str(fact)) > LONGEST_FACT
        return None if self.enough else is_true(fact, self.numbers)

    def assume(self, fact):
        assert is_true(fact, self.numbers), f"{fact} does not hold at {self.numbers}"
        self.facts.append(fact)


# -- what views there are --------------------------------------------------------------------------


def permuted_reshape(shape, order, target):
    """``x.permute(order).reshape(target)`` as one view."""
    return View(shape, order, [shape[d] for d in order], target, {})


def view(shape, op, *args):
    return (
        permuted_reshape(shape, *args) if op == "permuted reshape" else BY_OP[op].view(shape, *args)
    )


def grouped(rng, parts, dims=4):
    """The products of neighbours among ``parts``, so that they are at most ``dims``."""
    ends = sorted(rng.sample(range(1, len(parts)), min(rng.randint(0, dims - 1), len(parts) - 1)))
    return tuple(prod(parts[i:j]) for i, j in zip([0, *ends], [*ends, len(parts)]))


def a_size(rng):
    return rng.choice((s, s, t, t, u, 2 * s, 4 * t, 6 * u, s * t, s + 1, 1, 2, 3, 4, 6))


def draw_flatten(rng):
    shape = tuple(a_size(rng) for _ in range(rng.randint(2, 4)))
    start = rng.randrange(len(shape) - 1)
    return shape, "torch.flatten", start, rng.randrange(start + 1, len(shape))


def draw_unflatten(rng):
    factor = rng.choice((2, 3, 4, 8, s, t))
    n = rng.choice((s, 12 * t, s * t, s * u, factor * s, factor * u))
    shape = (a_size(rng), n, a_size(rng))
    sizes = rng.choice(
        ((factor, -1), (-1, factor), (factor, n // factor), (n // factor, factor), (2, factor, -1))
    )
    return shape, "torch.unflatten", 1, sizes


def draw_heads(rng):
    batch, length, heads, width = s, t, rng.choice((2, 4, 8, u)), rng.choice((u, 2, 3, 4))
    split = (batch, length, heads, width)
    merged = (batch, length, heads * width)
    return rng.choice(
        (
            (merged, "Tensor.view", split),
            (merged, "Tensor.view", (batch, length, heads, -1)),
            ((batch, length, u), "Tensor.view", (batch, length, heads, -1)),
            ((batch, length, u), "Tensor.view", (batch, -1, heads, u // heads)),
            (split, "Tensor.view", merged),
            (split, "Tensor.view", (batch * length, -1)),
            (split, "Tensor.view", (-1, heads, width)),
            ((batch, heads, length, width), "permuted reshape", (0, 2, 1, 3), merged),
            (
                (batch, heads, length, width),
                "permuted reshape",
                (0, 2, 1, 3),
                (batch * length, heads * width),
            ),
            (merged, "Tensor.view", (batch, length * heads, width)),
        )
    )


def draw_inferred(rng):
    shape = tuple(a_size(rng) for _ in range(rng.randint(1, 4)))
    target = [rng.choice((*shape, *shape, 2, 3, 4, 1)) for _ in range(rng.randint(0, 3))]
    target.insert(rng.randint(0, len(target)), -1)
    return shape, "Tensor.view", tuple(target)


def draw_permuted(rng):
    shape = tuple(a_size(rng) for _ in range(rng.randint(2, 4)))
    order = rng.sample(range(len(shape)), len(shape))
    return shape, "permuted reshape", tuple(order), grouped(rng, [shape[d] for d in order])


def draw_repeat(rng):
    shape = tuple(a_size(rng) for _ in range(rng.randint(1, 3)))
    times = tuple(rng.choice((1, 1, 2, 3, u)) for _ in shape)
    return shape, "Tensor.repeat", rng.choice((times, (2, *times), (t, *times)))


def draw_expand(rng):
    shape = tuple(rng.choice((1, 1, s, t, 2 * s, 3)) for _ in range(rng.randint(1, 3)))
    sizes = tuple(
        rng.choice((2, 3, u, s)) if type(n) is int and n == 1 else rng.choice((n, -1))
        for n in shape
    )
    return shape, "Tensor.expand", rng.choice((sizes, (2, *sizes), (u, *sizes)))


def draw_squeeze(rng):
    shape = tuple(
        rng.choice((s, t, 1, 2, (s + 3) // 4, t // 2 + 1)) for _ in range(rng.randint(1, 4))
    )
    return shape, "torch.squeeze", *rng.choice(((), (rng.randrange(len(shape)),)))


def draw_regrouped(rng):
    parts = [rng.choice((s, s, t, t, u, 2, 2, 3, 4, 6)) for _ in range(rng.randint(2, 5))]
    target = list(parts)
    if rng.random() < 0.6:
        i, factor = rng.randrange(len(target)), rng.choice((2, 2, 2, 3, 4))
        target[i : i + 1] = rng.choice(
            ((target[i] // factor, factor), (factor, target[i] // factor))
        )
    if rng.random() < 0.4:
        rng.shuffle(target)
    return grouped(rng, parts), "Tensor.view", grouped(rng, target)


DRAWN = (
    draw_flatten,
    draw_unflatten,
    draw_heads,
    draw_inferred,
    draw_permuted,
    draw_repeat,
    draw_expand,
    draw_squeeze,
    draw_regrouped,
)


def draw_cuts(rng, shape, mesh):
    """Most split factors are numbers; some are sizes, as flattening makes them."""

    def cut():
        dim = rng.randrange(-1, len(shape))
        return (
            None
            if dim < 0
            else (dim, rng.choice((1, 1, 1, 1, 2, 2, 3, 4, shape[dim], rng.choice((*shape, s, t)))))
        )

    return tuple(cut() for _ in mesh)


def elements(shape, numbers):
    return prod(at(shape, numbers))


def draw_numbers(rng, least, even):
    return tuple(rng.choice((4, 6, 8, 12, 12) if even else range(least, 10)) for _ in NAMES)


def others(rng, oracle, least, shapes, count):
    """Numbers that satisfy what was recorded, those of the oracle first; many near them, for facts
    may leave little room.
    """
    found = {oracle.numbers: None}
    for _ in range(80):
        if len(found) > count:
            break
        numbers = tuple(
            rng.choice((n, n, 2 * n, n + 1, 1, rng.randint(1, 12), rng.choice((4, 6, 8, 12))))
            for n in oracle.numbers
        )
        if (
            min(numbers) >= least
            and all(is_true(fact, numbers) for fact in oracle.facts)
            and all(elements(shape, numbers) <= MOST_ELEMENTS for shape in shapes)
        ):
            found[numbers] = None
    return list(found)


# -- who holds what --------------------------------------------------------------------------------


def reads_of(view):
    """The flat input index that each output element reads."""
    strides = [prod(view.input_shape[dim + 1 :]) for dim in range(len(view.input_shape))]
    steps = [0 if dim is None else strides[dim] for dim in view.source]
    return sum(
        (step * index for step, index in zip(steps, np.indices(view.sizes))),
        np.zeros(tuple(view.sizes), int),
    ).reshape(-1)


def mask(shape, mesh, cuts, device):
    found = np.zeros(shape, bool)
    found[np.ix_(*rows_of(shape, mesh, cuts, device))] = True
    return found.reshape(-1)


def deal_alike(view, mesh, before, after):
    """Whether each device's output, cut as ``after``, is what reads the elements that it holds of
    the input, cut as ``before``.
    """
    reads = reads_of(view)
    return all(
        (
            mask(tuple(view.input_shape), mesh, before, d)[reads]
            == mask(tuple(view.target), mesh, after, d)
        ).all()
        for d in devices(mesh)
    )


# -- the property ----------------------------------------------------------------------------------


def check(rng, drawn, counts):
    """One drawn view, and maybe one after it, under hints: its answers against those for numbers,
    at the hints and elsewhere.
    """
    least, even = rng.choice((1, 1, 2)), rng.random() < 0.6
    mesh = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    shape, *op = drawn(rng)
    cuts = draw_cuts(rng, shape, mesh)
    numbers = draw_numbers(rng, least, even)
    while elements(shape, numbers) > MOST_ELEMENTS and max(numbers) > least:
        numbers = tuple(max(least, n // 2) for n in numbers)
    oracle = Hints(numbers)
    steps = []  # (shape, op, cuts, target, carried)
    with assuming(*(f"{name} >= {least}" for name in NAMES)), asking(oracle):
        try:
            first = view(shape, *op)
            target = tuple(first.target)
            steps.append((shape, op, cuts, target, carry(first, cuts, mesh)))
            if steps[0][-1].blocked is None and rng.random() < 0.4:
                # Back to where it came from, which must be able to read what was made, or all in
                # one.
                back = (
                    "Tensor.view",
                    rng.choice((shape, (-1,)))
                    if op[0] in ("Tensor.view", "torch.flatten", "torch.unflatten")
                    else (-1,),
                )
                second = view(target, *back)
                steps.append(
                    (
                        target,
                        back,
                        steps[0][-1].cuts,
                        tuple(second.target),
                        carry(second, steps[0][-1].cuts, mesh),
                    )
                )
        except Undecided:
            assert oracle.enough
            counts["given up"] += 1
            return
        except ValueError:
            with pytest.raises(ValueError):  # no such view of these numbers
                view(at(shape, numbers), *at(op, numbers))
            counts["no view"] += 1
            return
        answers = [
            tuple(None if cut is None else (cut[0], expression(cut[1])) for cut in carried.cuts)
            for *_, carried in steps
        ]
    counts["with facts"] += bool(oracle.facts)
    for numbers in others(rng, oracle, least, [shape, target], 8):
        counts["numbers"] += 1
        for step, answer in zip(steps, answers):
            check_at(numbers, oracle, mesh, step, answer, counts)


def check_at(numbers, oracle, mesh, step, answer, counts):
    shape, op, cuts, target, carried = step
    known, before, after = (
        view(at(shape, numbers), *at(op, numbers)),
        at(cuts, numbers),
        at(answer, numbers),
    )
    expected = carry(known, before, mesh)
    said = (
        f"{op} of {shape} cut as {cuts} on mesh {mesh}: {carried} under "
        f"{list(map(str, oracle.facts))}, hints {oracle.numbers}; at {numbers}: {expected}"
    )
    if at(target, numbers) != tuple(known.target):
        # squeeze of a dim that is 1 here and not there: whoever makes the output checks its shape.
        assert op[0] == "torch.squeeze" and numbers != oracle.numbers, said
        return
    assert expected.blocked == carried.blocked, said
    assert deal_alike(known, mesh[: len(after)], before[: len(after)], after), said
    if numbers == oracle.numbers:
        counts["carried" if carried.blocked is None else "blocked"] += 1
        counts["other form"] += after != expected.cuts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drawn", DRAWN, ids=lambda f: f.__name__.removeprefix("draw_"))
def test_what_is_carried_of_sizes_is_right_for_all_numbers(drawn, share):
    counts = Counter()
    seeds = share(20, 2)
    for seed in range(seeds):
        check(random.Random(f"{drawn.__name__} {seed}"), drawn, counts)
    print(f"\n{drawn.__name__}: {dict(counts)}")
    assert counts["given up"] <= 3, counts
    assert counts["carried"] >= 10 / 20 * seeds and counts["numbers"] >= 83 / 20 * seeds, counts


# -- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "op", "cuts", "mesh", "expected", "facts"),
    [
        (
            (s, t, u),
            ("torch.flatten",),
            [(1, 1)],
            [2],
            [(0, s)],
            ["t % 2 == 0"],
        ),  # or halves of rows would be dealt
        ((s, t, u), ("torch.flatten", 0, 1), [(1, 1)], [4], [(0, s)], []),
        ((s, t, u), ("torch.flatten", 0, 1), [(0, 1)], [4], [(0, 1)], ["s % 4 == 0"]),
        (
            (s, t, u),
            ("torch.flatten", 0, 1),
            [(0, 1), (0, 1)],
            [2, 3],
            [(0, 1), (0, 1)],
            ["s % 2 == 0", "s > 2", "s % 6 == 0"],
        ),
        ((s, t, u), ("torch.flatten", 0, 1), [(2, 1)], [4], [(1, 1)], []),
        (
            (s, t, u),
            ("torch.flatten", 0, 1),
            [(0, 1), (1, 1)],
            [4, 2],
            [(0, 1), (0, s // 4)],
            ["s % 4 == 0"],
        ),
        ((s, t, 8 * u), ("Tensor.view", (s, t, 8, u)), [(2, 1)], [4], [(2, 1)], []),
        ((s, t, u), ("Tensor.view", (s, t, 8, -1)), [(2, 1)], [4], [(2, 1)], ["u % 8 == 0"]),
        ((s, t, u), ("Tensor.view", (s, t, 8, -1)), [(0, 1)], [4], [(0, 1)], ["u % 8 == 0"]),
        ((s, t, u), ("Tensor.view", (s, t, 8, -1)), [(1, 1)], [4], [(1, 1)], ["u % 8 == 0"]),
        ((s, t, 8, u), ("Tensor.view", (s, t, 8 * u)), [(2, 1)], [4], [(2, 1)], []),
        (
            (s, 8, t, u),
            ("permuted reshape", (0, 2, 1, 3), (s, t, 8 * u)),
            [(1, 1)],
            [4],
            [(2, 1)],
            [],
        ),
        ((s * t, u), ("Tensor.view", (s, t, u)), [(0, 1)], [4], [(0, 1)], ["s % 4 == 0"]),
        ((s * t, u), ("Tensor.view", (s, t, u)), [(0, s)], [4], [(1, 1)], []),
        ((s, t), ("Tensor.repeat", (3, 1)), [(0, 1)], [4], [(0, 3)], []),
        ((1, t), ("Tensor.expand", (s, -1)), [(1, 1)], [4], [(1, 1)], []),
    ],
    ids=str,
)
def test_the_weakest_facts_are_recorded(shape, op, cuts, mesh, expected, facts):
    """Sizes of at least 2, as a compiler makes symbols of."""
    oracle = Hints((24, 24, 24))
    with assuming(*(f"{name} >= 2" for name in NAMES)), asking(oracle):
        carried = carry(view(shape, *op), cuts, mesh)
        assert carried.blocked is None
        assert [(dim, expression(factor)) for dim, factor in carried.cuts] == [
            (dim, expression(factor)) for dim, factor in expected
        ]
    assert [str(fact) for fact in oracle.facts] == facts
