"""What all steps of a redistribution have in common, and one device's part in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from cute_sharding.exchange import Mesh, Part, Placed
from cute_sharding.exchange.copies import Copy
from cute_sharding.exchange.cost import DEVICES
from cute_sharding.layout import Layout
from cute_sharding.redistribution.native import Along, padded_elements, room_for
from cute_sharding.redistribution.network import Network
from cute_sharding.sharding.chains import Chains, Device, chain_of
from cute_sharding.sharding.digits import digits
from cute_sharding.sharding.meeting import Chain


class Stage(ABC):
    """What a plan is made of: on one mesh a :class:`Step`; or from one mesh to another."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is in the language of collectives."""

    @property
    @abstractmethod
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims of one mesh on which it communicates."""

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

    @property
    @abstractmethod
    def received_by_all(self) -> int:
        """What all devices receive together, padding included; on meshes of more than 64 as if each
        received what the busiest does.
        """

    @abstractmethod
    def seconds(self, network: Network) -> float:
        """What it takes on a network."""

    @property
    @abstractmethod
    def ends(self) -> tuple[Placed, Placed]:
        """The tensor before and after."""

    @property
    def communicates(self) -> bool:
        """Whether devices send anything to one another."""
        return bool(self.mesh_dims)

    @property
    def collectives(self) -> int:
        """How many collectives it is."""
        return int(self.communicates)

    @property
    def source_layout(self) -> Layout | None:
        """The layout ((devices), (local)) -> flat index before it; None: sizes do not divide."""
        return self.ends[0].layout

    @property
    def target_layout(self) -> Layout | None:
        """The layout after it."""
        return self.ends[1].layout

    def to_dict(self, network: Network, name: Callable[[int], int | str]) -> dict[str, Any]:
        """As plain data; ``name`` is that of a mesh dim."""
        layouts = (self.source_layout, self.target_layout)
        before, after = (None if layout is None else str(layout) for layout in layouts)
        return {
            "kind": self.kind,
            "mesh_dims": [name(m) for m in self.mesh_dims],
            "communicates": self.communicates,
            "received_elements": self.received_elements,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds(network),
            "source_layout": before,
            "target_layout": after,
        }


@dataclass(frozen=True)
class Step(Stage):
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
    def padded(self) -> bool:
        """Whether blocks of rows that differ by a row or so are made equal."""

    @property
    @abstractmethod
    def along(self) -> Along | None:
        """The step as a collective of whole tensor dims, if it is one."""

    @abstractmethod
    def transfer(self, device: Device, peers: Sequence[Device]) -> Part:
        """The part of ``device`` among ``peers``, in their order. Of a step on one mesh they are
        numbered by their places on it.
        """

    @abstractmethod
    def kept_by(self, device: Device) -> tuple[Copy, ...]:
        """The copies of what the device keeps, from its source (x) to its target (y)."""

    def natively(self) -> Step:
        """The step for a backend that gathers and reduce-scatters better than it exchanges: also
        where blocks of rows differ by a little.
        """
        found = self.along
        dim = None if found is None or found.even else found.dim_of_blocks
        if found is None or dim is None or self.shape[dim] < room_for(self.mesh, found, dim):
            return self
        changes: Any = {"padded": True}
        return replace(self, **changes)

    @property
    def block(self) -> int | None:
        """The elements of one block, where blocks are padded, on the device with the most."""
        if not self.padded or self.along is None:
            return None
        return padded_elements(self.shape, self.mesh, self.along)

    def _are_even(self, chains: Chains) -> bool:
        """Whether blocks of the tensor dims that are cut among a group are of one size."""
        return all(
            digits(n, chain, self.mesh) is not None
            for n, chain in zip(self.shape, chains)
            if any(m in self.mesh_dims for m, _ in chain)
        )

    def _blocks_by_all(self, chains: Chains) -> int:
        """What all devices receive together, where each block is as long as the longest."""
        devices = self.slice_of((0,) * len(self.mesh), range(len(self.mesh)))
        if len(devices) > DEVICES:
            return len(devices) * self.received_elements
        held = {device: prod(self.local_shape(chains, device)) for device in devices}
        groups = [self.group(device) for device in devices]
        return sum((len(group) - 1) * max(held[peer] for peer in group) for group in groups)

    def group(self, device: Device) -> list[Device]:
        """The devices among which ``device`` communicates, row-major."""
        return self.slice_of(device, self.mesh_dims)

    def chain(self, chains: Chains, dim: int, device: Device) -> Chain:
        """The cuts of tensor dim ``dim``, with the coordinates of ``device``."""
        return chain_of(chains[dim], self.mesh, device)

    @property
    def ends(self) -> tuple[Placed, Placed]:
        return self._placed(self.source), self._placed(self.target)

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
