"""How a tensor gets from one mesh to another: what is pending is finished on the mesh that it has,
in shares as small as can be, and then every element moves once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from cute_sharding.exchange.cost import most_local
from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.placed import Placed
from cute_sharding.redistribution.network import Link, Network, messages
from cute_sharding.redistribution.plan import (
    Held,
    collectives,
    layout_text,
    peak_of,
    received_by,
    step_data,
    step_lines,
)
from cute_sharding.redistribution.planner import plan_steps
from cute_sharding.redistribution.routes import Groups
from cute_sharding.redistribution.step import Step
from cute_sharding.sharding.chains import Chains, appended

# A mesh dim, and the op of the reduction that is pending on it.
Pending = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ExchangePlan:
    """What runs, and what it takes, in elements and seconds.

    Attributes:
        before: what the ranks of the source hold, and what is pending there.
        steps: what is done on the mesh of the source, to finish what is pending.
        exchange: from there to the target.
        network: the links of the source's mesh dims.
        link: between the two meshes.
        itemsize: the bytes of an element, for which these times are.
        mesh_names, target_names: of the mesh dims of the source and of the target, to be shown;
            None: they are shown by number.

    >>> from cute_sharding.exchange import Placed
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))
    >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (2, 3, 4))
    >>> plan: ExchangePlan = plan_exchange(rows, (), columns)
    >>> plan.received_elements, plan.lower_bound, plan.collectives
    (16, 16, 1)
    """

    before: Held
    steps: tuple[Step, ...]
    exchange: Exchange
    network: Network
    link: Link
    itemsize: int = 4
    mesh_names: tuple[str, ...] | None = None
    target_names: tuple[str, ...] | None = None

    def named(
        self, mesh_names: Sequence[str] | None, target_names: Sequence[str] | None = None
    ) -> ExchangePlan:
        """The plan with names for the mesh dims of the source, and of the target.

        Raises:
            ValueError: there are more or fewer names than mesh dims.

        >>> from cute_sharding.exchange import Placed
        >>> from cute_sharding.sharding import Shard, Sharding
        >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))
        >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (2, 3, 4))
        >>> plan_exchange(rows, (), columns).named(("tp",), ("gen",)).to_dict()["target_mesh"]
        {'sizes': [3], 'names': ['gen'], 'ranks': [2, 3, 4]}
        """
        for what, names, placed in (
            ("mesh_names", mesh_names, self.source),
            ("target_names", target_names, self.target),
        ):
            if names is not None and len(names) != len(placed.mesh.sizes):
                raise ValueError(
                    f"{what} {tuple(names)} for a {placed.mesh}: give a name for each mesh dim"
                )
        return replace(
            self,
            mesh_names=self.mesh_names if mesh_names is None else tuple(mesh_names),
            target_names=self.target_names if target_names is None else tuple(target_names),
        )

    @property
    def source(self) -> Placed:
        """The tensor as it is sent."""
        return self.exchange.sources[0]

    @property
    def target(self) -> Placed:
        """The tensor as it arrives."""
        return self.exchange.targets[0]

    @cached_property
    def received_elements(self) -> int:
        """What a rank receives at the most, step by step."""
        return received_by(self.steps) + self.exchange.received_elements

    @property
    def lower_bound(self) -> int | None:
        """What a rank must receive at the least: what it needs and does not hold. None where
        something is to be reduced.
        """
        return None if self.steps else self.exchange.received_elements

    @property
    def collectives(self) -> int:
        """How many collectives it is, or batches of point-to-point messages."""
        return collectives(self.steps) + int(not self.exchange.is_free)

    @cached_property
    def peak_elements(self) -> int:
        """The most elements that a rank holds at once: source, which stays, target, and the buffers
        between.
        """
        before = most_local(self.source.shape, self.before.chains, self.source.mesh.sizes)
        kept = before if self.steps else 0  # beside what the steps have made of it
        return max(peak_of(self.steps, before), kept + self.exchange.peak_elements)

    @cached_property
    def seconds(self) -> float:
        """What the steps take by the network model."""
        return sum(map(self.network.seconds, self.steps)) + self._seconds_between

    @property
    def _seconds_between(self) -> float:
        if self.exchange.is_free:
            return 0.0
        latency = messages(self.exchange.most_peers + 1, together=False) * self.link.alpha
        return latency + self.exchange.received_elements * self.link.beta

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in elements, times in seconds."""
        steps = [step_data(step, self.network, self._name) for step in self.steps]
        between = {
            "kind": self.kind,
            "mesh_dims": [],
            "communicates": not self.exchange.is_free,
            "received_elements": self.exchange.received_elements,
            "peak_elements": self.exchange.peak_elements,
            "seconds": self._seconds_between,
            "source_layout": layout_text(self.source.layout),
            "target_layout": layout_text(self.target.layout),
            "most_peers": self.exchange.most_peers,
        }
        return {
            "shape": list(self.source.shape),
            "source_mesh": _data(self.source, self.mesh_names),
            "target_mesh": _data(self.target, self.target_names),
            "steps": [*steps, between],
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "lower_bound": self.lower_bound,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds,
        }

    def _repr_html_(self) -> str:
        from cute_sharding._html import of_data

        return of_data(f"redistribution of {self.source.shape} between meshes", self.to_dict())

    @property
    def kind(self) -> str:
        """What the exchange is."""
        if self.exchange.is_free:
            return "relabel" if self.exchange.is_in_place else "local copy"
        return "exchange between meshes"

    def _name(self, m: int) -> int | str:
        return self.mesh_names[m] if self.mesh_names else m

    def __str__(self) -> str:
        lines = [line for step in self.steps for line in step_lines(step, self.network, self._name)]
        return "\n".join([*lines, *self._lines_between()])

    def _lines_between(self) -> list[str]:
        names = self.mesh_names, self.target_names
        sides = list(zip((self.source, self.target), names))
        layouts = [placed.layout for placed, _ in sides]
        held = (
            [placed.placements_text(each) for placed, each in sides]
            if None in layouts
            else list(map(str, layouts))
        )
        peers = self.exchange.most_peers
        met = [f"  at most {peers} peer{'s' * (peers != 1)} a rank"] if peers else []
        return [
            f"{self.kind}, {' -> '.join(placed.mesh.text(each) for placed, each in sides)}: "
            f"receives {self.exchange.received_elements:,} elements, {self._seconds_between:.4g} s",
            f"  {' -> '.join(held)}",
            *met,
            f"in all: {self.collectives} collectives, {self.received_elements:,} elements of "
            f"{self.itemsize} bytes received, at most {self.peak_elements:,} held, "
            f"{self.seconds:.4g} s",
        ]


def _data(placed: Placed, names: Sequence[str] | None) -> dict[str, Any]:
    return {
        "sizes": list(placed.mesh.sizes),
        "names": None if names is None else list(names),
        "ranks": list(placed.mesh.ranks),
    }


@lru_cache(maxsize=1 << 10)
def plan_exchange(
    source: Placed,
    pending: Pending,
    target: Placed,
    network: Network | None = None,
    groups: Groups = None,
    native: bool = False,
) -> ExchangePlan:
    """The plan from ``source``, of which the reductions ``pending`` are to be finished, to
    ``target``. The other arguments are those of
    ``plan_steps`` (``redistribution/planner.py``), of the source's mesh; ``network`` is by
    default the one that programs are planned by.

    >>> from cute_sharding.exchange import Placed
    >>> from cute_sharding.sharding import Replicate, Shard, Sharding
    >>> copies = Placed.of(Sharding((8, 6), (2,), (Replicate(),)))
    >>> columns = Placed.of(Sharding((8, 6), (2,), (Shard(1),)), (2, 3))
    >>> plan_exchange(copies, (), columns).kind
    'exchange between meshes'
    """
    sizes = source.mesh.sizes
    network = network or Network.of_programs(sizes)
    held = Held(source.chains, pending)
    steps: tuple[Step, ...] = ()
    if pending:
        finished = _finished(source, pending, target)
        steps = plan_steps(source.shape, sizes, held, finished, network, None, groups, native)
        source = replace(source, chains=finished)
    exchange = Exchange(identity(source.shape), (source,), (target,))
    return ExchangePlan(held, steps, exchange, network, _slowest(network))


def _finished(source: Placed, pending: Pending, target: Placed) -> Chains:
    """What cuts the tensor once all is finished: each of the ranks that contribute to the same has
    a share of it, of the dim of which least is left to be received then; all of it, where no dim
    has as many rows.
    """
    mesh, shape = source.mesh.sizes, source.shape

    def left(chains: Chains) -> int:
        found = Exchange(identity(shape), (replace(source, chains=chains),), (target,))
        return found.received_elements

    for m, _ in pending:
        rows = [n // prod(mesh[k] for k, _ in c) for n, c in zip(shape, source.chains)]
        shares = [
            appended(source.chains, m, d, 1) for d, many in enumerate(rows) if many >= mesh[m]
        ]
        if shares:
            source = replace(source, chains=min(shares, key=left))
    return source.chains


def _slowest(network: Network) -> Link:
    return max(network.links, key=lambda link: (link.beta, link.alpha))
