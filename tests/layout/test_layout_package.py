"""The package as a whole: what it imports, and what it raises."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from layout_bruteforce import leaves_of, top_modes
from layout_strategies import SETTINGS, layouts

from cute_sharding.layout import (
    Layout,
    LayoutError,
    blocked_product,
    coalesce,
    complement,
    composition,
    flatten,
    left_inverse,
    logical_divide,
    logical_product,
    raked_product,
    right_inverse,
    tiled_divide,
    tiled_product,
    zipped_divide,
    zipped_product,
)


def test_imports_no_torch():
    """A fresh interpreter, since pytest may have imported torch; an operation runs too, for imports
    inside functions.
    """
    code = (
        "import sys\n"
        "from cute_sharding.layout import Layout, composition, logical_divide\n"
        "logical_divide(Layout((4, 16)), (2, Layout(4, 2)))\n"
        "assert 'sympy' not in sys.modules, 'ints need no sympy'\n"
        "from cute_sharding.layout import symbol\n"
        "composition(Layout((2, symbol('s'))), Layout(2, symbol('s')))\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@SETTINGS
@given(
    layouts(most=4, negative=True, empty=True),
    layouts(negative=True, empty=True),
    st.integers(0, 40),
)
def test_only_layout_errors_are_raised(a, b, bound):
    """And every result is a Layout that its own constructor accepts."""
    operations = [
        (coalesce, a),
        (flatten, a),
        (composition, a, b),
        (complement, a, bound),
        (right_inverse, a),
        (left_inverse, a),
    ]
    operations += [
        (op, a, b)
        for op in (
            logical_divide,
            zipped_divide,
            tiled_divide,
            logical_product,
            zipped_product,
            tiled_product,
            blocked_product,
            raked_product,
        )
    ]
    for operation, *args in operations:
        try:
            found = operation(*args)
        except LayoutError as error:
            assert str(error)
            continue
        assert Layout(found.shape, found.stride) == found and Layout.parse(repr(found)) == found
        assert list(found.leaves) == leaves_of(found)
        assert top_modes(found) is not None
