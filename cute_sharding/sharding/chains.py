"""A sharding as the cuts of each tensor dim: the form that exchanges compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Cut: TypeAlias = "tuple[int, int] | None"
"""The cut that a mesh dim makes: (tensor dim, split factor), or None if it cuts nothing
(Replicate, Partial).

>>> cuts: list[Cut] = [(1, 1), None]  # Shard(1) on one mesh dim, Replicate on the other
>>> from cute_sharding.sharding.chains import chains_of
>>> chains_of(cuts, 2, (2, 2))
((), ((0, 1),))
"""

# For each tensor dim, the (mesh dim, split factor) pairs that cut it, in the order of the cuts.
# Mesh dims of one device cut nothing and are left out.
Chains: TypeAlias = "tuple[tuple[tuple[int, int], ...], ...]"
Device: TypeAlias = "tuple[int, ...]"


def chains_of(cuts: Sequence[Cut], ndim: int, mesh: Sequence[int]) -> Chains:
    """The chains of cuts, one for each mesh dim, that are applied from left to right."""
    chains: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    for m, (cut, n) in enumerate(zip(cuts, mesh)):
        if cut is not None and n > 1:
            chains[cut[0]].append((m, cut[1]))
    return tuple(map(tuple, chains))


def chain_of(
    chain: tuple[tuple[int, int], ...], mesh: Sequence[int], device: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """The cuts of one tensor dim for one device: (split factor, devices, the device's coordinate)
    of each cut.
    """
    return tuple([(split_factor, mesh[m], device[m]) for m, split_factor in chain])


def cutting(chains: Chains) -> frozenset[int]:
    """The mesh dims that cut a tensor dim."""
    return frozenset([m for chain in chains for m, _ in chain])


def appended(chains: Chains, m: int, dim: int, split_factor: int) -> Chains:
    """The chains with one more cut, which divides what the others leave."""
    return tuple(
        [(*chain, (m, split_factor)) if d == dim else chain for d, chain in enumerate(chains)]
    )


def up_to(chain: tuple[tuple[int, int], ...], m: int) -> tuple[tuple[int, int], ...] | None:
    """The cuts of one tensor dim up to mesh dim ``m``'s; None if ``m`` does not cut it."""
    for i, (mesh_dim, _) in enumerate(chain):
        if mesh_dim == m:
            return chain[: i + 1]
    return None


def cuts_up_to(chains: Chains, m: int) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """The tensor dim that mesh dim ``m`` cuts, and its cuts :func:`up_to` that one; None if it cuts
    nothing.
    """
    for d, chain in enumerate(chains):
        found = up_to(chain, m)
        if found is not None:
            return d, found
    return None


def placements_text(
    chains: Chains,
    mesh_dims: int,
    names: Sequence[str] | None = None,
    pending: Sequence[tuple[int, str]] = (),
) -> str:
    """The chains and pending reductions as placements, with the order of the cuts if it is not that
    of the mesh dims. ``names``: the names of the mesh dims.

    >>> placements_text((((0, 1), (2, 2)), ()), 3, pending=[(1, "sum")])
    '[S(0), P(sum), _S(0,2)]'
    >>> placements_text((((1, 1), (0, 1)),), 2, ("dp", "tp"))
    '[S(0), S(0)], cut in the order tp, dp'
    """
    placed = ["R"] * mesh_dims
    for m, op in pending:
        placed[m] = f"P({op})" if " " not in op else "P"
    for dim, chain in enumerate(chains):
        for m, factor in chain:
            placed[m] = f"S({dim})" if factor == 1 else f"_S({dim},{factor})"
    said = f"[{', '.join(placed)}]"
    if any(list(chain) != sorted(chain) for chain in chains):
        order = [str(m if names is None else names[m]) for chain in chains for m, _ in chain]
        said += f", cut in the order {', '.join(order)}"
    return said
