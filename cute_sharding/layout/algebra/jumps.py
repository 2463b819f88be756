"""The normal form that all of composition uses.

Let the leaves of A, innermost first, be ``n1:e1, n2:e2, ...`` and let ``Qk = n1 * ... * nk`` be the
index at which leaf k is used up. Then, for every index x,

    A(x) = e1 * x + sum_k ck * floor(x / Qk),        ck = e(k+1) - nk * ek:

a line, plus a *jump* ``ck`` at each multiple of Qk. A jump of 0 is no jump (the leaves coalesce),
and the outermost leaf never ends. So A is additive on ``x + y`` exactly when the carries of x + y
across the Qk, weighted by the jumps, add up to 0.
"""

from __future__ import annotations

from typing import NamedTuple

from cute_sharding.layout.layout import Layout
from cute_sharding.layout.symbolic import Int, is_zero


class Jumps(NamedTuple):
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


def jumps_of(layout: Layout) -> Jumps:
    """The normal form of ``layout``."""
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
                return Jumps(0, [], True)
        if not started:
            slope, started = d, True
        elif d != expected:
            c = d - expected
            if type(c) is int or not is_zero(c):
                jumps.append((q, c))
        q = q * n
        expected = n * d
    return Jumps(slope, jumps, not started)
