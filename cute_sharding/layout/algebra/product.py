"""The products: A repeated over B."""

from __future__ import annotations

from cute_sharding.layout.algebra.compose import composition
from cute_sharding.layout.algebra.divide import complement
from cute_sharding.layout.algebra.modes import coalesce
from cute_sharding.layout.algebra.tiler import Tiler, by_mode, unzip
from cute_sharding.layout.layout import Layout, make_layout


def logical_product(a: Layout, tiler: Tiler) -> Layout:
    """A repeated over B: mode 0 is A, mode 1 runs over the copies of A, in the order of B.

    Post-condition: ``logical_product(A, B)(i, j) == A(i) + complement(A, size(A) *
    cosize(B))(B(j))``; the copies do not overlap. A tuple of tilers multiplies mode by mode.

    Raises:
        LayoutError: A has no complement, or the composition is no layout.
        Undecided: it depends on a symbol.

    >>> logical_product(Layout((2, 2), (2, 1)), Layout(6))
    ((2,2),6):((2,1),4)
    """
    if tiler is None:
        return a
    if not isinstance(tiler, Layout):
        if isinstance(tiler, (tuple, list)):
            return by_mode(logical_product, a, tiler)
        tiler = Layout(tiler)
    return make_layout(a, composition(complement(a, a.size * tiler.cosize), tiler))


def zipped_product(a: Layout, tiler: Tiler) -> Layout:
    """:func:`logical_product` by mode, gathered as ``((a0, a1, ...), (copies0, copies1, ...))``.

    Raises:
        LayoutError, Undecided: as :func:`logical_product`.

    >>> zipped_product(Layout((2, 5)), (3, 4))
    ((2,5),(3,4)):((5,1),(1,5))
    """
    return unzip(logical_product, a, tiler)


def tiled_product(a: Layout, tiler: Tiler) -> Layout:
    """:func:`zipped_product` with the copies as modes of their own.

    Raises:
        LayoutError, Undecided: as :func:`logical_product`.

    >>> tiled_product(Layout((2, 5)), (3, 4))
    ((2,5),3,4):((5,1),1,5)
    """
    zipped = zipped_product(a, tiler)
    return make_layout(zipped[0], *zipped[1])


def _ranked_product(block: Layout, tiler: Layout) -> tuple[list[Layout], list[Layout]]:
    """The modes of the block and of its copies, both padded with modes 1:0 (outermost) to the
    larger rank.
    """
    rank = max(block.rank, tiler.rank)

    def padded(layout: Layout) -> Layout:
        return make_layout(*[Layout(1, 0)] * (rank - layout.rank), *layout)

    product = logical_product(padded(block), padded(tiler))
    return list(product[0]), list(product[1])


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """The block repeated over the tiler, mode by mode, blocks staying whole: mode i is (copy i,
    block i).

    Post-condition: with ``P = logical_product(block, tiler)``, the result at ``((t0, b0), (t1, b1),
    ...)`` is ``P((b0, b1, ...), (t0, t1, ...))``, each mode coalesced.

    Raises:
        LayoutError, Undecided: as :func:`logical_product`.

    >>> blocked_product(Layout((2, 5)), Layout((3, 4)))
    ((3,2),(4,5)):((40,5),(10,1))
    """
    blocks, copies = _ranked_product(block, tiler)
    return make_layout(*(coalesce(make_layout(t, b)) for b, t in zip(blocks, copies, strict=True)))


def raked_product(block: Layout, tiler: Layout) -> Layout:
    """The block repeated over the tiler, mode by mode, blocks interleaved: mode i is (block i, copy
    i).

    Post-condition: with ``P = logical_product(block, tiler)``, the result at ``((b0, t0), (b1, t1),
    ...)`` is ``P((b0, b1, ...), (t0, t1, ...))``, each mode coalesced.

    Raises:
        LayoutError, Undecided: as :func:`logical_product`.

    >>> raked_product(Layout((2, 5)), Layout((3, 4)))
    ((2,3),(5,4)):((5,40),(1,10))
    """
    blocks, copies = _ranked_product(block, tiler)
    return make_layout(*(coalesce(make_layout(b, t)) for b, t in zip(blocks, copies, strict=True)))
