"""The inverses: a layout that A undoes, and one that undoes A."""

from __future__ import annotations

from functools import cmp_to_key

from cute_sharding.layout.algebra.modes import coalesce, compare_modes, merge_neighbours
from cute_sharding.layout.errors import LayoutError
from cute_sharding.layout.layout import Layout, from_leaves, make
from cute_sharding.layout.symbolic import (
    Int,
    divides,
    is_nonnegative,
    is_zero,
    quotient,
    require,
)


def right_inverse(layout: Layout | int) -> Layout:
    """A layout R that A undoes.

    Post-condition: ``A(R(i)) == i`` for every i in ``[0, size(R))``, R coalesced, and no chain of
    (parts of) A's modes reaches further. R of size 1 always exists.

    >>> right_inverse(Layout((2, 4), (1, 2)))
    (4,2):(1,4)
    """
    if not isinstance(layout, Layout):
        layout = Layout(layout)
    modes: list[tuple[Int, Int, Int]] = []  # (stride, size, weight in the index), for sizes above 1
    weight: Int = 1
    for n, d in reversed(layout.leaves):
        if not (type(n) is int and n == 1) and not (type(d) is int and d <= 0):
            modes.append((d, n, weight))
        weight = weight * n
    if type(weight) is int and weight == 0:
        return make(0, 0)

    def reach(current: Int) -> tuple[Int, list[tuple[Int, Int]]]:
        """The furthest (end, modes innermost first) that continue values [0, current)."""
        best: tuple[Int, list[tuple[Int, Int]]] = (current, [])
        for d, n, w in modes:
            if d == current or is_zero(d - current):
                for part in _parts(d, n, modes):
                    end, chain = reach(d * part)
                    if is_nonnegative(end - best[0]):
                        best = end, [(part, w), *chain]
        return best

    chain = reach(1)[1]
    chain.reverse()
    return coalesce(from_leaves(chain))


def _parts(d: Int, n: Int, modes: list[tuple[Int, Int, Int]]) -> list[Int]:
    """Parts of mode n:d that a chain may use: all of it, or as much as lets another mode go on."""
    parts = [n]
    if type(n) is int and type(d) is int:
        parts += [e // d for e, _, _ in modes if type(e) is int and e % d == 0 and 1 < e // d < n]
    return parts


def left_inverse(layout: Layout | int) -> Layout:
    """A layout L that undoes A.

    Post-condition: ``L(A(i)) == i`` for every index i of A; ``size(L)`` is at least ``cosize(A)``,
    or L runs on along its outermost mode.

    Raises:
        LayoutError: A maps two indices to one value, or its strides, in order, do not divide one
            another.

    >>> left_inverse(Layout((4, 2), (1, 8)))
    (2,8):(1,2)
    """
    if not isinstance(layout, Layout):
        layout = Layout(layout)
    modes: list[tuple[Int, Int, Int]] = []
    weight: Int = 1
    for n, d in reversed(coalesce(layout).leaves):
        if not (type(n) is int and n <= 1):
            if type(d) is int and d <= 0:
                raise LayoutError(
                    f"left_inverse({layout!r}) does not exist: the stride {d} of mode {n}:{d} must "
                    "be positive"
                )
            modes.append((d, n, weight))
        weight = weight * n
    modes.sort(key=cmp_to_key(compare_modes))
    if not modes:
        return make(1, 0)
    out: list[tuple[Int, Int]] = []  # innermost first
    if modes[0][0] != 1:
        out.append(
            (modes[0][0], 0)
        )  # values between multiples of the smallest stride are not reached
    context = f"left_inverse({layout!r})"
    for (d, n, w), following in zip(modes, [*modes[1:], None], strict=True):
        if following is None:
            out.append((n, w))
            continue
        e = following[0]
        if not require(divides(d, e), "divides", e, d, context):
            raise LayoutError(
                f"{context} is not a layout: the stride {d} does not divide the next larger "
                f"stride {e}"
            )
        if not require(is_nonnegative(e - n * d), "at most", n * d, e, context):
            raise LayoutError(
                f"{context} does not exist: modes {n}:{d} and {following[1]}:{e} give two "
                "coordinates the same index"
            )
        out.append((quotient(e, d), w))
    out.reverse()
    return from_leaves(merge_neighbours(out))
