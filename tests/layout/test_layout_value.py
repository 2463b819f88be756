"""The Layout value: construction, structure, calling, printing, and what bad input is told."""

import copy
import pickle
import random
from itertools import product

import pytest
from layout_bruteforce import (
    depth_of,
    leaves_of,
    nest,
    random_leaves,
    same_function,
    size_of,
    value_at,
    values_of,
)

from cute_sharding.layout import Layout, LayoutError, flatten, group_modes, make_layout, symbol

SAMPLES = [
    Layout(4),
    Layout(1, 7),
    Layout(0),
    Layout(()),
    Layout((4,)),
    Layout((4, (2, 3)), (6, (3, 1))),
    Layout(((2, 2), (3, (1, 2))), ((1, -4), (0, (9, 2)))),
    Layout((2, (), 3), (3, (), 1)),
]


def random_layouts(count, seed=0, **kwargs):
    rng = random.Random(seed)
    return [
        nest(rng, random_leaves(rng, strides=(-2, 0, 1, 2, 3, 5), **kwargs)) for _ in range(count)
    ]


# -- construction ----------------------------------------------------------------------------------


def test_default_strides_are_row_major():
    assert Layout((4, (2, 3))) == Layout((4, (2, 3)), (6, (3, 1)))
    assert Layout((2, 0, 3)).stride == (3, 3, 1)  # as torch.empty((2, 0, 3)).stride()
    for layout in random_layouts(50):
        assert values_of(Layout(layout.shape)) == list(range(layout.size))


def test_lists_and_numbers_that_are_ints():
    numpy = pytest.importorskip("numpy")
    import sympy

    assert Layout([4, [2, 3]], [6, [3, 1]]) == Layout((4, (2, 3)))
    layout = Layout((numpy.int64(4), sympy.Integer(3)))
    assert layout == Layout((4, 3)) and all(type(n) is int for leaf in layout.leaves for n in leaf)


def test_is_immutable():
    layout = Layout(4)
    for name in ("shape", "stride", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(layout, name, 5)
    with pytest.raises((AttributeError, TypeError)):
        del layout.shape
    assert layout == Layout(4)


def test_is_hashable_and_equal_by_structure():
    assert len({Layout(4), Layout(4, 1), Layout((4,)), Layout((2, 2))}) == 3
    assert Layout((2, 2)) != Layout(4)  # the same function, another layout
    assert Layout(4) != 4 and Layout(4) != "4:1"
    assert Layout(symbol("s")) == Layout(symbol("s")) and hash(Layout(symbol("s"))) == hash(
        Layout(symbol("s"))
    )


@pytest.mark.parametrize("layout", [*SAMPLES, Layout((symbol("s"), 4))], ids=str)
def test_pickles_and_copies(layout):
    for other in (pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
        assert other == layout and hash(other) == hash(layout)


# -- structure -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*SAMPLES, *random_layouts(100)], ids=str)
def test_sizes(layout):
    values = values_of(layout)
    assert layout.size == len(values) == size_of(layout)
    assert layout.cosize == max(values, default=-1) + 1
    assert layout.depth == depth_of(layout.shape)
    assert (
        layout.rank
        == len(layout)
        == len(list(layout))
        == (len(layout.shape) if isinstance(layout.shape, tuple) else 1)
    )
    assert list(layout.leaves) == leaves_of(layout)


def test_slicing_by_mode():
    layout = Layout((4, (2, 3), 5), (30, (15, 5), 1))
    assert layout[0] == Layout(4, 30) and layout[-1] == Layout(5, 1)
    assert layout[1] == Layout((2, 3), (15, 5)) and layout[1, 0] == layout[1][0] == Layout(2, 15)
    assert layout[1:] == Layout(((2, 3), 5), ((15, 5), 1)) and layout[::2] == Layout(
        (4, 5), (30, 1)
    )
    assert list(layout) == [layout[0], layout[1], layout[2]]
    assert Layout(4, 2)[0] == Layout(4, 2)[-1] == Layout(4, 2) and Layout(4, 2)[:] == Layout(
        (4,), (2,)
    )
    for mode in (3, -4, (1, 2)):
        with pytest.raises(IndexError, match="mode"):
            layout[mode]
    with pytest.raises(IndexError, match="has only mode 0"):
        Layout(4)[1]


def test_make_layout_flatten_and_group_modes():
    a, b = Layout(4, 2), Layout((2, 3))
    assert make_layout(a, b) == make_layout([a, b]) == Layout((4, (2, 3)), (2, (3, 1)))
    assert make_layout(a) == Layout((4,), (2,)) and make_layout() == Layout(())
    assert flatten(make_layout(a, b)) == Layout((4, 2, 3), (2, 3, 1)) and flatten(a) == a
    assert group_modes(Layout((2, 3, 4)), 1, 3) == Layout((2, (3, 4)), (12, (4, 1)))
    for layout in random_layouts(100, most=4):
        assert same_function(flatten(layout), layout) and flatten(layout).depth <= 1
        if isinstance(layout.shape, tuple):
            grouped = group_modes(layout, 0, layout.rank)
            assert same_function(grouped, layout) and grouped.rank == 1 and grouped[0] == layout
    for begin, end in ((1, 1), (0, 3), (-1, 1)):
        with pytest.raises(LayoutError, match="give begin and end with"):
            group_modes(b, begin, end)
    with pytest.raises(LayoutError, match=r"no modes cannot be grouped: write it as \(4,\):\(2,\)"):
        group_modes(a, 0, 1)
    with pytest.raises(LayoutError, match="takes layouts"):
        make_layout(a, 4)


# -- calling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*[x for x in SAMPLES if x.size], *random_layouts(60)], ids=str)
def test_an_index_a_flat_and_a_nested_coordinate_mean_the_same(layout):
    values = values_of(layout)
    leaves = leaves_of(layout)

    def nested(shape, flat):
        return (
            tuple(nested(part, flat) for part in shape) if isinstance(shape, tuple) else next(flat)
        )

    for index, coordinate in enumerate(product(*(range(n) for n, _ in leaves))):
        assert layout(index) == values[index]
        deep = nested(layout.shape, iter(coordinate))
        assert layout(deep) == values[index]
        if isinstance(deep, tuple):
            assert layout(*deep) == values[index] or (
                len(deep) == 1 and not isinstance(deep[0], tuple)
            )
        if len(coordinate) > 1 and layout.rank not in (1, len(coordinate)):
            assert layout(*coordinate) == layout(coordinate) == values[index]


def test_an_int_in_place_of_a_nested_mode_is_an_index_into_it():
    layout = Layout((4, (2, 3)), (6, (30, 1)))
    assert layout(1, 4) == layout(1, (1, 1)) == 37


def test_an_index_beyond_the_last_runs_on_along_the_outermost_leaf():
    for layout in random_layouts(60):
        assert [layout(i) for i in range(60)] == [value_at(leaves_of(layout), i) for i in range(60)]
    layout = Layout((2, 3), (10, 1))
    assert [layout(i) for i in (5, 6, 7, 8, 9, 60)] == [12, 20, 21, 22, 30, 200]


@pytest.mark.parametrize(
    ("coordinate", "message"),
    [
        ((-1,), "negative"),
        ((4, 0), "outside"),
        ((0, 6), "outside"),
        ((0, (0, 3)), "outside"),
        ((0, -1), "negative"),
        ((0, 0, 3), "outside"),
        ((1, 2, 3, 4), "does not fit"),
        (((1, 2), 3), "does not fit"),
        (((1, (2,)),), "does not fit"),
        ((), "does not fit"),
    ],
)
def test_bad_coordinates(coordinate, message):
    with pytest.raises(LayoutError, match=message):
        Layout((4, (2, 3)))(*coordinate)


def test_empty_layouts():
    assert Layout(())() == Layout(())(0) == 0
    with pytest.raises(LayoutError, match="only the index 0"):
        Layout(())(1)
    with pytest.raises(LayoutError, match="of size 0"):
        Layout((2, 0))(1)


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*SAMPLES, *random_layouts(40)], ids=str)
def test_parse_reads_what_repr_writes(layout):
    assert Layout.parse(repr(layout)) == layout
    assert Layout.parse(str(layout).replace(",", " , ")) == layout


def test_repr():
    assert repr(Layout((4, (2, 3)))) == "(4,(2,3)):(6,(3,1))"
    assert (
        repr(Layout(4)) == "4:1"
        and repr(Layout((4,))) == "(4,):(1,)"
        and repr(Layout(())) == "():()"
    )
    assert repr(Layout(4, -2)) == "4:-2"


def test_parse_reads_symbolic_layouts():
    s, t = symbol("s"), symbol("t")
    for layout in (
        Layout((s, 4)),
        Layout((s, (t, 2))),
        Layout(2 * s + 1, s * t),
        Layout((4, s**2), (s, s - 1)),
        Layout(3, s // 2),
        Layout(s % 4 + 1),
    ):
        assert Layout.parse(repr(layout)) == layout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "4:1:1",
        "(4:1",
        "4:x y",
        "4.5:1",
        "True:1",
        "4:'a'",
        "(4,2):1",
        "4:(1,)",
        "-4:1",
        "4:f(x)",
        "4:a.b",
        "4:[1]",
        "4/2:1",
        "4:1//0",
        "4%0:1",
        "4:lambda",
        "4:2**-1",
        None,
        4,
    ],
)
def test_parse_refuses_other_text(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


def test_parse_runs_no_code():
    with pytest.raises(LayoutError, match="cannot read"):
        Layout.parse("__import__('os').getcwd():1")


def test_parse_names_a_division_by_zero():
    with pytest.raises(LayoutError, match="cannot read '1/0': division by zero"):
        Layout.parse("4:1/0")


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "stride", "message"),
    [
        (-1, None, "shape -1 is negative"),
        ((4, (2, -3)), None, "shape -3 is negative"),
        (2.0, None, "shape 2.0 is a float"),
        ("4", None, "shape '4' is a str"),
        (True, None, "shape True is a bool"),
        (None, None, "shape None is a NoneType"),
        (4, 1.5, "stride 1.5 is a float"),
        ((4, 2), 1, r"shape \(4,2\) and stride 1 are nested differently"),
        (4, (1,), "nested differently"),
        ((4, 2), (1,), "nested differently"),
        (
            (4, (2, 3)),
            (1, (2, (3,))),
            r"nested differently: the part 3 of the shape does not match the part \(3",
        ),
    ],
)
def test_bad_shapes_and_strides(shape, stride, message):
    with pytest.raises(LayoutError, match=message):
        Layout(shape, stride)


def test_symbols_must_be_integers():
    import sympy

    with pytest.raises(LayoutError, match="integer=True, positive=True"):
        Layout(sympy.Symbol("x"))
    with pytest.raises(LayoutError, match="integer"):
        Layout(sympy.Rational(1, 2))


def test_a_size_that_no_value_makes_positive_is_refused():
    with pytest.raises(LayoutError, match="negative"):
        Layout(-symbol("s"))


def test_errors_are_value_errors():
    assert issubclass(LayoutError, ValueError)
