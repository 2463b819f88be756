"""Layouts in positive integer symbols: what is decidable is decided, never wrongly. (What Undecided
asks for: test_layout_facts.py.)

The random tests substitute numbers that satisfy the facts into a symbolic result and judge it by
the brute-force definitions.
"""

import random
from itertools import product

import pytest
import sympy
from layout_bruteforce import (
    complement_values,
    composition_exists,
    is_composition,
    is_left_inverse,
    is_right_inverse,
    leaves_of,
    nest,
    same_function,
    size_of,
    values_of,
)
from layout_symbols import NAMES, holds, right_complement, s, settle, substituted, t, u

from cute_sharding.layout import (
    Layout,
    LayoutError,
    Undecided,
    blocked_product,
    coalesce,
    complement,
    composition,
    left_inverse,
    logical_divide,
    logical_product,
    make_layout,
    raked_product,
    right_inverse,
    symbol,
    zipped_divide,
)

# -- random symbolic layouts -----------------------------------------------------------------------

SIZES = (1, 2, 3, 4, 6, s, s, t, 2 * s, 3 * s, s * t, s + 1)

STRIDES = (0, 1, 1, 2, 3, 4, 6, s, t, 2 * s, s * t, u)


def random_layout(rng):
    """Two times in three sizes stacked up, now and then with a gap; else any strides."""
    stacked = rng.random() < 0.67
    leaves, current = [], 1
    for _ in range(rng.randint(1, 3)):
        n = rng.choice(SIZES)
        if stacked and rng.random() < 0.25:
            current = current * rng.choice((2, 3, s, t, u))
        leaves.append((n, current if stacked else rng.choice(STRIDES)))
        current = current * n
    if rng.random() < 0.6:
        leaves.reverse()
    else:
        rng.shuffle(leaves)
    return nest(rng, leaves)


def is_product(a, b, found):
    """The copies of A are where B's values stand in A's complement."""
    offsets = complement_values(a, size_of(a) * (1 + max(values_of(b))))
    return values_of(found) == [x + offsets[y] for x in values_of(a) for y in values_of(b)]


def right_divide(a, b, found):
    if any(n == 1 for n, _ in (*leaves_of(a), *leaves_of(b))):
        return values_of(found[0]) == values_of(composition(a, b))
    return is_composition(a, make_layout(b, complement(b, size_of(a))), found)


CHECKS = {
    composition: (2, is_composition),
    coalesce: (1, lambda a, found: same_function(a, found)),
    complement: (1, right_complement),
    logical_divide: (2, right_divide),
    logical_product: (2, is_product),
    right_inverse: (1, is_right_inverse),
    left_inverse: (1, is_left_inverse),
}

NUMBERS = list(product((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 4, 12)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("operation", CHECKS, ids=lambda f: f.__name__)
def test_random_symbolic_answers_hold_for_the_numbers(operation):
    rng = random.Random(f"symbolic {operation.__name__}")
    arguments, is_right = CHECKS[operation]
    answered = with_facts = refused = checked = 0
    for _ in range(25 if operation in (logical_divide, logical_product) else 40):
        args = tuple(random_layout(rng) for _ in range(arguments))
        if operation is complement:
            args = (*args, rng.choice((1, 6, 24, s, 4 * s * t, 24 * s * t * u)))
        found, facts = settle(operation, args, most=3)
        if found is None:
            continue
        tried = failed = 0
        for numbers in rng.sample(NUMBERS, len(NUMBERS)):
            if tried == 6 or not all(holds(fact, numbers) for fact in facts):
                continue
            static = substituted(args, numbers)
            if any(size_of(a) > 200 for a in static if isinstance(a, Layout)):
                continue
            tried += 1
            if isinstance(found, LayoutError):
                try:
                    operation(*static)
                except LayoutError:
                    failed += 1
                continue
            number = substituted(found, numbers)
            assert is_right(*static, number), (
                f"{operation.__name__}{args} == {found} under {facts}, but not at "
                f"{dict(zip(NAMES, numbers))}: {number}"
            )
        checked += tried
        if isinstance(found, LayoutError):
            refused += 1
            # Refused for symbols: some numbers must be without an answer. (Facts may leave only
            # numbers as special as a size of 1.)
            assert failed or facts or tried < 3, (
                f"{operation.__name__}{args} is refused ({found}), but not for numbers"
            )
        else:
            answered += not facts
            with_facts += bool(facts)
    print(
        f"\n{operation.__name__}: {answered} answered, {with_facts} with facts, {refused} refused, "
        f"{checked} substitutions"
    )
    assert answered + with_facts >= 12


# -- decided without a fact ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "want"),
    [
        (lambda: Layout((s, t, 4)), Layout((s, t, 4), (4 * t, 4, 1))),
        (lambda: Layout((s, t)).size, s * t),
        (lambda: sympy.expand(Layout((s, t)).cosize), s * t),
        (lambda: coalesce(Layout((s, (t, 4)))), Layout(4 * s * t, 1)),
        (lambda: coalesce(Layout((s, t), (2 * t, 1))), Layout((s, t), (2 * t, 1))),
        (lambda: composition(Layout((s, t)), Layout(s, t)), Layout(s, t)),
        (lambda: composition(Layout((s, t), (1, s)), Layout((s, t))), Layout((s, t), (1, s))),
        (lambda: composition(Layout((s, t), (1, s)), Layout(s * t)), Layout((s, t), (1, s))),
        (
            lambda: composition(Layout((s, 4 * t), (1, s)), Layout((4 * s, t), (t, 1))),
            Layout(((s, 4), t), ((1, s * t), s)),
        ),
        (lambda: composition(Layout(s, 3), Layout(7, 2)), Layout(7, 6)),
        (lambda: composition(Layout((s, 3), (t, u)), Layout(3)), Layout(3, u)),
        (lambda: complement(Layout(s), s * t), Layout(t, s)),
        (
            lambda: complement(Layout((s, t), (6 * t, 1)), 12 * s * t),
            Layout((2, 6), (6 * s * t, t)),
        ),
        (lambda: complement(Layout(t, s), 1), Layout(s, 1)),
        (lambda: logical_divide(Layout(s * t), Layout(t)), Layout((t, s), (1, t))),
        (
            lambda: logical_divide(Layout((4 * s, 6)), (4, 2)),
            Layout(((4, s), (2, 3)), ((6, 24), (1, 2))),
        ),
        (
            lambda: zipped_divide(Layout((4 * s, 6 * t)), (s, t)),
            Layout(((s, t), (4, 6)), ((6 * t, 1), (6 * s * t, t))),
        ),
        (lambda: logical_product(Layout(s), Layout(t)), Layout((s, t), (1, s))),
        (
            lambda: blocked_product(Layout((s, 2)), Layout((3, t))),
            Layout(((3, s), (t, 2)), ((2 * s * t, 2), (2 * s, 1))),
        ),
        (lambda: left_inverse(Layout((s, t), (1, s))), Layout((t, s), (1, t))),
        (lambda: left_inverse(Layout((s, t))), Layout(s * t)),
    ],
)
def test_decided_without_a_fact(found, want):
    assert found() == want


def test_the_right_inverse_of_a_symbolic_size():
    """The whole of a mode is never less than nothing, whatever its size."""
    assert right_inverse(Layout(s)) == Layout(s)
    assert right_inverse(Layout((s, t))) == Layout(s * t)
    assert right_inverse(Layout((s, t), (1, s))) == Layout((t, s), (1, t))


def test_a_symbolic_mode_of_stride_zero_fills_nothing():
    assert complement(Layout(2 * s, 0), 6) == Layout(6)
    assert complement(Layout((s, 4), (0, 1)), 8 * t) == Layout(2 * t, 4)


def test_a_bound_that_is_a_constant_multiple_is_rounded_up():
    """As for ints: 18 s elements take 5 blocks of 4 s."""
    assert complement(Layout(4 * s), 18 * s) == Layout(5, 4 * s)
    assert complement(Layout(4), 4 * s + 1) == Layout(s + 1, 4)


def test_a_symbol_beside_a_stride_beyond_the_boundary():
    """The leaf 2:9 passes A's boundary, 6, but takes no carry; a symbol in another leaf does not
    change that.
    """
    a = Layout((100, 6), (7, 1))
    assert composition(a, Layout((4, 2), (6, 9))) == Layout((4, 2), (7, 10))
    assert composition(a, Layout((s, 2), (6, 9))) == Layout((s, 2), (7, 10))


def test_numbers_of_symbolic_calls():
    layout = Layout((s, t))
    for i, j in product(range(2), range(3)):
        assert substituted(layout(i, j), (2, 3, 1)) == 3 * i + j
    assert Layout((s, 4))(9) == 9 and Layout((s, 4), (t, 1))(6) == t + 2


def test_symbolic_layouts_are_values():
    assert (
        Layout((s, t)) == Layout((symbol("s"), symbol("t")))
        and len({Layout(s), Layout(symbol("s"))}) == 1
    )
    assert Layout(2 * s) != Layout(s)


def test_symbolic_and_static_composition_agree():
    """A symbol that takes part in nothing, an extra outermost mode of stride 0, changes no
    decision.
    """
    rng = random.Random(5)
    answered = 0
    for _ in range(300):
        a = nest(rng, [(rng.choice((2, 3, 4)), rng.choice((1, 2, 3, 7))) for _ in range(2)])
        b = nest(rng, [(rng.choice((2, 3, 4)), rng.choice((1, 2, 3, 4, 6)))])
        try:
            found = composition(a, make_layout(Layout(s, 0), b))
        except LayoutError:
            assert not composition_exists(a, b), f"composition({a}, {b}) exists"
        else:
            answered += 1
            assert is_composition(a, b, found[1])
    assert answered > 50


def test_raked_product_of_symbols():
    block, tiler = Layout((s, 2)), Layout((3, t))
    product_ = logical_product(block, tiler)
    raked = raked_product(block, tiler)
    for numbers in ((2, 2, 1), (3, 4, 1), (1, 1, 1)):
        whole, mixed = substituted(product_, numbers), substituted(raked, numbers)
        assert sorted(values_of(whole)) == sorted(values_of(mixed)) == list(range(whole.size))


# -- refused ---------------------------------------------------------------------------------------


def test_what_holds_for_no_number_is_refused():
    for operation, args in (
        (complement, (Layout(s, -1), 4)),
        (composition, (Layout((s, 4), (9, 1)), Layout(6))),
        (left_inverse, (Layout(2 * s, 0),)),
    ):
        with pytest.raises(LayoutError) as caught:
            operation(*args)
        assert not isinstance(caught.value, Undecided)


def test_a_stride_that_may_be_negative_is_not_taken_for_a_positive_one():
    """1 - s is negative for every s but 1, and an index may not be."""
    with pytest.raises(LayoutError):
        composition(Layout(8, 3), Layout(4, 1 - s))
    with pytest.raises(LayoutError):
        composition(Layout(8, 3), Layout(4, -s))
    with pytest.raises(LayoutError):
        complement(Layout(4, -s), 8)
