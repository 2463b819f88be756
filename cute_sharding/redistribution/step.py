"""What all steps of a redistribution have in common, and one device's part in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from cute_sharding.exchange.copies import Copy
from cute_sharding.layout import Layout
from cute_sharding.sharding.chains import Chains, Device, chain_of
from cute_sharding.sharding.digits import layout_of
from cute_sharding.sharding.meeting import Chain, count_rows, rows_held


@dataclass(frozen=True)
class Transfer:
    """One device's part in a collective: strided copies into a send buffer, its splits, and copies
    out of the receive buffer.

    ``packs`` is None where the source is the send buffer as it lies (if contiguous), ``unpacks``
    where the receive buffer is the target.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    packs: tuple[Copy, ...] | None
    own: tuple[Copy, ...]
    unpacks: tuple[Copy, ...] | None

    @property
    def peak_elements(self) -> int:
        """The most elements alive at once: the source and two of send buffer, receive buffer and
        target.
        """
        source, target = prod(self.source_shape), prod(self.target_shape)
        sending = 0 if self.packs is None else sum(self.sends)
        taking = 0 if self.unpacks is None else target
        return source + sum(self.receives) + max(sending, taking)


@dataclass(frozen=True)
class Step(ABC):
    """From the chains ``source`` to the chains ``target`` of a tensor of ``shape`` on ``mesh``: an
    :class:`Exchange` or a :class:`Reduction`.

    Attributes:
        shape: the global shape, in elements.
        mesh: the number of devices of each mesh dim.
        source, target: for each tensor dim the (mesh dim, split factor) that cut it, in order.

    >>> step: Step = Exchange((8, 8), (4,), source=(((0, 1),), ()), target=((), ((0, 1),)))
    >>> step.kind, step.mesh_dims, step.received_elements, step.target_layout
    ('all-to-all', (0,), 12, ((4,),(8,2)):((2,),(8,1)))
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    source: Chains
    target: Chains

    @property
    @abstractmethod
    def kind(self) -> str:
        """What the step is in the language of collectives."""

    @property
    @abstractmethod
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims on which it communicates."""

    @property
    @abstractmethod
    def received_elements(self) -> int:
        """What the busiest device receives."""

    @property
    @abstractmethod
    def peak_elements(self) -> int:
        """The most elements that a device holds at once, buffers included, and the source, which
        stays.
        """

    @abstractmethod
    def transfer(self, device: Device, peers: Sequence[Device | None]) -> Transfer:
        """The part of ``device`` among ``peers``, in their order; None stands for a peer of another
        group.
        """

    @abstractmethod
    def kept_by(self, device: Device) -> tuple[Copy, ...]:
        """The copies of what the device keeps, from its source (x) to its target (y)."""

    def natively(self) -> Step:
        """The step for a backend that has more than an all-to-all."""
        return self

    @property
    def communicates(self) -> bool:
        """Whether devices send anything to one another."""
        return bool(self.mesh_dims)

    @property
    def collectives(self) -> int:
        """How many collectives it is."""
        return int(self.communicates)

    def chain(self, chains: Chains, dim: int, device: Device) -> Chain:
        """The cuts of tensor dim ``dim``, with the coordinates of ``device``."""
        return chain_of(chains[dim], self.mesh, device)

    def local_shape(self, chains: Chains, device: Device) -> tuple[int, ...]:
        """The shape of what the device holds under ``chains``."""
        return tuple(
            [
                count_rows(rows_held(n, self.chain(chains, d, device)))
                for d, n in enumerate(self.shape)
            ]
        )

    def slice_of(self, device: Device, dims: Sequence[int]) -> list[Device]:
        """The devices that differ from ``device`` on those mesh dims alone, row-major."""
        return [
            tuple(c)
            for c in product(
                *(range(n) if m in dims else (device[m],) for m, n in enumerate(self.mesh))
            )
        ]

    @property
    def source_layout(self) -> Layout | None:
        """The layout ((devices), (local)) -> flat index before the step; None where sizes do not
        divide.
        """
        return layout_of(self.shape, self.source, self.mesh)

    @property
    def target_layout(self) -> Layout | None:
        """The layout after the step."""
        return layout_of(self.shape, self.target, self.mesh)
