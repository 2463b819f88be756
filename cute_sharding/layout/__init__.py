"""CuTe layout algebra in row-major order, exact, on ints or sympy expressions. Imports no torch.

- :mod:`.layout`: the Layout value, a shape and a stride.
- :mod:`.algebra`: the operations, a file for each family.
- :mod:`.symbolic`: proofs about sizes and strides that are symbols.
- :mod:`.size`: symbolic sizes for code that expects ints; it asks an oracle what is not proved.
"""

from cute_sharding.layout.algebra import (
    Tiler,
    blocked_product,
    coalesce,
    complement,
    composition,
    flatten,
    group_modes,
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
from cute_sharding.layout.errors import LayoutError, Undecided
from cute_sharding.layout.layout import IntTuple, Layout, make_layout
from cute_sharding.layout.size import Oracle, Size, asking
from cute_sharding.layout.symbolic import Fact, assuming, symbol

__all__ = [
    "Fact",
    "IntTuple",
    "Layout",
    "LayoutError",
    "Oracle",
    "Size",
    "Tiler",
    "Undecided",
    "asking",
    "assuming",
    "blocked_product",
    "coalesce",
    "complement",
    "composition",
    "flatten",
    "group_modes",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "make_layout",
    "raked_product",
    "right_inverse",
    "symbol",
    "tiled_divide",
    "tiled_product",
    "zipped_divide",
    "zipped_product",
]
