"""Composition, ``A o B``: of numbers by arithmetic, rarely by enumeration. What symbols need is in
compose_symbolic.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as cartesian

from cute_sharding.layout.algebra.compose_symbolic import compose_symbolic
from cute_sharding.layout.algebra.jumps import Jumps, jumps_of
from cute_sharding.layout.algebra.tiler import Tiler, by_mode
from cute_sharding.layout.errors import ROW_MAJOR, LayoutError
from cute_sharding.layout.layout import IntTuple, Layout, from_leaves, make
from cute_sharding.layout.symbolic import Int

# Jumps of both signs may cancel. Such compositions are rare and are decided by enumeration up to
# this many indices.
ENUMERATION_LIMIT = 1 << 16


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
            return by_mode(composition, a, b)
        return composition(a, Layout(b))
    return rebuild(b, compose_leaves(a, b.leaves, b))


def compose_leaves(
    a: Layout, leaves: Sequence[tuple[Int, Int]], b: Layout | None = None
) -> list[list[tuple[Int, Int]]]:
    """For each leaf of B, the modes of ``A o B`` that replace it, outermost first; ``b`` is only
    for the messages.
    """
    form = jumps_of(a)
    slope, jumps, empty = form
    if not _static(leaves, form):
        return compose_symbolic(a, leaves, b or from_leaves(leaves), form)
    if empty:
        if any(n > 1 and d for n, d in leaves):
            return _beyond(a, leaves, b, "B reaches beyond index 0, the only one A has")
        return [[(n, 0)] for n, _ in leaves]
    result: list[list[tuple[int, int]]] = []
    # For each jump, the largest sum of remainders that an index of B reaches.
    carries = [0] * len(jumps)
    for n, d in leaves:
        if n <= 1 or d == 0:
            if n == 0:
                return [[(n, 0)] for n, _ in leaves]
            result.append([(n, 0)])
            continue
        if d < 0:
            return _beyond(a, leaves, b, f"leaf {n}:{d} of B reaches the negative index {d}")
        modes: list[tuple[int, int]] = []
        while True:
            run, value, clash = n, slope * d, 0
            remainders = []
            for q, c in jumps:
                whole, rest = divmod(d, q)
                value += c * whole
                remainders.append(rest)
                if rest and run * rest >= q + rest:
                    # After so many steps of d the remainders carry across q.
                    run, clash = -(-q // rest), q
            if n % run:
                why = (
                    f"leaf {n}:{d} of B crosses {_boundary(a, clash)}, after {run} steps, and "
                    f"{run} does not divide {n}"
                )
                return _compose_rarely(a, leaves, b, form, why)
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
            these = ", ".join(f"{n}:{d}" for n, d in leaves if n > 1 and d % q)
            why = f"leaves {these} of B carry across {_boundary(a, q)}"
            return _compose_rarely(a, leaves, b, form, why)
    return result


def _beyond(
    a: Layout, leaves: Sequence[tuple[int, int]], b: Layout | None, why: str
) -> list[list[tuple[int, int]]]:
    """A composition with leaves of B that reach where A has no value: an error, but where B is
    empty and reaches nothing.
    """
    if all(n for n, _ in leaves):
        raise LayoutError(f"composition({a!r}, {b or from_leaves(leaves)!r}): {why}")
    return [[(n, 0)] for n, _ in leaves]


def _static(leaves: Sequence[tuple[Int, Int]], form: Jumps) -> bool:
    for n, d in leaves:
        if type(n) is not int or type(d) is not int:
            return False
    for q, c in form.jumps:
        if type(q) is not int or type(c) is not int:
            return False
    return type(form.slope) is int


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


def _compose_rarely(
    a: Layout, leaves: Sequence[tuple[int, int]], b: Layout | None, form: Jumps, clash: str
) -> list[list[tuple[int, int]]]:
    """A composition that carries across a jump of A: an answer exists only if the jumps crossed
    cancel, everywhere.

    Carries are never negative, so jumps of one sign cannot cancel: the carry found is the proof
    that there is no answer.
    """
    b = b or from_leaves(leaves)
    error = f"composition({a!r}, {b!r}) is not a layout: {clash}. {ROW_MAJOR}"
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


def rebuild(b: Layout, modes: list[list[tuple[Int, Int]]]) -> Layout:
    """B's nesting with each leaf replaced by its list of (size, stride)."""
    if type(b.shape) is not tuple:
        return from_leaves(modes[0])
    if b.depth == 1:
        return joined(modes)
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


def joined(modes: list[list[tuple[Int, Int]]]) -> Layout:
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
