"""A plan in compiled graphs. AOTAutograd traces a program's forward and backward pass on DTensors,
whose ops are those of the eager program; what is brought where becomes part of the graph.

A graph is given the gradients of what it returned; the plan says which values these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.programs.planned import (
    Planned,
    brought,
    note_graph,
    operands_of,
    plan_in_force,
    with_tensors,
)
from cute_sharding.dtensor.programs.recording import dtensors_in

__all__ = ["planned_graph"]


def planned_graph() -> TracedPlan | None:
    """The mode in which a program is traced; None without a plan, and inside of such a mode."""
    note_graph()
    running = plan_in_force()
    return None if running is None or running.is_traced else TracedPlan(running)


class TracedPlan(Planned):
    """Brings the values of a program that is traced to where the plan of ``running`` wants them."""

    is_traced = True

    def __init__(self, running: Planned) -> None:
        super().__init__(running.plan)
        self._running = running

    def note_results(self, results: Sequence[Any]) -> None:
        """Note what the program returns."""
        numbers = [self._number(x) if isinstance(x, DTensor) else -1 for x in results]
        self._running.returned = tuple(numbers)

    def note_gradients(self, tangents: Sequence[Any], of: Sequence[int | None]) -> None:
        """Number the gradients that the traced program is given, each of the result with that
        position among those that were noted.
        """
        returned, gradients = self._running.returned, dict(self.plan.gradients)
        for x, position in zip(tangents, of):
            if isinstance(x, DTensor) and position is not None and position < len(returned):
                self._values.put(x, gradients.get(returned[position], -1))

    def finished(self, gradients: Any) -> Any:
        """The gradients that the traced program returns, where all that reads them wants them."""
        tensors = dtensors_in(gradients)
        return with_tensors(gradients, brought([(x, self._end(x)) for x in tensors]))

    def _end(self, gradient: DTensor) -> str | None:
        wanted = self._readers.get(self._number(gradient), ())
        return wanted[0] if len(wanted) == 1 else None

    @cached_property
    def _readers(self) -> dict[int, list[str | None]]:
        """For each value the placements in which ops read it; None: as it lies."""
        found: dict[int, list[str | None]] = {}
        for op in self.plan.ops:
            for number, placements in zip(operands_of(op), op.reads):
                places = found.setdefault(number, [])
                if placements not in places:
                    places.append(placements)
        return found
