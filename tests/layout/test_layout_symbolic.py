"""Layouts in positive integer symbols: what is decidable is decided, never wrongly, and Undecided
names a fact that helps.

The random tests substitute numbers that satisfy the facts into a symbolic result and judge it by
the brute-force definitions.
"""

import random
from fractions import Fraction
from itertools import product

import pytest
import sympy
from layout_bruteforce import (
    complement_values,
    composition_exists,
    is_complement,
    is_composition,
    is_left_inverse,
    is_right_inverse,
    leaves_of,
    nest,
    same_function,
    size_of,
    values_of,
)

from cute_sharding.layout import (
    Layout,
    LayoutError,
    Undecided,
    assuming,
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

NAMES = "stu"
s, t, u = map(symbol, NAMES)


def substituted(value, numbers):
    """``value``, an expression or a layout or a tuple of them, with its symbols replaced by
    ``numbers``.
    """
    if isinstance(value, Layout):
        return Layout(substituted(value.shape, numbers), substituted(value.stride, numbers))
    if isinstance(value, tuple):
        return tuple(substituted(part, numbers) for part in value)
    if isinstance(value, int):
        return value
    found = value.subs(dict(zip((s, t, u), numbers)), simultaneous=True)
    assert found.is_Integer, f"{value} is {found} at {numbers}"
    return int(found)


def holds(fact, numbers):
    """Whether a fact, read as Python, is true of the numbers."""
    try:
        return bool(
            eval(fact, {}, {name: Fraction(number) for name, number in zip(NAMES, numbers)})
        )
    except ZeroDivisionError:
        return False


def settle(operation, args, most):
    """The result and the facts supplied, one after the other, as each Undecided asks; None for more
    than ``most`` facts.
    """
    facts = []
    while True:
        try:
            with assuming(*facts):
                return operation(*args), facts
        except Undecided as undecided:
            assert undecided.fact in str(undecided)
            assert undecided.fact not in facts, (
                f"{operation.__name__}{args}: supplying {undecided.fact!r} does not settle it"
            )
            if len(facts) == most:
                return None, facts
            facts.append(undecided.fact)
        except LayoutError as error:
            return error, facts


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


def tiles_the_range(a, found, bound):
    """The post-condition of complement but for "no smaller one": a size that turns out 1 could have
    been left out.
    """
    modes = [(n, d) for n, d in leaves_of(a) if d]
    whole = values_of(make_layout(*[Layout(n, d) for n, d in modes], found))
    return sorted(whole) == list(range(len(whole))) and len(whole) >= bound


def right_complement(a, bound, found):
    return tiles_the_range(a, found, bound) and (
        any(n == 1 for n, _ in leaves_of(a)) or is_complement(a, bound, found)
    )


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


# -- undecided -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "args", "facts", "want"),
    [
        (logical_divide, (Layout(s), 4), ["s % 4 == 0"], Layout((4, s / 4), (1, 4))),
        (complement, (Layout(4), s), ["s % 4 == 0"], Layout(s / 4, 4)),
        (
            composition,
            (Layout((2, s), (9, 1)), Layout((2, 4), (s, 1))),
            ["s >= 4"],
            Layout((2, 4), (9, 1)),
        ),
        (composition, (Layout((2, s), (9, 1)), Layout(3)), ["s >= 3"], Layout(3, 1)),
        (composition, (Layout((2, s), (9, 1)), Layout(3)), ["s == 3"], Layout(3, 1)),
        (composition, (Layout((2, s), (9, 1)), Layout(3)), ["s > t", "t >= 2"], Layout(3, 1)),
        (composition, (Layout((2, u), (50, 1)), Layout(3, 2 * s)), ["u >= 6*s"], Layout(3, 2 * s)),
        (
            composition,
            (Layout((2, u), (50, 1)), Layout(6, 2 * s)),
            ["u % (2*s) == 0", "6 % (u/(2*s)) == 0"],
            None,
        ),
        (left_inverse, (Layout((t, s), (u, 1)),), ["s < u", "u % s == 0"], None),
        (
            left_inverse,
            (Layout((4, s), (u, 2 * t)),),
            ["u > 2*t", "u % (2*t) == 0", "2*t*s <= u"],
            None,
        ),
        (complement, (Layout((t, s), (u, 1)), 1), ["s < u", "u % s == 0"], Layout(u / s, s)),
    ],
)
def test_facts_settle_it(operation, args, facts, want):
    """Undecided at first, with a fact in the message; with the facts it is decided, and right for
    numbers that satisfy them.
    """
    with pytest.raises(Undecided) as caught:
        operation(*args)
    assert caught.value.fact in str(caught.value) and "assuming" in str(caught.value)
    with assuming(*facts):
        found = operation(*args)
    assert want is None or found == want
    check = {
        composition: is_composition,
        left_inverse: is_left_inverse,
        complement: right_complement,
        logical_divide: lambda a, b, r: same_function(r, logical_divide(a, b)),
    }[operation]
    tried = 0
    for numbers in product((1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 4, 6, 12, 24)):
        if all(holds(fact, numbers) for fact in facts):
            tried += 1
            assert check(*substituted(args, numbers), substituted(found, numbers)), numbers
    assert tried
    with pytest.raises(Undecided):
        operation(*args)  # the facts end with the block


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (
            composition,
            (Layout((2, u), (50, 1)), Layout(6, 2 * s)),
        ),  # u % (2*s): a product on the right of %
        (
            composition,
            (Layout((2, s + 1), (50, 1)), Layout(6, 3)),
        ),  # (s + 1) % 3: a sum on the left of %
        (
            composition,
            (Layout((s, t + 1), (4, 1)), Layout(s, 2)),
        ),  # then s % ((t + 1)/2): a fraction
        (complement, (Layout(3 * s, u), 6)),  # 6 % (3*s*u)
        (complement, (Layout((3, s), (s + 1, 1)), 1)),  # (s + 1) % s
        (complement, (Layout((4, s * t), (s, u)), 1)),
        (logical_divide, (Layout((2 * t, 3 * s)), Layout(5 * s, 2))),
        (logical_product, (Layout((2, s + 1), (2 * t, 1)), Layout(3))),
        (left_inverse, (Layout((4, s), (u, 2 * t)),)),
    ],
)
def test_the_fact_that_undecided_names_is_enough(operation, args):
    """Supplying fact after fact ends, in an answer or a refusal; no fact is asked for twice."""
    found, facts = settle(operation, args, most=8)
    assert found is not None and facts


def test_every_fact_can_be_read():
    for fact in (
        "s % 4 == 0",
        "(s + 1) % 3 == 0",
        "u % (2*s) == 0",
        "3 % (u/(2*s)) == 0",
        "(s/2 + 1/2) % 2 == 0",
        "s*t % 6 == 0",
        "s == 4",
        "s < t",
        "s >= 4",
    ):
        with assuming(fact):
            pass


def test_two_facts_about_one_symbol():
    """A multiple of 2 and of u is a multiple of either."""
    for facts in (
        ("t % 2 == 0", "t % u == 0"),
        ("t % u == 0", "t % 2 == 0"),
        ("t % 4 == 0", "t % 6 == 0"),
    ):
        with assuming(*facts):
            assert complement(Layout(2), t).size == t / 2
    with assuming("t % u == 0", "t % 6 == 0"):
        assert complement(Layout(6), t).size == t / 6 and complement(Layout(u), t).size == t / u
    with assuming("t % 4 == 0", "t % 6 == 0"):
        assert complement(Layout(12), t).size == t / 12
        with pytest.raises(Undecided):
            complement(Layout(24), t)


def test_a_fact_may_define_a_symbol_by_itself():
    """``t % (s*t) == 0`` holds where s is 1; it is no contradiction."""
    with assuming("t % (s*t) == 0"):
        assert substituted(complement(Layout(s * t), t), (1, 3, 1)).size == 1


def test_facts_do_not_leak():
    with pytest.raises(ZeroDivisionError), assuming("s % 4 == 0"):
        raise ZeroDivisionError
    with pytest.raises(Undecided):
        complement(Layout(4), s)
    with assuming("s % 2 == 0"):
        with assuming("s % 3 == 0"):
            assert complement(Layout(6), s) == Layout(s / 6, 6)
        with pytest.raises(Undecided):
            complement(Layout(6), s)


@pytest.mark.parametrize(
    "fact", ["", "s", "s %", "1 < s < 4", "s in t", "s % 4", "f(s) == 0", "(s, 2) < 3"]
)
def test_a_fact_that_is_no_comparison_is_refused(fact):
    with pytest.raises(LayoutError, match="cannot read"), assuming(fact):
        pass


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
