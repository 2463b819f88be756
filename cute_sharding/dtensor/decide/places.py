"""What an op receives as it is answered here, and what it would receive by torch's own rule.
Computed only on request (:mod:`..reports.stats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import Received, Redistribution
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.groups import means
from cute_sharding.dtensor.run.redistribute import prepare

Placements = Sequence[Placement]


def redistribution_of(spec: DTensorSpec, after: Placements) -> Redistribution:
    """The redistribution of a tensor with this spec to the placements ``after``."""
    return tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements), tuple(after)


def move_of(spec: DTensorSpec, after: Placements) -> Callable[[], Received]:
    """A function for what a redistribution by plan receives, on the mesh's present groups."""
    by = means(spec.mesh)
    return lambda: prepare(*redistribution_of(spec, after), by=by).kind.moved.received


def redistributions_of_rule(
    schema: OpSchema, rule: Callable[[OpSchema], Any]
) -> list[Redistribution]:
    """The redistributions of an op's operands by a rule of torch's. Raises what the rule raises."""
    wanted = rule(schema).redistribute_schema or schema
    return [
        redistribution_of(spec, to.placements)
        for spec, to in zip(op_schemas.specs_of(schema), op_schemas.specs_of(wanted))
        if tuple(spec.placements) != tuple(to.placements)
    ]
