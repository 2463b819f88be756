"""The sizes of local tensors in a compiled program.

The rule is that of :func:`cute_sharding.sharding.deal.local_size`, for blocks that are uneven as
for others; here it is asked of sizes that are symbols. What it has to know becomes a guard
(:mod:`.symbols`). Asked from: :mod:`..torch_private.tracing` (tensors that enter a graph, and the
shapes and sizes that torch works out), :mod:`..redistributing.dynamic` (what comes of the op that
redistributes). That the local tensor of a graph's input has the size that the rule says is made a
guard by :func:`.symbols.equate`.
"""

from __future__ import annotations

from typing import Any

from cute_sharding.dtensor.compiled.symbols import known, symbols_of, unknown
from cute_sharding.layout import Undecided
from cute_sharding.sharding.deal import local_size


def local_size_of(n: Any, *cuts: tuple[Any, int, int]) -> Any:
    """How many of ``n`` rows a device holds after ``cuts``, each (split factor, devices, its
    coordinate); numbers or SymInts, as what is given.

    Raises:
        Undecided: it depends on sizes that have no value yet.
    """
    with symbols_of(n, *(split_factor for split_factor, _, _ in cuts)):
        rows = known(n)
        for split_factor, parts, coordinate in cuts:
            rows = local_size(rows, known(split_factor), parts, coordinate)
        return unknown(rows, local=True)


def local_size_if_known(n: Any, *cuts: tuple[Any, int, int]) -> Any:
    """:func:`local_size_of`; None where it cannot be said."""
    try:
        return local_size_of(n, *cuts)
    except Undecided:
        return None
