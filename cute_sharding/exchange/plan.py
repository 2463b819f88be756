"""How a tensor gets from one mesh to another: what is pending is finished on the mesh that it has,
in shares as small as can be, and then every element moves once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.placed import Placed
from cute_sharding.redistribution.chains import Chains, appended
from cute_sharding.redistribution.cost import most_local
from cute_sharding.redistribution.network import Link, Network, messages
from cute_sharding.redistribution.plan import Held, collectives, peak_of, received_by
from cute_sharding.redistribution.planner import plan_steps
from cute_sharding.redistribution.routes import Groups
from cute_sharding.redistribution.step import Step, layout_of

# A mesh dim, and the op of the reduction that is pending on it.
Pending = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ExchangePlan:
    """What runs, and what it takes, in elements and seconds.

    Attributes:
        steps: what is done on the mesh of the source before, to finish what is pending.
        exchange: from there to the target.
        network: the links of the source's mesh dims.
        link: between the two meshes.
        itemsize: the bytes of an element, for which these times are.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))
    >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (2, 3, 4))
    >>> plan = plan_exchange(rows, (), columns)
    >>> plan.received_elements, plan.lower_bound, plan.collectives
    (16, 16, 1)
    """

    steps: tuple[Step, ...]
    exchange: Exchange
    network: Network
    link: Link
    itemsize: int = 4

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
        """The most elements that a rank holds at once: source, target, and the buffers between."""
        before = most_local(self.source.shape, self.source.chains, self.source.mesh.sizes)
        return max(peak_of(self.steps, before), self.exchange.peak_elements)

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
        steps = [
            {
                "kind": step.kind,
                "communicates": step.communicates,
                "received_elements": step.received_elements,
                "peak_elements": step.peak_elements,
                "seconds": self.network.seconds(step),
                "mesh_dims": list(step.mesh_dims),
            }
            for step in self.steps
        ]
        between = {
            "kind": self.kind,
            "communicates": not self.exchange.is_free,
            "received_elements": self.exchange.received_elements,
            "peak_elements": self.exchange.peak_elements,
            "seconds": self._seconds_between,
            "source_layout": _text(self.source),
            "target_layout": _text(self.target),
        }
        return {
            "shape": list(self.source.shape),
            "source_mesh": _data(self.source),
            "target_mesh": _data(self.target),
            "steps": [*steps, between],
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "lower_bound": self.lower_bound,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds,
        }

    @property
    def kind(self) -> str:
        """What the exchange is."""
        if self.exchange.is_free:
            return "relabel" if self.exchange.is_in_place else "local copy"
        return "exchange between meshes"

    def __str__(self) -> str:
        lines = [
            f"{step.kind} on mesh dims {', '.join(map(str, step.mesh_dims))}: receives "
            f"{step.received_elements:,} elements, {self.network.seconds(step):.4g} s"
            for step in self.steps
        ]
        peers = self.exchange.most_peers
        lines += [
            f"{self.kind}, {self.source.mesh} -> {self.target.mesh}: receives "
            f"{self.exchange.received_elements:,} elements, {self._seconds_between:.4g} s",
            f"  {_text(self.source)} -> {_text(self.target)}",
            f"  at most {peers} peer{'s' * (peers != 1)} a rank",
            f"in all: {self.collectives} collectives, {self.received_elements:,} elements of "
            f"{self.itemsize} bytes received, at most {self.peak_elements:,} held, "
            f"{self.seconds:.4g} s",
        ]
        return "\n".join(lines)


def _data(placed: Placed) -> dict[str, Any]:
    return {"sizes": list(placed.mesh.sizes), "ranks": list(placed.mesh.ranks)}


def _text(placed: Placed) -> str:
    found = layout_of(placed.shape, placed.chains, placed.mesh.sizes)
    return str(placed.chains) if found is None else str(found)


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
    :func:`cute_sharding.redistribution.planner.plan_steps`, of the source's mesh; ``network`` is by
    default the one that programs are planned by.
    """
    sizes = source.mesh.sizes
    network = network or Network.of_programs(sizes)
    steps: tuple[Step, ...] = ()
    if pending:
        finished = _finished(source, pending, target)
        held = Held(source.chains, pending)
        steps = plan_steps(source.shape, sizes, held, finished, network, None, groups, native)
        source = replace(source, chains=finished)
    exchange = Exchange(identity(source.shape), (source,), (target,))
    return ExchangePlan(steps, exchange, network, _slowest(network))


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
