"""Composition where sizes or strides are symbols: the steps of compose.py, by proof."""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.layout.algebra.jumps import Jumps
from cute_sharding.layout.errors import ROW_MAJOR, LayoutError, Undecided
from cute_sharding.layout.layout import Layout
from cute_sharding.layout.symbolic import (
    Int,
    as_int,
    divides,
    divisibility,
    is_less,
    is_nonnegative,
    is_zero,
    quotient,
    require,
)


def compose_symbolic(
    a: Layout, leaves: Sequence[tuple[Int, Int]], b: Layout, form: Jumps
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
                whole, rest, met = _at_jump(q, n, d, context)
                value = value + c * whole
                remainders.append(rest)
                if met is not None and (run is n or is_less(met, run)):
                    run = met
            if run is not n:
                if is_zero(run - n):
                    run = n
                elif not require(divides(run, n), divisibility(n, run), context):
                    raise LayoutError(
                        f"{context} is not a layout: leaf {n}:{d} of B crosses a mode boundary of "
                        f"A after {run} steps, and {run} does not divide {n}. {ROW_MAJOR}"
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
                f"a mode boundary of A, {q}. {ROW_MAJOR}"
            )
    return result


def _at_jump(q: Int, n: Int, d: Int, context: str) -> tuple[Int, Int, Int | None]:
    """What n steps of d do at the multiples of q: how many a step passes over, what is left of the
    step, and after how many steps that meets the next one, None for never.
    """
    if type(q) is int and type(d) is int:
        whole, rest = divmod(d, q)
        beyond_reach = rest == 0 or is_nonnegative(q - 1 - (n - 1) * rest)
        return whole, rest, None if beyond_reach else -(-q // rest)
    if divides(q, d):
        return quotient(d, q), 0, None
    # From here on d < q: the jump is beyond reach, or it is met after exactly q / d steps.
    if is_nonnegative(q - 1 - (n - 1) * d):
        return 0, d, None
    aligned = divides(d, q)
    if aligned is None:
        raise Undecided(divisibility(q, d), context)
    if not aligned:
        raise LayoutError(
            f"{context} is not a layout for all values: leaf {n}:{d} of B crosses a mode boundary "
            f"of A, {q}. {ROW_MAJOR}"
        )
    return 0, d, quotient(q, d)
