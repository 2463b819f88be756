"""Plans how a tensor gets from one mesh to another: what is pending is reduced on its own mesh, in
shares as small as possible, and then every element moves once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, cast

from cute_sharding._memory import remembered
from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.network import Network, messages
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.plan import Plan, peak_of, within_memory
from cute_sharding.exchange.planner import Groups, plan_steps
from cute_sharding.exchange.step import Stage, Step
from cute_sharding.sharding.rows import appended

__all__ = ["ExchangePlan", "plan_exchange"]


@dataclass(frozen=True)
class Crossing(Stage):
    """An exchange from one mesh to another, in one or in several rounds.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))
    >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (2, 3, 4))
    >>> Crossing(Exchange(identity((8, 6)), (rows,), (columns,))).received_elements
    16
    """

    exchange: Exchange
    rounds: int = 1

    @property
    def kind(self) -> str:
        if self.communicates:
            among = f" in {self.rounds} rounds" if self.rounds > 1 else ""
            return f"exchange between meshes{among}"
        return "relabel" if self.exchange.is_in_place else "local copy"

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        return ()

    @property
    def communicates(self) -> bool:
        return not self.exchange.is_free

    @property
    def collectives(self) -> int:
        return self.rounds if self.communicates else 0

    @property
    def most_rounds(self) -> int:
        """As many as the longest dim has rows: a round for each row."""
        return max(self.ends[0].shape, default=1) if self.communicates else 1

    def in_rounds(self, rounds: int) -> Crossing:
        return replace(self, rounds=rounds)

    @property
    def received_elements(self) -> int:
        return self.exchange.received_elements

    @property
    def received_by_all(self) -> int:
        return self.exchange.received_by_all

    @property
    def peak_elements(self) -> int:
        return self.exchange.peak_in(self.rounds)

    @property
    def ends(self) -> tuple[Placed, Placed]:
        return self.exchange.sources[0], self.exchange.targets[0]

    def seconds(self, network: Network) -> float:
        if not self.communicates:
            return 0.0
        rounds = self.rounds * messages(self.exchange.most_peers + 1, together=False)
        return rounds * network.slowest.alpha + self.received_elements * network.slowest.beta

    def to_dict(self, network: Network, name: Callable[[int], int | str]) -> dict[str, Any]:
        return {**super().to_dict(network, name), "most_peers": self.exchange.most_peers}


@dataclass(frozen=True)
class ExchangePlan(Plan):
    """A plan between two meshes, and its cost in elements and seconds.

    Attributes:
        before: what the ranks of the source hold, and what is pending there.
        steps: what is done on the mesh of the source, to finish what is pending.
        crossing: the exchange from there to the target.
        network: the links of the source's mesh dims.
        itemsize: the bytes of an element, for which the times are.
        mesh_names, target_names: the mesh dims' names to show, of the source and of the target;
            None: they are shown by number.

    >>> from cute_sharding.exchange import Placed
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))
    >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (2, 3, 4))
    >>> plan: ExchangePlan = plan_exchange(rows, columns)
    >>> plan.received_elements, plan.lower_bound, plan.collectives
    (16, 16, 1)
    """

    before: Placed
    steps: tuple[Step, ...]
    crossing: Crossing
    network: Network
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
        >>> plan_exchange(rows, columns).named(("tp",), ("gen",)).to_dict()["target_mesh"]
        {'sizes': [3], 'names': ['gen'], 'ranks': [2, 3, 4]}
        """
        for what, names, placed in (
            ("mesh_names", mesh_names, self.source),
            ("target_names", target_names, self.target),
        ):
            if names is not None and len(names) != len(placed.mesh.sizes):
                raise ValueError(
                    f"{what}={tuple(names)} does not fit the {placed.mesh}: give one name for each "
                    "mesh dim"
                )
        return replace(
            self,
            mesh_names=self.mesh_names if mesh_names is None else tuple(mesh_names),
            target_names=self.target_names if target_names is None else tuple(target_names),
        )

    @property
    def exchange(self) -> Exchange:
        """The exchange after the steps: who sends what to whom."""
        return self.crossing.exchange

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (*self.steps, self.crossing)

    @property
    def kind(self) -> str:
        """The kind of the exchange."""
        return self.crossing.kind

    @property
    def source(self) -> Placed:
        """The tensor as it is sent."""
        return self.exchange.sources[0]

    @property
    def target(self) -> Placed:
        """The tensor as it arrives."""
        return self.exchange.targets[0]

    @property
    def lower_bound(self) -> int | None:
        return None if self.steps else self.exchange.received_elements

    @cached_property
    def peak_elements(self) -> int:
        return peak_of(self.stages, self.before.most)

    def _where(self) -> dict[str, Any]:
        return {
            "shape": list(self.source.shape),
            "source_mesh": _data(self.source, self.mesh_names),
            "target_mesh": _data(self.target, self.target_names),
        }

    def _lines(self, stage: Stage) -> list[str]:
        if not isinstance(stage, Crossing):
            return super()._lines(stage)
        sides = list(zip(stage.ends, (self.mesh_names, self.target_names)))
        layouts = [placed.layout for placed, _ in sides]
        held = layouts if None not in layouts else [p.placements_text(names) for p, names in sides]
        peers = self.exchange.most_peers
        return [
            f"{stage.kind}, {' -> '.join(placed.mesh.text(names) for placed, names in sides)}: "
            f"{self._takes(stage)}",
            f"  {' -> '.join(map(str, held))}",
            *([f"  at most {peers} peer{'s' * (peers != 1)} a rank"] if peers else []),
        ]


def _data(placed: Placed, names: Sequence[str] | None) -> dict[str, Any]:
    return {
        "sizes": list(placed.mesh.sizes),
        "names": None if names is None else list(names),
        "ranks": list(placed.mesh.ranks),
    }


@remembered
def plan_exchange(
    source: Placed,
    target: Placed,
    network: Network | None = None,
    memory_limit: int | None = None,
    groups: Groups = None,
    native: bool = False,
) -> ExchangePlan:
    """The plan from ``source``, after its pending reductions, to ``target``. The other arguments
    are those of ``plan_steps`` (``exchange/planner.py``) for the source's mesh;
    ``network`` is by default the one for programs.

    Raises:
        ValueError: no plan keeps every rank within ``memory_limit`` elements. The message names the
            smallest limit that would do.

    >>> from cute_sharding.exchange import Placed
    >>> from cute_sharding.sharding import Replicate, Shard, Sharding
    >>> copies = Placed.of(Sharding((8, 6), (2,), (Replicate(),)))
    >>> columns = Placed.of(Sharding((8, 6), (2,), (Shard(1),)), (2, 3))
    >>> plan_exchange(copies, columns).kind
    'exchange between meshes'
    """
    sizes, shape = source.mesh.sizes, source.shape
    network = network or Network.of_programs(sizes)
    before, source = source, source.cut_as(source.chains)
    steps: tuple[Step, ...] = ()
    if memory_limit is not None:  # not every rank of the target knows the groups of the source
        groups, native = frozenset(), False
    if before.pending:
        source = _finished(before, target)
        steps = plan_steps(before, source, network, memory_limit, groups, native)
    crossing = Crossing(Exchange(identity(shape), (source,), (target,)))
    if memory_limit is not None:
        what = f"{shape} to the {target.mesh}"
        [stages] = within_memory([(*steps, crossing)], before.most, memory_limit, what)
        crossing = cast(Crossing, stages[-1])
    return ExchangePlan(before, steps, crossing, network)


def _finished(before: Placed, target: Placed) -> Placed:
    """The tensor after all reductions: each of the ranks that contribute to the same elements gets
    a share, along the dim that leaves the fewest elements to receive; all elements if no dim has
    enough rows.
    """
    source, mesh, shape = before.cut_as(before.chains), before.mesh.sizes, before.shape

    def left(share: Placed) -> int:
        return Exchange(identity(shape), (share,), (target,)).received_elements

    for m, _ in before.pending:
        rows = [n // prod(mesh[k] for k, _ in c) for n, c in zip(shape, source.chains)]
        shares = [
            source.cut_as(appended(source.chains, m, d, 1))
            for d, many in enumerate(rows)
            if many >= mesh[m]
        ]
        if shares:
            source = min(shares, key=left)
    return source
