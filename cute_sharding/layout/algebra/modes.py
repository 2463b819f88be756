"""Other modes for the same function: coalesce, flatten, group. And helpers for lists of modes:
merge neighbours, order by stride.
"""

from __future__ import annotations

from cute_sharding._words import counted
from cute_sharding.layout.errors import LayoutError, Undecided
from cute_sharding.layout.layout import IntTuple, Layout, make, make_layout
from cute_sharding.layout.symbolic import Int, is_less, is_nonnegative, is_zero


def coalesce(layout: Layout, profile: IntTuple | None = None) -> Layout:
    """The shortest layout with the same function.

    Post-conditions: ``coalesce(L)(i) == L(i)`` for every index of L; the result has depth 0 or 1,
    no mode of size 1 unless that is all, and no two neighbours that could be one. With ``profile``,
    a tuple, the modes it names are coalesced one by one (a nested tuple goes deeper) and the others
    are left as they are. Symbols are merged where the merge is provable.

    Raises:
        LayoutError: ``profile`` names more modes than there are.

    >>> coalesce(Layout((2, (1, 6)), (6, (6, 1))))
    12:1
    >>> coalesce(Layout((2, (1, 6)), (6, (6, 1))), (1, 1))
    (2,6):(6,1)
    """
    if type(profile) is tuple:
        if layout.rank < len(profile):
            raise LayoutError(
                f"the profile {profile} has {counted(len(profile), 'entry', 'entries')}, but "
                f"{layout!r} has only {counted(layout.rank, 'mode')}: give at most one entry for "
                "each mode"
            )
        modes = tuple(layout)
        return make_layout(
            *(coalesce(m, p) for m, p in zip(modes, profile, strict=False)), *modes[len(profile) :]
        )
    out: list[tuple[Int, Int]] = []
    size: Int = 1
    stride: Int = 0
    for n, d in reversed(layout.leaves):
        if type(n) is int:
            if n == 1:
                continue
            if n == 0:
                return make(0, 0)
        if type(size) is int and size == 1:
            size, stride = n, d
        elif d == size * stride or (type(d) is not int and is_zero(d - size * stride)):
            size = size * n
        else:
            out.append((size, stride))
            size, stride = n, d
    if not out:
        return make(size, stride)
    out.append((size, stride))
    out.reverse()
    return make(tuple([n for n, _ in out]), tuple([d for _, d in out]))


def flatten(layout: Layout) -> Layout:
    """The layout with its leaves as modes: depth 1 (0 for an int shape), the same function.

    >>> flatten(Layout((4, (2, 3))))
    (4,2,3):(6,3,1)
    """
    if type(layout.shape) is not tuple:
        return layout
    return make(tuple([n for n, _ in layout.leaves]), tuple([d for _, d in layout.leaves]))


def group_modes(layout: Layout, begin: int, end: int) -> Layout:
    """The layout with its modes ``begin`` up to but not including ``end`` made one mode; the same
    function.

    Raises:
        LayoutError: there are no such modes.

    >>> group_modes(Layout((2, 3, 4)), 0, 2)
    ((2,3),4):((12,4),1)
    """
    if type(layout.shape) is not tuple:
        raise LayoutError(
            f"group_modes({layout!r}, {begin}, {end}): a layout with one size and no modes cannot "
            f"be grouped: write it as ({layout.shape},):({layout.stride},)"
        )
    if not 0 <= begin < end <= layout.rank:
        raise LayoutError(
            f"group_modes({layout!r}, {begin}, {end}): give begin and end with 0 <= begin < end <= "
            f"{layout.rank}, the number of modes"
        )
    return make(
        (*layout.shape[:begin], layout.shape[begin:end], *layout.shape[end:]),
        (*layout.stride[:begin], layout.stride[begin:end], *layout.stride[end:]),
    )


def merge_neighbours(leaves: list[tuple[Int, Int]]) -> list[tuple[Int, Int]]:
    """Leaves, outermost first, with neighbours merged where one continues the other."""
    merged: list[tuple[Int, Int]] = []
    for n, d in leaves:
        if merged and merged[-1][1] == n * d:
            n = merged.pop()[0] * n
        merged.append((n, d))
    return merged


def compare_modes(a: tuple[Int, ...], b: tuple[Int, ...]) -> int:
    """Compare modes (stride, size, ...) for sorting; symbols are compared by proof."""
    for x, y in zip(a[:2], b[:2], strict=True):
        if x == y or is_zero(x - y):
            continue
        if is_less(x, y):
            return -1
        if is_less(y, x):
            return 1
        # x <= y is proved, but not x < y. If the strides are equal, the sizes decide; so the order
        # of the strides stands.
        if is_nonnegative(y - x):
            return -1
        if is_nonnegative(x - y):
            return 1
        raise Undecided(f"{x} < {y}", "complement")
    return 0
