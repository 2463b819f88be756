"""A sharding as its cuts, tensor dim by tensor dim: the form in which redistribution reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cute_sharding.views import Cut

# For each tensor dim the (mesh dim, split factor) that cut it, in the order of the cuts. Mesh dims of one device cut nothing and are left out.
Chains: TypeAlias = "tuple[tuple[tuple[int, int], ...], ...]"
Device: TypeAlias = "tuple[int, ...]"


def chains_of(cuts: Sequence[Cut], ndim: int, mesh: Sequence[int], order: Sequence[int] | None = None) -> Chains:
    """Cuts, one for each mesh dim, as chains: applied left to right, or in the ``order`` of mesh dims given."""
    chains: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    for m in range(len(mesh)) if order is None else order:
        cut = cuts[m]
        if cut is not None and mesh[m] > 1:
            chains[cut[0]].append((m, cut[1]))
    return tuple(map(tuple, chains))


def cutting(chains: Chains) -> frozenset[int]:
    """The mesh dims that cut something."""
    return frozenset(m for chain in chains for m, _ in chain)
