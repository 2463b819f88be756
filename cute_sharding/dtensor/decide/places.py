"""What an op receives where it is answered, and what it would have received by torch's own rule.
Worked out when somebody asks (:mod:`..reports.stats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import Received, Redistribution
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.groups import means
from cute_sharding.dtensor.run.redistribute import prepare

Placements = Sequence[Placement]


class OpPlace:
    """An op on operands that lie in one way (a :class:`..bookkeeping.stats.Place`).

    Args:
        received: what it receives of others, beside ``moves``.
        moves: the redistributions of its operands that are by plan; :func:`move_of`.
        stock: those that torch's own rule makes. Raises what that rule raises.
    """

    def __init__(
        self,
        received: Callable[[], Received],
        moves: Sequence[Callable[[], Received]],
        stock: Callable[[], list[Redistribution]],
    ) -> None:
        self._received, self._moves, self._stock = received, moves, stock

    @cached_property
    def received(self) -> Received:
        total = self._received()
        for move in self._moves:
            total = total.plus(move())
        return total

    @property
    def redistributions(self) -> list[Redistribution]:
        return self._stock()


def redistribution_of(spec: DTensorSpec, after: Placements) -> Redistribution:
    """The redistribution of a tensor of that spec to the placements ``after``."""
    return tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements), tuple(after)


def move_of(spec: DTensorSpec, after: Placements) -> Callable[[], Received]:
    """What a redistribution by plan receives, on the groups that the mesh has now."""
    by = means(spec.mesh)
    return lambda: prepare(*redistribution_of(spec, after), by=by).kind.moved.received


def redistributions_of_rule(
    schema: OpSchema, rule: Callable[[OpSchema], Any]
) -> list[Redistribution]:
    """How a rule of torch's has the operands of an op redistributed. Raises what that raises."""
    wanted = rule(schema).redistribute_schema or schema
    return [
        redistribution_of(spec, to.placements)
        for spec, to in zip(op_schemas.specs_of(schema), op_schemas.specs_of(wanted))
        if tuple(spec.placements) != tuple(to.placements)
    ]
