"""Reduces what is pending: all devices of a group hold contributions to the same elements, and each
gets some of these elements, reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cute_sharding.exchange.collectives import all_reduced, of_blocks
from cute_sharding.exchange.cost import DEVICES, most_local
from cute_sharding.exchange.native import Along, along
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.part import Part, as_blocks, part_of_one
from cute_sharding.exchange.step import Step
from cute_sharding.sharding.chains import cutting


@dataclass(frozen=True)
class Reduction(Step):
    """A reduction over ``mesh_dims``, from the chains ``source`` to ``target``; every device's
    target is part of its source.

    Either none of these mesh dims cuts the target (an all-reduce, of what the target keeps), or all
    do (a reduce-scatter). ``op`` is torch's name of the reduction, and the result is divided by
    ``divisor``, the number of contributions to an average. ``padded``: blocks that differ by about
    a row are padded to one size, for a native reduce-scatter.

    >>> step = Reduction((8, 8), (4,), source=((), ()), target=(((0, 1),), ()), mesh_dims=(0,))
    >>> step.kind, step.received_elements  # three contributions to 16 elements
    ('reduce-scatter (sum)', 48)
    """

    mesh_dims: tuple[int, ...] = ()
    op: str = "sum"
    divisor: int = 1
    padded: bool = False

    @cached_property
    def along(self) -> Along | None:
        """The reduce-scatter as a collective of a whole tensor dim."""
        return (
            along(self.shape, self.mesh, self.source, self.target, self.mesh_dims)
            if self.scatters
            else None
        )

    @property
    def scatters(self) -> bool:
        """Whether it is a reduce-scatter."""
        return not cutting(self.target).isdisjoint(self.mesh_dims)

    @cached_property
    def even(self) -> bool:
        """Whether all devices of a group get equally much, as a native reduce-scatter requires."""
        return self._are_even(self.target)

    @property
    def kind(self) -> str:
        return (
            f"{'reduce-scatter' if self.scatters else 'all-reduce'} "
            f"({'avg' if self.divisor > 1 else self.op}{', padded' if self.padded else ''})"
        )

    @property
    def received_elements(self) -> int:
        """The elements that the busiest device receives: the others' contributions to its share,
        and for an all-reduce also the others' shares (Chan et al. 2007).
        """
        most = most_local(self.shape, self.target, self.mesh)
        if self.scatters:
            return of_blocks(self.parts, most if self.block is None else self.block)
        return all_reduced(self.parts, most)

    @property
    def received_by_all(self) -> int:
        target = self.ends[1]
        if self.block is not None or len(target.mesh.ranks) > DEVICES:
            return self._blocks_by_all(target)
        shares = sum(prod(target.shape_on(rank)) for rank in target.mesh.ranks)
        times = self.parts - 1
        return times * shares if self.scatters else -(-2 * times * shares // self.parts)

    @property
    def peak_elements(self) -> int:
        source, target = (
            most_local(self.shape, chains, self.mesh) for chains in (self.source, self.target)
        )
        if not self.scatters:
            return source + target + (target if self.source != self.target else 0)
        if self.block is not None:
            return source + (self.parts + 1) * self.block
        if self.even:
            return 2 * source + target
        return source + 2 * self.parts * target + target

    def seconds(self, network: Network) -> float:
        total, before = 0.0, 1
        share = (
            -(-most_local(self.shape, self.source, self.mesh) // self.parts)
            if not self.scatters
            else most_local(self.shape, self.target, self.mesh)
        )
        for m in sorted(self.mesh_dims, key=lambda m: network.link(m).beta):
            received = (self.mesh[m] - 1) * before * share
            total += network.collective(m, self.mesh[m], received, together=True)
            before *= self.mesh[m]
        return total if self.scatters else 2 * total  # scattered, and then gathered

    def transfer(self, rank: int, peers: Sequence[int]) -> Part:
        """The part of a rank: it sends each peer a block, in the layout of the peer's target, and
        receives as many blocks of its own target, which are the receive buffer.
        """
        source, target = self.ends
        shapes = source.shape_on(rank), target.shape_on(rank)
        blocks = [
            (self.flow.of_devices(self.place(rank), self.place(peer)).copies, target.shape_on(peer))
            for peer in peers
        ]
        receives = (prod(shapes[1]),) * len(peers)
        return part_of_one(peers, as_blocks(blocks, shapes[0]), (receives, None), shapes)
