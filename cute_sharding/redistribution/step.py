"""What all steps of a redistribution have in common, and one device's part in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from cute_sharding.exchange import Mesh, Part, Placed
from cute_sharding.exchange.copies import Copy
from cute_sharding.layout import Layout
from cute_sharding.sharding.chains import Chains, Device, chain_of
from cute_sharding.sharding.meeting import Chain


@dataclass(frozen=True)
class Step(ABC):
    """From the chains ``source`` to the chains ``target`` of a tensor of ``shape`` on ``mesh``: an
    :class:`AllToAll` or a :class:`Reduction`.

    Attributes:
        shape: the global shape, in elements.
        mesh: the number of devices of each mesh dim.
        source, target: for each tensor dim the (mesh dim, split factor) that cut it, in order.

    >>> step: Step = AllToAll((8, 8), (4,), source=(((0, 1),), ()), target=((), ((0, 1),)))
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
    def transfer(self, device: Device, peers: Sequence[Device]) -> Part:
        """The part of ``device`` among ``peers``, in their order. Of a step on one mesh they are
        numbered by their places on it.
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
        found = self._placed(chains).local_shape(self.number(device))
        assert found is not None, "on the mesh"
        return found

    def _placed(self, chains: Chains) -> Placed:
        return Placed(self.shape, Mesh.numbered(self.mesh), chains)

    def number(self, device: Device) -> int:
        """By its place on the mesh."""
        return Mesh.numbered(self.mesh).rank(device)

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
        return self._placed(self.source).layout

    @property
    def target_layout(self) -> Layout | None:
        """The layout after the step."""
        return self._placed(self.target).layout
