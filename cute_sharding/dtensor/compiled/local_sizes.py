"""The sizes of local tensors in a compiled program.

The rule is that of :func:`cute_sharding.sharding.deal.local_size`, for blocks that are uneven as
for others; here it is asked of sizes that are symbols. What it has to know becomes a guard
(:mod:`.symbols`). Asked from: :mod:`..replaced.tracing` (tensors that enter a graph, and the
shapes and sizes that torch works out), :mod:`..run.dynamic` (what comes of the op that
redistributes). That the local tensor of a graph's input has the size that the rule says is made a
guard by :func:`.symbols.equate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from cute_sharding.dtensor.compiled.symbols import hinted, known, symbols_of, unknown
from cute_sharding.dtensor.replaced.symints import is_empty, is_truly
from cute_sharding.layout import Undecided
from cute_sharding.sharding.chains import Chains
from cute_sharding.sharding.deal import kinds_of_device, local_size

Cut: TypeAlias = tuple[Any, int, int]  # split factor, devices, this device's coordinate


def local_size_of(n: Any, *cuts: Cut) -> Any:
    """How many of ``n`` rows a device holds after ``cuts``, each (split factor, devices, its
    coordinate); numbers or SymInts, as what is given.

    Raises:
        Undecided: it depends on sizes that have no value yet.
    """
    given = n, *(split_factor for split_factor, _, _ in cuts)
    with symbols_of(*given):
        rows = known(n)
        if isinstance(n, torch.SymInt):
            now = hinted(known(given))  # None: no value yet
            if None not in now:
                kinds = _by_kind(rows, now, cuts)
                # A size of 0 or 1 becomes a constant, and then the compiler solves for the global
                # size. It does not where it has been told of the fullest device.
                is_truly(unknown(kinds[max(kinds)]) >= 2)
        for split_factor, parts, coordinate in cuts:
            rows = local_size(rows, known(split_factor), parts, coordinate)
        local = unknown(rows, local=True)
        # No rows are the number in a graph, as they are where a tensor of none enters one.
        return 0 if is_empty(local) else local


def local_shape_of(shape: Sequence[Any], chains: Chains, mesh: Any) -> list[Any]:
    """The sizes of this rank's part of a tensor that is cut as ``chains`` say."""
    device = mesh.get_coordinate()
    return [
        local_size_of(n, *((factor, mesh.size(m), device[m]) for m, factor in chain))
        for n, chain in zip(shape, chains)
    ]


def _by_kind(rows: Any, now: Sequence[int], cuts: Sequence[Cut]) -> dict[int, Any]:
    """The rows of one device of each kind, by how many these are now, of ``rows`` that are
    ``now[0]``; the others of ``now`` are the split factors.

    What is asked to find out a device's own is asked so of all kinds. It becomes a guard on the
    global size, and what is a symbol or a constant, free or moved, is decided by what is known of
    that: devices that have learnt other facts would wait in other collectives.
    """
    kinds = {now[0]: rows}
    for factor, (split_factor, parts, _) in zip(now[1:], cuts):
        parents, kinds = kinds, {}
        for n, whole in parents.items():
            for device in kinds_of_device(n, factor, parts):
                mine = local_size(whole, known(split_factor), parts, device)
                kinds.setdefault(local_size(n, factor, parts, device), mine)
    return kinds


def local_size_if_known(n: Any, *cuts: Cut) -> Any:
    """:func:`local_size_of`; None where it cannot be said."""
    try:
        return local_size_of(n, *cuts)
    except Undecided:
        return None
