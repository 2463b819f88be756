"""The layout algebra: coalesce, composition, complement, divides, products and inverses.

The operations are those of CuTe
(https://docs.nvidia.com/cutlass/media/docs/cpp/cute/02_layout_algebra.html), in row-major order and
*exact*: each docstring states a post-condition, the result satisfies it for every index, and
:class:`LayoutError` is raised where no result would.

- :mod:`.modes`: coalesce, flatten and group: other modes for the same function.
- :mod:`.compose`: composition; :mod:`.jumps`: the normal form that it uses.
- :mod:`.divide`: complement, and the divides.
- :mod:`.product`: the products.
- :mod:`.inverse`: the right and the left inverse.
- :mod:`.tiler`: tilers, and operations applied mode by mode.
"""

from cute_sharding.layout.algebra.compose import ENUMERATION_LIMIT, composition
from cute_sharding.layout.algebra.divide import (
    complement,
    logical_divide,
    tiled_divide,
    zipped_divide,
)
from cute_sharding.layout.algebra.inverse import left_inverse, right_inverse
from cute_sharding.layout.algebra.modes import coalesce, flatten, group_modes
from cute_sharding.layout.algebra.product import (
    blocked_product,
    logical_product,
    raked_product,
    tiled_product,
    zipped_product,
)
from cute_sharding.layout.algebra.tiler import Tiler

__all__ = [
    "ENUMERATION_LIMIT",
    "Tiler",
    "blocked_product",
    "coalesce",
    "complement",
    "composition",
    "flatten",
    "group_modes",
    "left_inverse",
    "logical_divide",
    "logical_product",
    "raked_product",
    "right_inverse",
    "tiled_divide",
    "tiled_product",
    "zipped_divide",
    "zipped_product",
]
