"""Finishing a pending reduction: all devices of a group hold contributions to the same elements,
and each is to have some of the elements, reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from cute_sharding.exchange import Part
from cute_sharding.exchange.collectives import all_reduced, of_blocks
from cute_sharding.exchange.copies import Copy, flat, folded, from_runs, in_place
from cute_sharding.exchange.cost import most_local
from cute_sharding.layout.layout import row_major
from cute_sharding.redistribution.native import Along, along, padded_elements, room_for
from cute_sharding.redistribution.step import Step
from cute_sharding.sharding.chains import Device, cutting
from cute_sharding.sharding.digits import digits
from cute_sharding.sharding.meeting import meet


@dataclass(frozen=True)
class Reduction(Step):
    """Reduce over the mesh dims ``dims``, from the chains ``source`` to ``target``, where every
    device's target lies within its source.

    Either none of ``dims`` cuts the target (an all-reduce, of what the target keeps), or all do (a
    reduce-scatter). ``op`` is the name of torch's reduction, and ``divisor`` what the result is
    divided by: the number of contributions to an average. ``padded``: blocks of rows that differ by
    a row or so are made equal, for a native reduce-scatter.

    >>> step = Reduction((8, 8), (4,), source=((), ()), target=(((0, 1),), ()), dims=(0,))
    >>> step.kind, step.received_elements  # three contributions to 16 elements
    ('reduce-scatter (sum)', 48)
    """

    dims: tuple[int, ...] = ()
    op: str = "sum"
    divisor: int = 1
    padded: bool = False

    @cached_property
    def along(self) -> Along | None:
        """The reduce-scatter as one of a whole tensor dim, if it is one."""
        return (
            along(self.shape, self.mesh, self.source, self.target, self.dims)
            if self.scatters
            else None
        )

    def natively(self) -> Reduction:
        """The step for a backend that reduce-scatters better than it exchanges: also where blocks
        differ by a little.
        """
        found = self.along
        if found is None or found.even or found.scattered is None:
            return self
        return (
            replace(self, padded=True)
            if self.shape[found.scattered] >= room_for(self.mesh, found, found.scattered)
            else self
        )

    @property
    def scatters(self) -> bool:
        """Whether it is a reduce-scatter."""
        return not cutting(self.target).isdisjoint(self.dims)

    @property
    def parts(self) -> int:
        """How many contributions there are to each element."""
        return prod(self.mesh[m] for m in self.dims)

    @cached_property
    def even(self) -> bool:
        """Whether every device of a group gets as much: what a native reduce-scatter wants."""
        return all(
            digits(n, chain, self.mesh) is not None
            for n, chain in zip(self.shape, self.target)
            if any(m in self.dims for m, _ in chain)
        )

    @property
    def kind(self) -> str:
        return (
            f"{'reduce-scatter' if self.scatters else 'all-reduce'} "
            f"({'avg' if self.divisor > 1 else self.op}{', padded' if self.padded else ''})"
        )

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        return self.dims

    @property
    def received_elements(self) -> int:
        """By the busiest device: each contribution to its share by the others, and for an
        all-reduce the shares of the others as well (Chan et al. 2007).
        """
        most = most_local(self.shape, self.target, self.mesh)
        if self.padded and self.along is not None:
            most = padded_elements(self.shape, self.mesh, self.along)
        if self.scatters:
            return of_blocks(self.parts, most)
        return all_reduced(self.parts, most)

    def group(self, device: Device) -> list[Device]:
        """The devices that contribute to the same elements, row-major."""
        return self.slice_of(device, self.dims)

    @property
    def peak_elements(self) -> int:
        source, target = (
            most_local(self.shape, self.source, self.mesh),
            most_local(self.shape, self.target, self.mesh),
        )
        if not self.scatters:
            return source + target + (target if self.source != self.target else 0)
        if self.padded and self.along is not None:
            return source + (self.parts + 1) * padded_elements(self.shape, self.mesh, self.along)
        if self.even:
            return 2 * source + target
        return source + 2 * self.parts * target + target

    def slices(self, device: Device, receiver: Device) -> list[Copy]:
        """What ``receiver`` is to have, from the source of ``device`` (x) to its own target (y)."""
        runs = [
            meet(n, self.chain(self.source, d, device), self.chain(self.target, d, receiver))
            for d, n in enumerate(self.shape)
        ]
        return [from_runs(box) for box in product(*runs)]

    def kept_by(self, device: Device) -> tuple[Copy, ...]:
        return tuple(folded(self.slices(device, device)))

    def transfer(self, device: Device, peers: Sequence[Device]) -> Part:
        """The part of ``device``: one block for each of ``peers``, as the peer's target lies; as
        many blocks of its own target come back, and are the receive buffer.
        """
        shapes = self.local_shape(self.source, device), self.local_shape(self.target, device)
        packs, sends, at = [], [], 0
        for peer in peers:
            shape = self.local_shape(self.target, peer)
            strides = row_major(shape)
            for copy in self.slices(device, peer):
                packs.append(
                    Copy(
                        copy.sizes,
                        copy.x,
                        copy.dx,
                        (at + flat(copy.y, strides),),
                        tuple([(flat(step, strides),) for step in copy.dy]),
                    )
                )
            sends.append(prod(shape))
            at += prod(shape)
        free = at == prod(shapes[0]) and in_place(packs, row_major(shapes[0]))
        return Part(
            tuple(map(self.number, peers)),
            tuple(sends),
            (prod(shapes[1]),) * len(peers),
            (None if free else tuple(folded(packs)),),
            (),
            (None,),
            shapes[1:],
            (False,),
            shapes[:1],
        )
