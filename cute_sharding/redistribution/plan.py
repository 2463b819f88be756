"""A redistribution plan: what is held before and after, the steps between, what they cost. Which
steps, :mod:`.planner` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cute_sharding.exchange.cost import most_local, received
from cute_sharding.layout import Layout
from cute_sharding.redistribution.network import Network
from cute_sharding.redistribution.step import Step
from cute_sharding.sharding.chains import Chains


@dataclass(frozen=True)
class Held:
    """What the devices hold: the chains, and the mesh dims on which each device has but a
    contribution, with the op that reduces them. On mesh dims in ``kept`` it stays so.
    """

    chains: Chains
    pending: tuple[tuple[int, str], ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class RedistributionPlan:
    """Steps that take a tensor of ``shape`` on ``mesh`` from one sharding to another, and what they
    cost on ``network``. :func:`cute_sharding.plan_redistribution` makes it.

    Attributes:
        shape: the global shape, in elements.
        mesh: the number of devices of each mesh dim.
        source, target: what the devices hold before and after.
        steps: the collectives, and what each device does by itself, in order.
        network: by which the seconds are reckoned.
        itemsize: the bytes of an element, to be shown.
        mesh_names: of the mesh dims, to be shown; None: they are shown by number.

    >>> from torch.distributed.tensor import Shard
    >>> from cute_sharding import plan_redistribution
    >>> plan = plan_redistribution((8, 8), (4,), [Shard(0)], [Shard(1)])
    >>> isinstance(plan, RedistributionPlan), plan.received_elements, plan.peak_elements
    (True, 12, 48)
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    source: Held
    target: Held
    steps: tuple[Step, ...]
    network: Network
    mesh_names: tuple[str, ...] | None = None
    itemsize: int = 4

    @cached_property
    def received_elements(self) -> int:
        """What the busiest device receives, step by step."""
        return received_by(self.steps)

    @cached_property
    def lower_bound(self) -> int | None:
        """What a device must receive at the least: what it needs and does not hold. None where
        something is to be reduced.
        """
        return (
            None
            if self.source.pending
            else received(self.shape, self.source.chains, self.target.chains, self.mesh)
        )

    @cached_property
    def peak_elements(self) -> int:
        """The most elements that a device holds at once: the source, which stays, the target, and
        the buffers between.
        """
        return peak_of(self.steps, most_local(self.shape, self.source.chains, self.mesh))

    @cached_property
    def seconds(self) -> float:
        """What the steps take by the network model."""
        return sum(map(self.network.seconds, self.steps))

    @property
    def collectives(self) -> int:
        """How many collectives the steps are."""
        return collectives(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in elements, times in seconds."""
        return {
            "shape": list(self.shape),
            "mesh": list(self.mesh),
            "steps": [step_data(step, self.network, self._name) for step in self.steps],
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "lower_bound": self.lower_bound,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds,
        }

    def named(self, mesh_names: Sequence[str] | None) -> RedistributionPlan:
        """The plan with names for its mesh dims."""
        return self if mesh_names is None else replace(self, mesh_names=tuple(mesh_names))

    def _name(self, m: int) -> int | str:
        return self.mesh_names[m] if self.mesh_names else m

    def _repr_html_(self) -> str:
        from cute_sharding._html import of_data

        return of_data(f"redistribution of {self.shape} on mesh {self.mesh}", self.to_dict())

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do"
        lines = [line for step in self.steps for line in step_lines(step, self.network, self._name)]
        lines.append(
            f"in all: {self.collectives} collectives, {self.received_elements:,} elements of "
            f"{self.itemsize} bytes received, at most {self.peak_elements:,} held, "
            f"{self.seconds:.4g} s"
        )
        return "\n".join(lines)


def step_data(step: Step, network: Network, name: Callable[[int], int | str]) -> dict[str, Any]:
    """A step as plain data; ``name`` is that of a mesh dim."""
    return {
        "kind": step.kind,
        "mesh_dims": [name(m) for m in step.mesh_dims],
        "communicates": step.communicates,
        "received_elements": step.received_elements,
        "peak_elements": step.peak_elements,
        "seconds": network.seconds(step),
        "source_layout": layout_text(step.source_layout),
        "target_layout": layout_text(step.target_layout),
    }


def step_lines(step: Step, network: Network, name: Callable[[int], int | str]) -> list[str]:
    """A step in words, and its layouts where it has both."""
    where = ", ".join(str(name(m)) for m in step.mesh_dims)
    lines = [
        f"{step.kind}{' on mesh dims ' if where else ''}{where}: receives "
        f"{step.received_elements:,} elements, {network.seconds(step):.4g} s"
    ]
    if step.source_layout is not None and step.target_layout is not None:
        lines.append(f"  {step.source_layout} -> {step.target_layout}")
    return lines


def layout_text(layout: Layout | None) -> str | None:
    return None if layout is None else str(layout)


def received_by(steps: Sequence[Step]) -> int:
    """The elements that the busiest device receives, step by step."""
    return sum(step.received_elements for step in steps)


def collectives(steps: Sequence[Step]) -> int:
    """How many collectives the steps are."""
    return sum(step.collectives for step in steps)


def peak_of(steps: Sequence[Step], source: int) -> int:
    """``source``, the most elements of the tensor that a device holds, stays all the while."""
    return max(
        [step.peak_elements + (source if i else 0) for i, step in enumerate(steps)], default=source
    )
