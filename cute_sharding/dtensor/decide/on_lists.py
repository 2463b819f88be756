"""Pointwise ops on lists (``_foreach_copy_``, ``_foreach_maximum``) that torch's table of rules
lacks. It has rules for about 60 of them, by name.
"""

from __future__ import annotations

from cute_sharding.dtensor.bookkeeping.stats import count
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.decide.written import following
from cute_sharding.dtensor.door.understood import are_read_as_order
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.tensor_specs import Partial, placed_as
from cute_sharding.dtensor.run.op_plan import OpPlan, placed
from cute_sharding.dtensor.run.placements import without


def by_lists(question: Question) -> OpPlan | None:
    """The plan for such an op: pending tensors of its first list are reduced, and the tensors of
    its other lists are redistributed to the placements of those of the first. None for other ops,
    or if a list has plain tensors.
    """
    schema, specs = question.schema, question.specs
    if not op_schemas.is_pointwise_on_lists(schema.op):
        return None
    lists = [found for _, found in op_schemas.arguments(schema)]
    if any(spec is None for found in lists for spec in found):
        return None
    first = [
        placed_as(spec, without((Partial,), spec.placements)) for spec in specs[: len(lists[0])]
    ]
    count(question.name, "signature")
    return placed(
        schema,
        specs,
        [following(first[i % len(first)], spec) for i, spec in enumerate(specs)],
        [tuple(spec.placements) for spec in first],
        registry.output_metas(schema),
        as_order=are_read_as_order(specs),
    )
