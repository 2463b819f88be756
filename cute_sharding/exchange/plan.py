"""A redistribution plan: what is held before and after, the steps between, and their cost.
:mod:`.planner` chooses the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from cute_sharding.exchange.network import Network
from cute_sharding.exchange.placed import Placed, received
from cute_sharding.exchange.step import Reduction, Stage, Step


class MemoryLimitError(ValueError):
    """No plan keeps within the limit of memory.

    Attributes:
        limit: the limit that was given, in elements for one tensor, and in bytes for several.
        least: the smallest limit that would do, in the same unit.

    >>> error = MemoryLimitError("too small", limit=1, least=8)
    >>> error.limit, error.least
    (1, 8)
    """

    def __init__(self, message: str, *, limit: int, least: int) -> None:
        super().__init__(message)
        self.limit, self.least = limit, least

    def __reduce__(self) -> tuple[Any, ...]:  # the message alone would not make it again
        return partial(MemoryLimitError, limit=self.limit, least=self.least), self.args


class Plan(ABC):
    """The cost of a plan, in elements and seconds.

    Attributes:
        steps: on the source's mesh, in order.
        network: the links of its mesh dims, by which seconds are computed.
        itemsize: the bytes of an element, to be shown.
        mesh_names: the mesh dims' names to show; None: they are shown by number.
    """

    steps: tuple[Step, ...]
    network: Network
    itemsize: int
    mesh_names: tuple[str, ...] | None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All steps, and the exchange between meshes, in order."""
        return self.steps

    @property
    @abstractmethod
    def lower_bound(self) -> int | None:
        """The elements that some device must receive in any plan: those that it needs and does not
        hold. None if something is reduced.
        """

    @property
    @abstractmethod
    def peak_elements(self) -> int:
        """The most elements that a device holds at once: the source, which stays, the target, and
        the buffers between.
        """

    @abstractmethod
    def _where(self) -> dict[str, Any]:
        """The shape and the meshes, as plain data."""

    @cached_property
    def received_elements(self) -> int:
        """The elements that the busiest device receives, summed over the steps."""
        return received_by(self.stages)

    @cached_property
    def seconds(self) -> float:
        """The time of the steps by the network model."""
        return sum(stage.seconds(self.network) for stage in self.stages)

    @cached_property
    def all_reduces(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The op and the mesh dims of each step, if all are all-reduces of the whole local tensor;
        otherwise none.
        """
        steps = [step for step in self.steps if isinstance(step, Reduction) and step.is_of_whole]
        if len(steps) != len(self.stages):
            return ()
        return tuple([(step.op, step.mesh_dims) for step in steps])

    @property
    def collectives(self) -> int:
        """The number of collectives, or between meshes of batches of messages."""
        return collectives(self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in elements, times in seconds."""
        return {
            **self._where(),
            "steps": [stage.to_dict(self.network, self._name) for stage in self.stages],
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "lower_bound": self.lower_bound,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds,
        }

    def _name(self, m: int) -> int | str:
        return self.mesh_names[m] if self.mesh_names else m

    def _repr_html_(self) -> str:
        from cute_sharding._html import of_data

        data = self.to_dict()
        where = f"on mesh {tuple(data['mesh'])}" if "mesh" in data else "between meshes"
        return of_data(f"redistribution of {tuple(data['shape'])} {where}", data)

    def __str__(self) -> str:
        if not self.stages:
            return "nothing to do"
        total = (
            f"in all: {self.collectives} collectives, {self.received_elements:,} elements of "
            f"{self.itemsize} bytes received, at most {self.peak_elements:,} held, "
            f"{self.seconds:.4g} s"
        )
        return "\n".join([*(line for stage in self.stages for line in self._lines(stage)), total])

    def _lines(self, stage: Stage) -> list[str]:
        """A step in words, with its layouts if it has both."""
        where = ", ".join(str(self._name(m)) for m in stage.mesh_dims)
        layouts = stage.layouts
        return [
            f"{stage.kind}{' on mesh dims ' if where else ''}{where}: {self._takes(stage)}",
            *([] if None in layouts else [f"  {' -> '.join(map(str, layouts))}"]),
        ]

    def _takes(self, stage: Stage) -> str:
        seconds = stage.seconds(self.network)
        return f"receives {stage.received_elements:,} elements, {seconds:.4g} s"


@dataclass(frozen=True)
class RedistributionPlan(Plan):
    """Steps that take a tensor on one mesh from one sharding to another, and their cost on
    ``network``. Made by :func:`cute_sharding.plan_redistribution`.

    Attributes:
        source, target: how it lies before and after.
        steps: the collectives, and what each device does alone, in order.
        network: by which seconds are computed.
        itemsize: the bytes of an element, to be shown.
        mesh_names: the mesh dims' names to show; None: they are shown by number.

    >>> from torch.distributed.tensor import Shard
    >>> from cute_sharding import plan_redistribution
    >>> plan = plan_redistribution((8, 8), (4,), [Shard(0)], [Shard(1)])
    >>> isinstance(plan, RedistributionPlan), plan.received_elements, plan.peak_elements
    (True, 12, 48)
    """

    source: Placed
    target: Placed
    steps: tuple[Step, ...]
    network: Network
    mesh_names: tuple[str, ...] | None = None
    itemsize: int = 4

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, in elements."""
        return self.source.shape

    @property
    def mesh(self) -> tuple[int, ...]:
        """The number of devices of each mesh dim."""
        return self.source.mesh.sizes

    @cached_property
    def lower_bound(self) -> int | None:
        if self.source.pending != self.target.pending:
            return None
        return received(self.shape, self.source.chains, self.target.chains, self.mesh)

    @cached_property
    def peak_elements(self) -> int:
        return peak_of(self.steps, self.source.most)

    def _where(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "mesh": list(self.mesh)}

    def named(self, mesh_names: Sequence[str] | None) -> RedistributionPlan:
        """The plan with names for its mesh dims."""
        return self if mesh_names is None else replace(self, mesh_names=tuple(mesh_names))


def received_by(steps: Sequence[Stage]) -> int:
    """The elements that the busiest device receives, summed over the steps."""
    return sum(step.received_elements for step in steps)


def received_by_all(steps: Sequence[Stage]) -> int:
    """The elements that all devices receive together, padding included."""
    return sum(step.received_by_all for step in steps if step.communicates)


def collectives(steps: Sequence[Stage]) -> int:
    """The number of collectives of the steps."""
    return sum(step.collectives for step in steps)


def within_memory(
    ways: Sequence[Sequence[Stage]], source: int, limit: int, what: str
) -> list[tuple[Stage, ...]]:
    """The ways that keep every device within ``limit`` elements, with as many rounds for each stage
    as that takes.

    Args:
        source: as for :func:`peak_of`.
        what: names the task in the error.

    Raises:
        MemoryLimitError: none does.
    """
    found = [_fit(stages, source, limit) for stages in ways]
    fitting = [stages for stages in found if stages is not None]
    if not fitting:
        least = min(
            peak_of([stage.in_rounds(stage.most_rounds) for stage in stages], source)
            for stages in ways
        )
        raise MemoryLimitError(
            f"no plan for {what} keeps every device within {limit:,} elements: the smallest "
            f"possible limit is memory_limit={least}",
            limit=limit,
            least=least,
        )
    return fitting


def _fit(stages: Sequence[Stage], source: int, limit: int) -> tuple[Stage, ...] | None:
    found: list[Stage] = []
    for i, stage in enumerate(stages):
        room, rounds = limit - (source if i else 0), 1
        while stage.in_rounds(rounds).peak_elements > room:
            if rounds == stage.most_rounds:
                return None
            rounds = min(2 * rounds, stage.most_rounds)
        found.append(stage.in_rounds(rounds))
    return tuple(found) if peak_of(found, source) <= limit else None


def peak_of(steps: Sequence[Stage], source: int) -> int:
    """The most elements held at once; ``source``, the tensor's most on a device, always stays."""
    return max(
        [step.peak_elements + (source if i else 0) for i, step in enumerate(steps)], default=source
    )
