"""The layout algebra: coalesce, composition, complement, divides, products and inverses.

The operations are those of CuTe
(https://docs.nvidia.com/cutlass/media/docs/cpp/cute/02_layout_algebra.html), in row-major order and
*exact*: each docstring states a post-condition, the result satisfies it for every index, and
:class:`LayoutError` is raised where no result would.

All of composition rests on one normal form. Let the leaves of A, innermost first, be ``n1:e1,
n2:e2, ...`` and let ``Qk = n1 * ... * nk`` be the index at which leaf k is used up. Then, for every
index x,

    A(x) = e1 * x + sum_k ck * floor(x / Qk),        ck = e(k+1) - nk * ek:

a line, plus a *jump* ``ck`` at each multiple of Qk. A jump of 0 is no jump (the leaves coalesce),
and the outermost leaf never ends. So A is additive on ``x + y`` exactly when the carries of x + y
across the Qk, weighted by the jumps, add up to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cmp_to_key
from itertools import product as cartesian
from typing import NamedTuple, TypeAlias

from cute_sharding.layout.errors import LayoutError, Undecided
from cute_sharding.layout.layout import IntTuple, Layout, from_leaves, make, make_layout
from cute_sharding.layout.symbolic import (
    Int,
    as_int,
    ceil_quotient,
    divides,
    divisibility,
    is_less,
    is_nonnegative,
    is_zero,
    quotient,
    require,
)

# A tiler: a layout, an int n for the layout n:1, None for "leave this mode", or a tuple of tilers,
# one a mode.
Tiler: TypeAlias = "Layout | int | Sequence[Tiler] | None"

# Jumps of both signs may cancel. Such compositions are rare and are decided by enumeration up to
# this many indices.
ENUMERATION_LIMIT = 1 << 16


# -- coalesce, flatten, group ----------------------------------------------------------------------


def coalesce(layout: Layout, profile: IntTuple | None = None) -> Layout:
    """The shortest layout of the same function.

    Post-conditions: ``coalesce(L)(i) == L(i)`` for every index of L; the result has depth 0 or 1,
    no mode of size 1 unless that is all, and no two neighbours that could be one. With ``profile``,
    a tuple, the modes it names are coalesced one by one (a nested tuple goes deeper) and the others
    are left as they are. Symbols are merged where the merge is provable.

    >>> coalesce(Layout((2, (1, 6)), (6, (6, 1))))
    12:1
    >>> coalesce(Layout((2, (1, 6)), (6, (6, 1))), (1, 1))
    (2,6):(6,1)
    """
    if type(profile) is tuple:
        if layout.rank < len(profile):
            raise LayoutError(
                f"profile {profile} names {len(profile)} modes; {layout!r} has {layout.rank}"
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

    >>> group_modes(Layout((2, 3, 4)), 0, 2)
    ((2,3),4):((12,4),1)
    """
    if not 0 <= begin < end <= layout.rank or type(layout.shape) is not tuple:
        raise LayoutError(
            f"cannot group modes {begin} to {end} of {layout!r}, which has modes 0 to "
            f"{layout.rank - 1}"
        )
    return make(
        (*layout.shape[:begin], layout.shape[begin:end], *layout.shape[end:]),
        (*layout.stride[:begin], layout.stride[begin:end], *layout.stride[end:]),
    )


# -- composition -----------------------------------------------------------------------------------


class _Jumps(NamedTuple):
    """The normal form of the module docstring: ``A(x) = slope * x + sum(c * (x // q) for q, c in
    jumps)``.
    """

    slope: Int
    jumps: list[tuple[Int, Int]]
    empty: bool  # a leaf other than the outermost has size 0: only index 0 has a value

    def __call__(self, x: Int) -> Int:
        result = self.slope * x
        for q, c in self.jumps:
            result = result + c * (x // q)
        return result


def _jumps(layout: Layout) -> _Jumps:
    q: Int = 1
    slope: Int = 0
    expected: Int = 0
    jumps: list[tuple[Int, Int]] = []
    leaves = layout.leaves
    started = False
    for k in range(len(leaves) - 1, -1, -1):
        n, d = leaves[k]
        if k and type(n) is int:
            if n == 1:
                continue
            if n == 0:
                return _Jumps(0, [], True)
        if not started:
            slope, started = d, True
        elif d != expected:
            c = d - expected
            if type(c) is int or not is_zero(c):
                jumps.append((q, c))
        q = q * n
        expected = n * d
    return _Jumps(slope, jumps, not started)


def composition(a: Layout, b: Tiler) -> Layout:
    """The layout of ``A o B``, with B's modes.

    Post-condition: ``composition(A, B)(i) == A(B(i))`` for every index i of B, and the result has
    B's nesting, each leaf of B replaced by a leaf or by a flat mode of the same size. Where B
    reaches beyond A's last index, A runs on along its outermost leaf, as ``A(index)`` does. ``b``
    may be a tiler: an int n stands for ``n:1``, and a tuple composes mode by mode (None leaves a
    mode alone).

    Raises:
        LayoutError: no layout with B's modes is ``A o B``; the message names the leaf of B and the
            leaf of A that clash.
        Undecided: it depends on a symbol.

    >>> composition(Layout((6, 2), (8, 2)), Layout((4, 3), (1, 4)))
    ((2,2),3):((8,2),16)
    """
    if b is None:
        return a
    if not isinstance(b, Layout):
        if isinstance(b, (tuple, list)):
            return _by_mode(composition, a, b)
        return composition(a, Layout(b))
    return _rebuild(b, _compose(a, b.leaves, b))


def _compose(
    a: Layout, leaves: Sequence[tuple[Int, Int]], b: Layout | None = None
) -> list[list[tuple[Int, Int]]]:
    """For each leaf of B, the modes of ``A o B`` that replace it, outermost first; ``b`` is only
    for the messages.
    """
    form = _jumps(a)
    slope, jumps, empty = form
    if not _static(leaves, form):
        return _compose_symbolic(a, leaves, b or from_leaves(leaves), form)
    if empty:
        if any(n > 1 and d for n, d in leaves) and all(n for n, _ in leaves):
            raise LayoutError(
                f"composition({a!r}, {b or from_leaves(leaves)!r}): B reaches beyond index 0, the "
                "only one A has"
            )
        return [[(n, 0)] for n, _ in leaves]
    result: list[list[tuple[int, int]]] = []
    carries = [0] * len(
        jumps
    )  # for each jump, the largest sum of remainders that an index of B reaches
    for n, d in leaves:
        if n <= 1 or d == 0:
            if n == 0:
                return [[(n, 0)] for n, _ in leaves]
            result.append([(n, 0)])
            continue
        if d < 0:
            if not all(n for n, _ in leaves):
                return [[(n, 0)] for n, _ in leaves]
            raise LayoutError(
                f"composition({a!r}, {b or from_leaves(leaves)!r}): leaf {n}:{d} of B reaches the "
                f"negative index {d}"
            )
        modes: list[tuple[int, int]] = []
        while True:
            run, value, clash = n, slope * d, 0
            remainders = []
            for q, c in jumps:
                whole, rest = divmod(d, q)
                value += c * whole
                remainders.append(rest)
                if rest and run * rest >= q + rest:
                    run, clash = (
                        -(-q // rest),
                        q,
                    )  # after so many steps of d the remainders carry across q
            if n % run:
                return _compose_rarely(
                    a,
                    leaves,
                    b,
                    form,
                    f"leaf {n}:{d} of B crosses {_boundary(a, clash)}, after {run} steps, and "
                    f"{run} does not divide {n}",
                )
            for j, rest in enumerate(remainders):
                carries[j] += (run - 1) * rest
            modes.append((run, value))
            if run == n:
                break
            n //= run
            d *= run
        modes.reverse()
        result.append(modes)
    for (q, _), carry in zip(jumps, carries, strict=True):
        if carry >= q:
            return _compose_rarely(
                a,
                leaves,
                b,
                form,
                f"leaves {', '.join(f'{n}:{d}' for n, d in leaves if n > 1 and d % q)} of B carry "
                f"across {_boundary(a, q)}",
            )
    return result


def _boundary(a: Layout, q: Int) -> str:
    """Where index ``q`` falls in A, for a message: the leaf that ends there and the one that
    begins.
    """
    reach: Int = 1
    inner = None
    for n, d in reversed(a.leaves):
        if inner is not None and reach == q and n != 1:
            return f"index {q} of A, where its leaf {inner[0]}:{inner[1]} ends and {n}:{d} begins"
        reach = reach * n
        inner = (n, d) if n != 1 else inner
    return f"index {q} of A"


def _static(leaves: Sequence[tuple[Int, Int]], form: _Jumps) -> bool:
    for n, d in leaves:
        if type(n) is not int or type(d) is not int:
            return False
    for q, c in form.jumps:
        if type(q) is not int or type(c) is not int:
            return False
    return type(form.slope) is int


def _rebuild(b: Layout, modes: list[list[tuple[Int, Int]]]) -> Layout:
    """B's nesting with each leaf replaced by its list of (size, stride)."""
    if type(b.shape) is not tuple:
        return from_leaves(modes[0])
    if b.depth == 1:
        return _joined(modes)
    position = iter(modes)

    def walk(shape: IntTuple) -> tuple[IntTuple, IntTuple]:
        if type(shape) is tuple:
            parts = [walk(item) for item in shape]
            return tuple([s for s, _ in parts]), tuple([d for _, d in parts])
        leaf = next(position)
        if len(leaf) == 1:
            return leaf[0]
        return tuple([n for n, _ in leaf]), tuple([d for _, d in leaf])

    return make(*walk(b.shape))


def _joined(modes: list[list[tuple[Int, Int]]]) -> Layout:
    """The layout with one top-level mode for each list of (size, stride)."""
    shape: list[IntTuple] = []
    stride: list[IntTuple] = []
    for leaf in modes:
        if len(leaf) == 1:
            n, d = leaf[0]
        else:
            n, d = tuple([n for n, _ in leaf]), tuple([d for _, d in leaf])
        shape.append(n)
        stride.append(d)
    return make(tuple(shape), tuple(stride))


def _compose_rarely(
    a: Layout, leaves: Sequence[tuple[int, int]], b: Layout | None, form: _Jumps, clash: str
) -> list[list[tuple[int, int]]]:
    """A composition that carries across a jump of A: an answer exists only if the jumps crossed
    cancel, everywhere.

    Carries are never negative, so jumps of one sign cannot cancel: the carry found is the proof
    that there is no answer.
    """
    b = b or from_leaves(leaves)
    error = f"composition({a!r}, {b!r}) is not a layout: {clash}"
    if b.size == 0:
        return [[(n, 0)] for n, _ in leaves]
    signs = {c > 0 for _, c in form.jumps}
    if len(signs) < 2:
        raise LayoutError(error)
    if b.size > ENUMERATION_LIMIT:
        raise LayoutError(
            f"{error}. The jumps of A have both signs, and whether they cancel on all {b.size} "
            f"indices of B is decided only up to {ENUMERATION_LIMIT}; coalesce or split B"
        )
    modes: list[list[tuple[int, int]]] = []
    for n, d in b.leaves:
        leaf: list[tuple[int, int]] = []
        while n > 1:
            step = form(d)
            run = next((i for i in range(2, n) if form(i * d) != i * step), n)
            if n % run:
                raise LayoutError(error)
            leaf.append((run, step))
            n, d = n // run, d * run
        leaf.reverse()
        modes.append(leaf or [(n, 0)])
    for coordinate in cartesian(*(range(n) for n, _ in b.leaves)):
        index = sum(i * d for i, (_, d) in zip(coordinate, b.leaves, strict=True))
        value = 0
        for i, leaf in zip(coordinate, modes, strict=True):
            for n, d in reversed(leaf):
                value += i % n * d
                i //= n
        if value != form(index):
            raise LayoutError(error)
    return modes


def _compose_symbolic(
    a: Layout, leaves: Sequence[tuple[Int, Int]], b: Layout, form: _Jumps
) -> list[list[tuple[Int, Int]]]:
    """:func:`composition` by proof: each jump must be passed over, never reached, or met exactly.

    The same steps as for ints, but a size or stride is compared by proof, and where none is found
    the fact that is missing is the error.
    """
    context = f"composition({a!r}, {b!r})"
    result: list[list[tuple[Int, Int]]] = []
    carries: list[list[Int]] = [[] for _ in form.jumps]
    for n, d in leaves:
        if is_zero(n - 1) or is_zero(d):
            result.append([(n, 0)])
            continue
        if form.empty:
            raise LayoutError(f"{context}: B reaches beyond index 0, the only one A has")
        if not require(is_nonnegative(d), f"{d} >= 0", context):
            raise LayoutError(f"{context}: leaf {n}:{d} of B reaches the negative index {d}")
        modes: list[tuple[Int, Int]] = []
        while True:
            run, remainders, value = n, [], form.slope * d
            for q, c in form.jumps:
                if type(q) is int and type(d) is int:
                    whole, rest = divmod(d, q)
                    value = value + c * whole
                    remainders.append(rest)
                    if rest and not is_nonnegative(q - 1 - (n - 1) * rest):
                        met = -(-q // rest)
                        if run is n or is_less(met, run):
                            run = met
                    continue
                if divides(q, d):
                    remainders.append(0)
                    value = value + c * quotient(d, q)
                    continue
                # From here on d < q: the jump is beyond reach, or it is met after exactly q / d
                # steps.
                if is_nonnegative(q - 1 - (n - 1) * d):
                    remainders.append(d)
                    continue
                aligned = divides(d, q)
                if aligned is None:
                    raise Undecided(divisibility(q, d), context)
                if not aligned:
                    raise LayoutError(
                        f"{context} is not a layout for all values: leaf {n}:{d} of B crosses a "
                        f"mode boundary of A, {q}"
                    )
                met = quotient(q, d)
                remainders.append(d)
                if run is n or is_less(met, run):
                    run = met
            if run is not n:
                if is_zero(run - n):
                    run = n
                elif not require(divides(run, n), divisibility(n, run), context):
                    raise LayoutError(
                        f"{context} is not a layout: leaf {n}:{d} of B crosses a mode boundary of "
                        f"A after {run} steps, and {run} does not divide {n}"
                    )
            modes.append((as_int(run), as_int(value)))
            for carry, rest in zip(carries, remainders, strict=True):
                carry.append((run - 1) * rest)
            if run is n:
                break
            n, d = quotient(n, run), d * run
        modes.reverse()
        result.append(modes)
    for (q, _), carry in zip(form.jumps, carries, strict=True):
        total = sum(carry, 0)
        if not require(is_less(total, q), f"{total} < {q}", context):
            raise LayoutError(
                f"{context} is not a layout for all values: the leaves of B together carry across "
                f"a mode boundary of A, {q}"
            )
    return result


def _by_mode(
    operation: Callable[[Layout, Tiler], Layout], a: Layout, tiler: Sequence[Tiler]
) -> Layout:
    if a.rank < len(tiler):
        raise LayoutError(f"the tiler {tiler} names {len(tiler)} modes; {a!r} has {a.rank}")
    modes = tuple(a)
    return make_layout(
        *(m if t is None else operation(m, t) for m, t in zip(modes, tiler, strict=False)),
        *modes[len(tiler) :],
    )


# -- complement and divides ------------------------------------------------------------------------


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
            raise LayoutError(f"complement({layout!r}): an empty layout has no complement")
        if type(d) is int and d < 0:
            raise LayoutError(f"complement({layout!r}): stride {d} of mode {n}:{d} is negative")
        modes.append((d, n))
    try:
        modes.sort()
    except TypeError:  # comparing symbols
        modes.sort(key=cmp_to_key(_compare))
    out: list[tuple[Int, Int]] = []  # (size, stride), innermost first
    current: Int = 1
    for d, n in modes:
        if type(d) is int and type(current) is int:
            gap, rest = divmod(d, current)
            exact: bool = rest == 0
        else:
            exact = require(
                divides(current, d), divisibility(d, current), f"complement({layout!r})"
            )
            gap = quotient(d, current) if exact else 0
        if not exact or (type(gap) is int and gap == 0):
            raise LayoutError(
                f"complement({layout!r}) does not exist: mode {n}:{d} does not start at a multiple "
                f"of {current}, where the modes inside it end"
            )
        if type(gap) is not int or gap != 1:
            out.append((gap, current))
        current = n * d
    if type(bound) is int and type(current) is int:
        last: Int = -(-bound // current)
    elif divides(current, bound):
        last = quotient(bound, current)
    elif is_nonnegative(current - bound):
        last = 1
    elif (whole := ceil_quotient(bound, current)) is not None:
        last = whole
    else:
        raise Undecided(divisibility(bound, current), f"complement({layout!r}, {bound})")
    if type(last) is int and last == 0:
        return [(0, 0)]
    if type(last) is not int or last != 1:
        out.append((last, current))
    out.reverse()
    return _merged(out)


def _merged(leaves: list[tuple[Int, Int]]) -> list[tuple[Int, Int]]:
    """Leaves, outermost first, with neighbours merged where one continues the other."""
    merged: list[tuple[Int, Int]] = []
    for n, d in leaves:
        if merged and merged[-1][1] == n * d:
            n = merged.pop()[0] * n
        merged.append((n, d))
    return merged


def _compare(a: tuple[Int, ...], b: tuple[Int, ...]) -> int:
    """Order modes (stride, size, ...), with symbols, by proof."""
    for x, y in zip(a[:2], b[:2], strict=True):
        if x == y or is_zero(x - y):
            continue
        if is_less(x, y):
            return -1
        if is_less(y, x):
            return 1
        # A tie in the making (x <= y): the size decides when the strides turn out equal, so the
        # order of strides stands.
        if is_nonnegative(y - x):
            return -1
        if is_nonnegative(x - y):
            return 1
        raise Undecided(f"{x} < {y}", "complement")
    return 0


def logical_divide(a: Layout, tiler: Tiler) -> Layout:
    """A's indices as (tile, rest): mode 0 runs inside a tile of B's elements, mode 1 over the
    tiles.

    Post-condition: ``logical_divide(A, B) == composition(A, make_layout(B, complement(B,
    size(A))))``, so the result at ``(i, j)`` is ``A(B(i) + complement(B, size(A))(j))``. Where B
    does not divide A, the last tile runs on beyond A's last index: the caller predicates. A tuple
    of tilers divides mode by mode.

    >>> logical_divide(Layout(16), Layout(4))
    (4,4):(1,4)
    >>> logical_divide(Layout((4, 16)), (2, None))
    ((2,2),16):((16,32),1)
    """
    if tiler is None:
        return a
    if not isinstance(tiler, Layout):
        if isinstance(tiler, (tuple, list)):
            return _by_mode(logical_divide, a, tiler)
        tiler = Layout(tiler)
    rest = _complement(tiler, a.size)
    modes = _compose(a, (*tiler.leaves, *rest))
    count = len(tiler.leaves)
    tile = _rebuild(tiler, modes[:count])
    over = modes[count:]
    whole = from_leaves(over[0]) if len(over) == 1 else _joined(over) if over else make(1, 0)
    return make((tile.shape, whole.shape), (tile.stride, whole.stride))


def _unzip(operation: Callable[[Layout, Tiler], Layout], a: Layout, tiler: Tiler) -> Layout:
    """``operation`` mode by mode, the first halves gathered into mode 0 and the second halves into
    mode 1.
    """
    if tiler is None:
        return make_layout(Layout(1, 0), a)
    if not isinstance(tiler, (tuple, list)):
        return operation(a, tiler)
    if a.rank < len(tiler):
        raise LayoutError(f"the tiler {tiler} names {len(tiler)} modes; {a!r} has {a.rank}")
    modes = tuple(a)
    split = [_unzip(operation, m, t) for m, t in zip(modes, tiler, strict=False)]
    return make_layout(
        make_layout(*(s[0] for s in split)),
        make_layout(*(s[1] for s in split), *modes[len(tiler) :]),
    )


def zipped_divide(a: Layout, tiler: Tiler) -> Layout:
    """:func:`logical_divide` by mode, gathered as ``((tile0, tile1, ...), (rest0, rest1, ...,
    untouched modes))``.

    >>> zipped_divide(Layout((4, 16)), (2, 4))
    ((2,4),(2,4)):((16,1),(32,4))
    """
    return _unzip(logical_divide, a, tiler)


def tiled_divide(a: Layout, tiler: Tiler) -> Layout:
    """:func:`zipped_divide` with the rests as modes of their own: ``((tile0, tile1, ...), rest0,
    rest1, ...)``.

    >>> tiled_divide(Layout((4, 16)), (2, 4))
    ((2,4),2,4):((16,1),32,4)
    """
    zipped = zipped_divide(a, tiler)
    return make_layout(zipped[0], *zipped[1])


# -- products --------------------------------------------------------------------------------------


def logical_product(a: Layout, tiler: Tiler) -> Layout:
    """A repeated over B: mode 0 is A, mode 1 runs over the copies of A, in the order of B.

    Post-condition: ``logical_product(A, B)(i, j) == A(i) + complement(A, size(A) *
    cosize(B))(B(j))``; the copies do not overlap. A tuple of tilers multiplies mode by mode.

    >>> logical_product(Layout((2, 2), (2, 1)), Layout(6))
    ((2,2),6):((2,1),4)
    """
    if tiler is None:
        return a
    if not isinstance(tiler, Layout):
        if isinstance(tiler, (tuple, list)):
            return _by_mode(logical_product, a, tiler)
        tiler = Layout(tiler)
    return make_layout(a, composition(complement(a, a.size * tiler.cosize), tiler))


def zipped_product(a: Layout, tiler: Tiler) -> Layout:
    """:func:`logical_product` by mode, gathered as ``((a0, a1, ...), (copies0, copies1, ...))``."""
    return _unzip(logical_product, a, tiler)


def tiled_product(a: Layout, tiler: Tiler) -> Layout:
    """:func:`zipped_product` with the copies as modes of their own."""
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

    >>> raked_product(Layout((2, 5)), Layout((3, 4)))
    ((2,3),(5,4)):((5,40),(1,10))
    """
    blocks, copies = _ranked_product(block, tiler)
    return make_layout(*(coalesce(make_layout(b, t)) for b, t in zip(blocks, copies, strict=True)))


# -- inverses --------------------------------------------------------------------------------------


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
    """How much of mode n:d a chain may use: all of it, or as much as lets another mode go on."""
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
                    f"left_inverse({layout!r}) does not exist: mode {n}:{d} has no positive stride"
                )
            modes.append((d, n, weight))
        weight = weight * n
    modes.sort(key=cmp_to_key(_compare))
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
        if not require(divides(d, e), divisibility(e, d), context):
            raise LayoutError(
                f"{context} is not a layout: stride {d} does not divide the next stride, {e}"
            )
        if not require(is_nonnegative(e - n * d), f"{n * d} <= {e}", context):
            raise LayoutError(
                f"{context} does not exist: modes {n}:{d} and {following[1]}:{e} overlap"
            )
        out.append((quotient(e, d), w))
    out.reverse()
    return from_leaves(_merged(out))
