"""The complement, which fills up a layout, and the divides: A's indices by tiles of B and rest."""

from __future__ import annotations

from functools import cmp_to_key

from cute_sharding.layout.algebra.compose import compose_leaves, join_modes, rebuild
from cute_sharding.layout.algebra.modes import compare_modes, merge_neighbours
from cute_sharding.layout.algebra.tiler import Tiler, by_mode, unzip
from cute_sharding.layout.errors import LayoutError, Undecided
from cute_sharding.layout.layout import Layout, from_leaves, make, make_layout
from cute_sharding.layout.symbolic import (
    Fact,
    Int,
    ceil_quotient,
    divides,
    is_nonnegative,
    is_zero,
    quotient,
)


def complement(layout: Layout | int, bound: Int = 1) -> Layout:
    """The layout that fills up ``layout``: together they reach every integer of an interval exactly
    once.

    Post-conditions, for A' = A without its modes of stride 0: ``A'(i) + complement(A, bound)(j)``
    over all i and j reaches each integer of ``[0, size(A') * size(result))`` exactly once, and that
    interval holds ``[0, bound)``; the result is coalesced and its strides descend; no smaller
    result does this.

    Raises:
        LayoutError: A's values do not tile an interval (two modes overlap, or one stride does not
            divide the next), or a stride is negative.

    >>> complement(Layout((2, 2), (8, 1)), 32)
    (2,4):(16,2)
    """
    if not isinstance(layout, Layout):
        layout = Layout(layout)
    return from_leaves(_complement(layout, bound))


def _complement(layout: Layout, bound: Int) -> list[tuple[Int, Int]]:
    """The leaves of :func:`complement`, outermost first."""
    modes: list[tuple[Int, Int]] = []
    for n, d in layout.leaves:
        if (type(n) is int and n == 1) or (type(d) is int and d == 0):
            continue
        if type(n) is int and n == 0:
            raise LayoutError(f"complement({layout!r}): a layout of size 0 has no complement")
        if type(d) is int and d < 0:
            raise LayoutError(
                f"complement({layout!r}): the stride {d} of mode {n}:{d} must not be negative"
            )
        modes.append((d, n))
    try:
        modes.sort()
    except TypeError:  # a comparison of symbols
        modes.sort(key=cmp_to_key(compare_modes))
    out: list[tuple[Int, Int]] = []  # (size, stride), innermost first
    current: Int = 1
    inner: tuple[Int, Int] = (0, 1)  # the mode before
    for d, n in modes:
        exact = divides(current, d)
        if exact is None:
            raise Undecided(str(Fact("divides", d, current)), f"complement({layout!r})")
        gap = quotient(d, current) if exact else 0
        if is_zero(gap):
            raise LayoutError(
                f"complement({layout!r}) does not exist: the stride {d} of mode {n}:{d} is not a "
                f"multiple of {current}, the size times the stride of mode {inner[1]}:{inner[0]}"
            )
        if type(gap) is not int or gap != 1:
            out.append((gap, current))
        current, inner = n * d, (d, n)
    if divides(current, bound):
        last: Int = quotient(bound, current)
    elif is_nonnegative(current - bound):
        last = 1
    elif (whole := ceil_quotient(bound, current)) is not None:
        last = whole
    else:
        fact = Fact("divides", bound, current)
        raise Undecided(str(fact), f"complement({layout!r}, {bound})")
    if type(last) is int and last == 0:
        return [(0, 0)]
    if type(last) is not int or last != 1:
        out.append((last, current))
    out.reverse()
    return merge_neighbours(out)


def logical_divide(a: Layout, tiler: Tiler) -> Layout:
    """A's indices as (tile, rest): mode 0 runs inside a tile of B's elements, mode 1 over the
    tiles.

    Post-condition: ``logical_divide(A, B) == composition(A, make_layout(B, complement(B,
    size(A))))``, so the result at ``(i, j)`` is ``A(B(i) + complement(B, size(A))(j))``. Where B
    does not divide A, the last tile runs on beyond A's last index: the caller predicates. A tuple
    of tilers divides mode by mode.

    Raises:
        LayoutError: B has no complement, or the composition is no layout.
        Undecided: it depends on a symbol.

    >>> logical_divide(Layout(16), Layout(4))
    (4,4):(1,4)
    >>> logical_divide(Layout((4, 16)), (2, None))
    ((2,2),16):((16,32),1)
    """
    if tiler is None:
        return a
    if not isinstance(tiler, Layout):
        if isinstance(tiler, (tuple, list)):
            return by_mode(logical_divide, a, tiler)
        tiler = Layout(tiler)
    rest = _complement(tiler, a.size)
    modes = compose_leaves(a, (*tiler.leaves, *rest))
    count = len(tiler.leaves)
    tile = rebuild(tiler, modes[:count])
    over = modes[count:]
    whole = from_leaves(over[0]) if len(over) == 1 else join_modes(over) if over else make(1, 0)
    return make((tile.shape, whole.shape), (tile.stride, whole.stride))


def zipped_divide(a: Layout, tiler: Tiler) -> Layout:
    """:func:`logical_divide` by mode, gathered as ``((tile0, tile1, ...), (rest0, rest1, ...,
    untouched modes))``.

    Raises:
        LayoutError, Undecided: as :func:`logical_divide`.

    >>> zipped_divide(Layout((4, 16)), (2, 4))
    ((2,4),(2,4)):((16,1),(32,4))
    """
    return unzip(logical_divide, a, tiler)


def tiled_divide(a: Layout, tiler: Tiler) -> Layout:
    """:func:`zipped_divide` with the rests as modes of their own: ``((tile0, tile1, ...), rest0,
    rest1, ...)``.

    Raises:
        LayoutError, Undecided: as :func:`logical_divide`.

    >>> tiled_divide(Layout((4, 16)), (2, 4))
    ((2,4),2,4):((16,1),32,4)
    """
    zipped = zipped_divide(a, tiler)
    return make_layout(zipped[0], *zipped[1])
