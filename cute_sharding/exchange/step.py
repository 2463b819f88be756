"""The base of all steps of a redistribution, and one device's part in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from cute_sharding.exchange.by_links import LinkFlow
from cute_sharding.exchange.copies import Copy, fold
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
    """A stage of a plan: a :class:`Step` on one mesh, or an exchange from one mesh to another."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Its name as a collective."""

    @property
    @abstractmethod
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims of the one mesh on which it communicates."""

    @property
    @abstractmethod
    def received_elements(self) -> int:
        """The elements that the busiest device receives."""

    @property
    @abstractmethod
    def peak_elements(self) -> int:
        """The most elements that a device holds at once, with buffers and the source, which stays
        until the end.
        """

    @property
    @abstractmethod
    def received_by_all(self) -> int:
        """The elements that all devices receive together, with padding; on meshes of more than 64
        devices as if each received what the busiest does.
        """

    @abstractmethod
    def seconds(self, network: Network) -> float:
        """The time that it takes on a network."""

    @property
    @abstractmethod
    def ends(self) -> tuple[Placed, Placed]:
        """The tensor before and after."""

    @property
    def communicates(self) -> bool:
        """Whether devices send one another anything."""
        return bool(self.mesh_dims)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return int(self.communicates)

    @property
    def most_rounds(self) -> int:
        """The most rounds in which it can run."""
        return 1

    def in_rounds(self, rounds: int) -> Stage:
        """The same in ``rounds`` rounds, up to :attr:`most_rounds`."""
        return self

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """The layouts ((devices), (local)) -> flat index before and after it; None: sizes do not
        divide.
        """
        source, target = self.ends
        return source.layout, target.layout

    def to_dict(self, network: Network, name: Callable[[int], int | str]) -> dict[str, Any]:
        """As plain data; ``name`` gives the name of a mesh dim."""
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
    """A step from the chains ``source`` to the chains ``target`` of a tensor of ``shape`` on
    ``mesh``: an :class:`AllToAll` or a :class:`Reduction`.

    Attributes:
        shape: the global shape, in elements.
        mesh: the number of devices of each mesh dim.
        source, target: for each tensor dim its cuts (mesh dim, split factor), in order.

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
        """Whether blocks of rows that differ by about a row are padded to one size."""

    @property
    @abstractmethod
    def along(self) -> Along | None:
        """The step as a collective of whole tensor dims, if it is one."""

    @property
    def parts(self) -> int:
        """The number of devices that communicate together."""
        return prod(self.mesh[m] for m in self.mesh_dims)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange from the source to the target, without reductions."""
        chains = (self.source,), (self.target,)
        return Exchange.on_mesh(identity(self.shape), self.mesh, *chains)

    @cached_property
    def flow(self) -> LinkFlow:
        """The flow of that exchange: which rank holds what another one needs."""
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
        return () if own is None else tuple(fold(own.copies))

    def group(self, rank: int) -> list[int]:
        """The ranks with which a rank communicates, in the order of their places."""
        return self.flow.source.mesh.slice_of(self.place(rank), self.mesh_dims)

    def place(self, rank: int) -> Device:
        """The coordinates of a rank."""
        return self.flow.source.mesh.device(rank)

    def natively(self) -> Step:
        """The step for a backend that gathers and reduce-scatters better than it exchanges: as such
        a collective, also if blocks of rows differ a little.
        """
        found = self.along
        dim = None if found is None or found.even else found.dim_of_blocks
        if found is None or dim is None or self.shape[dim] < room_for(self.mesh, found, dim):
            return self
        changes: Any = {"padded": True}
        return replace(self, **changes)

    @property
    def block(self) -> int | None:
        """The elements of one padded block, on the device with the most; None without padding."""
        if not self.padded or self.along is None:
            return None
        return padded_elements(self.shape, self.mesh, self.along)

    def _are_even(self, chains: Chains) -> bool:
        """Whether all blocks of the tensor dims that a group cuts have one size."""
        return all(
            digits(n, chain, self.mesh) is not None
            for n, chain in zip(self.shape, chains)
            if any(m in self.mesh_dims for m, _ in chain)
        )

    def _blocks_by_all(self, placed: Placed) -> int:
        """The elements that all ranks receive together, with blocks padded to the longest."""
        ranks = placed.mesh.ranks
        if len(ranks) > DEVICES:
            return len(ranks) * self.received_elements
        held = [prod(placed.shape_on(rank)) for rank in ranks]
        groups = map(self.group, ranks)
        return sum((len(group) - 1) * max(held[peer] for peer in group) for group in groups)
