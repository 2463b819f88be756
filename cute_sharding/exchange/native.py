"""Steps that are one collective of a whole tensor dim, as every library has it: it joins blocks of
rows (all-gather), hands them out (reduce-scatter), or both (all-to-all).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from cute_sharding.exchange.cost import most_local
from cute_sharding.sharding.chains import Chains
from cute_sharding.sharding.digits import digits


class Along(NamedTuple):
    """A collective among the devices of ``mesh_dims``, in the order in which they cut: it joins
    blocks of rows of the tensor dim ``gathered``, and hands out blocks of rows of ``scattered``;
    None: it does not.

    ``base``: the other cuts, which come first: they say what the devices hold together. ``even``:
    all blocks are equally long.
    """

    mesh_dims: tuple[int, ...]
    gathered: int | None
    scattered: int | None
    base: Chains
    even: bool

    @property
    def dim_of_blocks(self) -> int | None:
        """The one tensor dim whose blocks are joined or handed out; None: there are two."""
        dims = [dim for dim in (self.gathered, self.scattered) if dim is not None]
        return dims[0] if len(dims) == 1 else None


def along(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Chains,
    target: Chains,
    dims: tuple[int, ...],
) -> Along | None:
    """The step between two shardings as a collective of whole tensor dims; None if it is none.

    The mesh dims that change must cut last, in plain blocks. Several of them count as one only if
    sizes divide.
    """
    (before, gathered), (after, scattered) = (_last(chains, dims) for chains in (source, target))
    if (
        before is None
        or after is None
        or before[0] != after[0]
        or (gathered is None and scattered is None)
    ):
        return None
    orders = {order for order in (before[1], after[1]) if order}
    if len(orders) != 1:
        return None
    base, order = before[0], next(iter(orders))
    even = all(
        digits(shape[d], chains[d], mesh) is not None
        for d, chains in ((gathered, source), (scattered, target))
        if d is not None
    )
    if len(order) > 1 and not even:
        return None
    return Along(order, gathered, scattered, base, even)


def _last(
    chains: Chains, dims: tuple[int, ...]
) -> tuple[tuple[Chains, tuple[int, ...]] | None, int | None]:
    """((the chains without ``dims``, these in their order), the tensor dim that they cut), if they
    are the last cuts of one dim, in plain blocks, or cut nothing.
    """
    cut = [d for d, chain in enumerate(chains) if any(m in dims for m, _ in chain)]
    if not cut:
        return (chains, ()), None
    if len(cut) > 1:
        return None, None
    chain = chains[cut[0]]
    last = chain[len(chain) - len(dims) :]
    if {m for m, _ in last} != {*dims} or any(factor != 1 for _, factor in last):
        return None, None
    base = tuple(
        [
            chain[: len(chain) - len(dims)] if d == cut[0] else other
            for d, other in enumerate(chains)
        ]
    )
    return (base, tuple([m for m, _ in last])), cut[0]


def room_for(mesh: tuple[int, ...], step: Along, dim: int) -> int:
    """The rows that ``dim`` needs so that padding to equal blocks adds at most half: fewer than one
    row is added for each device.
    """
    return (
        2 * (prod(mesh[m] for m in step.mesh_dims) - 1) * prod(mesh[m] for m, _ in step.base[dim])
    )


def padded_elements(shape: tuple[int, ...], mesh: tuple[int, ...], step: Along) -> int:
    """The elements of one padded block, on the device with the most."""
    dim = step.dim_of_blocks
    parts = prod(mesh[m] for m in step.mesh_dims)
    whole = 1
    for d, n in enumerate(shape):
        rows = most_local((n,), (step.base[d],), mesh)
        whole *= -(-rows // parts) if d == dim else rows
    return whole
