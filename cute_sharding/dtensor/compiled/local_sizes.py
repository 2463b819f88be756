"""The sizes of local tensors in a compiled program.

The rule is that of :func:`cute_sharding.sharding.deal.local_size`, for blocks that are uneven as
for others; here it is asked of sizes that are symbols. What it has to know becomes a guard
(:mod:`.symbols`). Asked from: :mod:`..torch_private.tracing` (tensors that enter a graph, and the
shapes and sizes that torch works out), :mod:`..redistributing.dynamic` (what comes of the op that
redistributes). That the local tensor of a graph's input has the size that the rule says is made a
guard by :func:`.symbols.equate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding.dtensor.compiled.symbols import hinted, known, symbols_of, unknown
from cute_sharding.dtensor.torch_private.symints import may_be_number, number_of
from cute_sharding.layout import Undecided
from cute_sharding.redistribution.chains import Chains
from cute_sharding.sharding.deal import kinds_of_device, local_size


def local_size_of(n: Any, *cuts: tuple[Any, int, int]) -> Any:
    """How many of ``n`` rows a device holds after ``cuts``, each (split factor, devices, its
    coordinate); numbers or SymInts, as what is given.

    Raises:
        Undecided: it depends on sizes that have no value yet.
    """
    given = n, *(split_factor for split_factor, _, _ in cuts)
    if isinstance(n, torch.SymInt) and may_be_number(n):
        with symbols_of(*given):
            now = hinted(known(given))
        if None not in now and _smallest(now, cuts) < 2:
            n = number_of(n)
    with symbols_of(*given):
        rows = known(n)
        for split_factor, parts, coordinate in cuts:
            rows = local_size(rows, known(split_factor), parts, coordinate)
        return unknown(rows, local=True)


def local_shape_of(shape: Sequence[Any], chains: Chains, mesh: Any) -> list[Any]:
    """The sizes of this rank's part of a tensor that is cut as ``chains`` say."""
    device = mesh.get_coordinate()
    return [
        local_size_of(n, *((factor, mesh.size(m), device[m]) for m, factor in chain))
        for n, chain in zip(shape, chains)
    ]


def _smallest(now: tuple[int, ...], cuts: tuple[tuple[Any, int, int], ...]) -> int:
    """How many rows the device with the fewest has.

    Of 0 and 1 the compiler makes constants. Where that is the size of one device's rows, from which
    it learns what the global size is, that is to be a constant for all: what is free, or moved, is
    decided by it, and they are to decide alike. (Not in a program that has marked dims as dynamic:
    torch refuses it on a device that has no more rows.)
    """
    sizes = {now[0]}
    for split_factor, (_, parts, _) in zip(now[1:], cuts):
        sizes = {
            local_size(n, split_factor, parts, device)
            for n in sizes
            for device in kinds_of_device(n, split_factor, parts)
        }
    return min(sizes)


def local_size_if_known(n: Any, *cuts: tuple[Any, int, int]) -> Any:
    """:func:`local_size_of`; None where it cannot be said."""
    try:
        return local_size_of(n, *cuts)
    except Undecided:
        return None
