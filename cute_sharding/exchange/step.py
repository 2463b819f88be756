"""What all steps of a redistribution have in common, and one device's part in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from cute_sharding.exchange.by_links import LinkFlow
from cute_sharding.exchange.copies import Copy, folded
from cute_sharding.exchange.cost import DEVICES
from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.native import Along, padded_elements, room_for
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.part import Part
from cute_sharding.exchange.placed import Placed
from cute_sharding.layout import Layout
from cute_sharding.sharding.chains import Chains, Device
from cute_sharding.sharding.digits import digits


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
    def most_rounds(self) -> int:
        """In how many rounds it can go, at the most."""
        return 1

    def in_rounds(self, rounds: int) -> Stage:
        """The same in so many rounds, up to :attr:`most_rounds`."""
        return self

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """The layouts ((devices), (local)) -> flat index before and after it; None: sizes do not
        divide.
        """
        source, target = self.ends
        return source.layout, target.layout

    def to_dict(self, network: Network, name: Callable[[int], int | str]) -> dict[str, Any]:
        """As plain data; ``name`` is that of a mesh dim."""
        before, after = (None if layout is None else str(layout) for layout in self.layouts)
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
    >>> step.kind, step.mesh_dims, step.received_elements, step.layouts[1]
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

    @property
    def parts(self) -> int:
        """How many devices communicate together."""
        return prod(self.mesh[m] for m in self.mesh_dims)

    @cached_property
    def exchange(self) -> Exchange:
        """From the source to the target, as if nothing were to be reduced."""
        chains = (self.source,), (self.target,)
        return Exchange.on_mesh(identity(self.shape), self.mesh, *chains)

    @cached_property
    def flow(self) -> LinkFlow:
        """Which rank has what of what another one needs."""
        (flow,) = self.exchange.flows
        assert isinstance(flow, LinkFlow)
        return flow

    @property
    def ends(self) -> tuple[Placed, Placed]:
        return self.exchange.sources[0], self.exchange.targets[0]

    @abstractmethod
    def transfer(self, rank: int, peers: Sequence[int]) -> Part:
        """The part of a rank among ``peers``, in their order. Ranks are numbered by their places on
        the mesh.
        """

    def kept_by(self, rank: int) -> tuple[Copy, ...]:
        """The copies of what the rank keeps, from its source (x) to its target (y)."""
        own = self.flow.kept_by(rank)
        return () if own is None else tuple(folded(own.copies))

    def group(self, rank: int) -> list[int]:
        """The ranks among which one communicates, in the order of their places."""
        return self.flow.source.mesh.slice_of(self.place(rank), self.mesh_dims)

    def place(self, rank: int) -> Device:
        """The coordinates of a rank."""
        device = self.flow.source.mesh.coordinates(rank)
        assert device is not None, "on the mesh"
        return device

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

    def _blocks_by_all(self, placed: Placed) -> int:
        """What all ranks receive together, where each block is as long as the longest."""
        ranks = placed.mesh.ranks
        if len(ranks) > DEVICES:
            return len(ranks) * self.received_elements
        held = [prod(placed.shape_on(rank)) for rank in ranks]
        groups = map(self.group, ranks)
        return sum((len(group) - 1) * max(held[peer] for peer in group) for group in groups)
