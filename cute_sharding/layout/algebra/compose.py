"""Composition, ``A o B``: by arithmetic, for symbols by proof; rarely by enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from itertools import product as cartesian

from cute_sharding.layout.algebra.jumps import Jumps, jumps_of
from cute_sharding.layout.algebra.tiler import Tiler, by_mode
from cute_sharding.layout.errors import ROW_MAJOR, LayoutError, Undecided
from cute_sharding.layout.layout import IntTuple, Layout, from_leaves, make
from cute_sharding.layout.symbolic import (
    Int,
    as_int,
    divides,
    is_less,
    is_nonnegative,
    is_static,
    is_zero,
    quotient,
    require,
)

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
    for n, _ in leaves:
        if type(n) is int and n == 0:
            return [[(n, 0)] for n, _ in leaves]
    try:
        return _composed(a, leaves, jumps_of(a), b)
    except Undecided as error:
        raise Undecided(error.fact, f"composition({a!r}, {b or from_leaves(leaves)!r})") from None


def _composed(
    a: Layout, leaves: Sequence[tuple[Int, Int]], form: Jumps, b: Layout | None
) -> list[list[tuple[Int, Int]]]:
    """Each jump of A must be passed over, never reached, or met exactly; provably, for symbols."""
    result: list[list[tuple[Int, Int]]] = []
    # For each jump, the largest sum of remainders that an index of B reaches.
    carries: list[Int] = [0] * len(form.jumps)
    for n, d in leaves:
        if n == 1 or d == 0 or (not type(n) is int is type(d) and (is_zero(n - 1) or is_zero(d))):
            result.append([(n, 0)])
            continue
        if form.empty:
            raise LayoutError(
                f"composition(A, B) with {_texts(a, leaves, b)}: A has a value only for index 0, "
                "but B has values other than 0"
            )
        if not (d > 0 if type(d) is int else require(is_nonnegative(d), "at most", 0, d)):
            raise LayoutError(
                f"composition(A, B) with {_texts(a, leaves, b)}: the stride {d} of leaf {n}:{d} of "
                "B is negative, but indices of A start at 0"
            )
        modes: list[tuple[Int, Int]] = []
        while True:
            run, value, clash = n, form.slope * d, 0
            remainders = []
            for q, c in form.jumps:
                met = None
                if type(q) is int is type(d):
                    whole, rest = divmod(d, q)
                    if rest and not (type(n) is int and n * rest < q + rest):
                        met = _steps_to_meet(q, n, rest)
                else:  # for symbols: d is a multiple of q, or less than q
                    whole, rest = (quotient(d, q), 0) if divides(q, d) else (0, d)
                    met = _steps_to_meet(q, n, rest)
                value = value + c * whole
                remainders.append(rest)
                if met is not None and (run is n or is_less(met, run)):
                    run, clash = met, q
            if run is not n:
                if is_zero(run - n):
                    run = n
                elif is_zero(run) or not require(divides(run, n), "divides", n, run):
                    return _compose_rarely(a, leaves, b, form, _crossing(a, n, d, clash, run))
            for j, rest in enumerate(remainders):
                carries[j] = carries[j] + (run - 1) * rest
            modes.append((run, value if type(value) is int else as_int(value)))
            if run is n:
                break
            n, d = quotient(n, run), d * run
        modes.reverse()
        result.append(modes)
    for (q, _), carry in zip(form.jumps, carries, strict=True):
        if type(carry) is int is type(q) and carry < q:
            continue
        if not require(is_less(carry, q), "at most", carry + 1, q):
            these = ", ".join(f"{n}:{d}" for n, d in leaves if n != 1 and not divides(q, d))
            why = f"leaves {these} of B carry across {_boundary(a, q)}"
            return _compose_rarely(a, leaves, b, form, why)
    return result


def _steps_to_meet(q: Int, n: Int, rest: Int) -> Int | None:
    """The number of steps, of n, that reach the next multiple of q, where each step leaves ``rest``
    beyond multiples of q. None: no number does; 0: the multiple lies between two steps.

    Raises:
        Undecided: for symbols this is not known.
    """
    if is_zero(rest) or is_nonnegative(q - 1 - (n - 1) * rest):
        return None
    if type(rest) is int and type(q) is int:
        return -(-q // rest)
    aligned = require(divides(rest, q), "divides", q, rest)
    return quotient(q, rest) if aligned else 0


def _texts(a: Layout, leaves: Sequence[tuple[Int, Int]], b: Layout | None) -> str:
    return f"A = {a!r} and B = {b or from_leaves(leaves)!r}"


def _crossing(a: Layout, n: Int, d: Int, q: Int, run: Int) -> str:
    """A part of a message: a leaf crosses index ``q`` of A after so many steps."""
    why = f"leaf {n}:{d} of B crosses {_boundary(a, q)}"
    return why if is_zero(run) else f"{why}, after {run} steps, and {run} does not divide {n}"


def _boundary(a: Layout, q: Int) -> str:
    """A part of a message: the place of index ``q`` in A, by the leaf that ends there and the leaf
    that begins.
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
    a: Layout, leaves: Sequence[tuple[Int, Int]], b: Layout | None, form: Jumps, clash: str
) -> list[list[tuple[Int, Int]]]:
    """A composition that carries across a jump of A: a result exists only if the crossed jumps
    cancel everywhere. For symbols we do not look for one.

    Carries are never negative, so jumps of one sign cannot cancel: the carry found is the proof
    that there is no answer.
    """
    static = is_static(form.slope, *chain(*leaves, *form.jumps))
    values = "" if static else " for all values"
    both = _texts(a, leaves, b)
    error = f"composition(A, B) with {both} is not a layout{values}: {clash}. {ROW_MAJOR}"
    b = b or from_leaves(leaves)
    if not static or len({c > 0 for _, c in form.jumps}) < 2:
        raise LayoutError(error)
    if b.size > ENUMERATION_LIMIT:
        raise LayoutError(
            f"cannot decide whether composition(A, B) with {both} is a layout: {clash}. B has "
            f"{b.size} indices, but composition can check at most {ENUMERATION_LIMIT} indices: "
            f"coalesce or split B. {ROW_MAJOR}"
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
        return join_modes(modes)
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


def join_modes(modes: list[list[tuple[Int, Int]]]) -> Layout:
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
