"""The sizes of local tensors in a compiled program.

The rule is that of :func:`cute_sharding.sharding.deal.local_size`, for even and uneven blocks; here
it is applied to symbolic sizes. Facts that it has to know become guards (:mod:`.symbols`). Callers:
:mod:`..replaced.tracing` (tensors that enter a graph, and shapes and sizes that torch computes),
:mod:`..run.in_graphs` (results of the op that exchanges). :func:`.symbols.equate` adds the guard
that the local tensor of a graph's input has the size of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from cute_sharding.dtensor.compiled.symbols import hints_of, symbols_of, to_sizes, to_symints
from cute_sharding.dtensor.replaced.symints import is_empty, is_truly
from cute_sharding.layout import Undecided
from cute_sharding.sharding.chains import Chains
from cute_sharding.sharding.deal import kinds_of_device, local_size

Cut: TypeAlias = tuple[Any, int, int]  # split factor, devices, this device's coordinate


def local_size_of(n: Any, *cuts: Cut) -> Any:
    """The number of rows, of ``n``, that a device holds after ``cuts``, each (split factor,
    devices, its coordinate); a number or a SymInt, like the arguments.

    Raises:
        Undecided: it depends on sizes that have no value yet.
    """
    given = n, *(split_factor for split_factor, _, _ in cuts)
    with symbols_of(*given):
        rows = to_sizes(n)
        if isinstance(n, torch.SymInt):
            now = hints_of(to_sizes(given))  # None: no value yet
            if None not in now:
                kinds = _by_kind(rows, now, cuts)
                # A size of 0 or 1 becomes a constant, and the compiler then solves for the global
                # size. It does not if it has a fact about the fullest device.
                is_truly(to_symints(kinds[max(kinds)]) >= 2)
        for split_factor, parts, coordinate in cuts:
            rows = local_size(rows, to_sizes(split_factor), parts, coordinate)
        local = to_symints(rows, local=True)
        # In a graph, no rows are the number 0, as they are for an empty tensor that enters one.
        return 0 if is_empty(local) else local


def local_shape_of(shape: Sequence[Any], chains: Chains, mesh: Any) -> list[Any]:
    """The sizes of this rank's part of a tensor with these chains of cuts."""
    device = mesh.get_coordinate()
    return [
        local_size_of(n, *((factor, mesh.size(m), device[m]) for m, factor in chain))
        for n, chain in zip(shape, chains)
    ]


def _by_kind(rows: Any, now: Sequence[int], cuts: Sequence[Cut]) -> dict[int, Any]:
    """The rows of one device of each kind, keyed by their present number, of ``rows``, which are
    ``now[0]`` at present; the rest of ``now`` are the split factors.

    Every question about a device's own rows is asked for all kinds of device. It becomes a guard on
    the global size, and such facts decide what is a symbol or a constant, free or moved: devices
    that learn different facts would wait in different collectives.
    """
    kinds = {now[0]: rows}
    for factor, (split_factor, parts, _) in zip(now[1:], cuts):
        parents, kinds = kinds, {}
        for n, whole in parents.items():
            for device in kinds_of_device(n, factor, parts):
                mine = local_size(whole, to_sizes(split_factor), parts, device)
                kinds.setdefault(local_size(n, factor, parts, device), mine)
    return kinds


def local_size_if_known(n: Any, *cuts: Cut) -> Any:
    """:func:`local_size_of`; None if it cannot be computed."""
    try:
        return local_size_of(n, *cuts)
    except Undecided:
        return None
