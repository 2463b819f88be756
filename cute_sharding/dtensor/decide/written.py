"""Ops that write to operands: writes to redistributed copies are moved back; for pointwise ops the
other operands are redistributed to the placements of the tensor that is written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.decide.losses import outside_loss_parallel
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.door.understood import (
    are_read_as_order,
    are_understood,
    keeps_the_only_shards,
)
from cute_sharding.dtensor.replaced import op_schemas, registry, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    placed_as,
)
from cute_sharding.dtensor.run.op_plan import OpPlan, placed
from cute_sharding.dtensor.run.placements import on_dim, text, without
from cute_sharding.dtensor.run.written import TakingBack


def taken_back(plan: OpPlan) -> OpPlan:
    """The plan for an op. If it redistributes tensors that it writes to, the op runs so that what
    it writes is moved back to them: torch would go on with the copy, or lose it.
    """
    schema, op = plan.schema, plan.schema.op
    if plan.needs is None or plan.takes_all:
        return plan
    written = [spec for _, spec in op_schemas.written(op, schema)]
    moved = [spec for _, spec in op_schemas.written(op, plan.needs)]
    if all(tuple(a.placements) == tuple(b.placements) for a, b in zip(written, moved)):
        return plan
    # torch lists the specs of lists of tensors one by one, between the other arguments.
    nested = op_schemas.with_specs(schema, op_schemas.specs_of(plan.needs))
    gives_these = op_schemas.is_in_place(op) and plan.results is not None
    results: Any = plan.results
    if gives_these or any(argument.is_out for argument in op._schema.arguments):
        results = written[0] if len(written) == 1 else tuple(written)
    kernel = TakingBack(op, plan.function, schema, nested)
    return OpPlan(schema, results, plan.needs, kernel=kernel, takes_all=True)


def written_by_new(found: OpPlan, schema: OpSchema) -> OpPlan:
    """The plan for an op in place, from ``found``, that for the op on the same arguments that
    returns a new tensor. The tensor that is written to keeps its placements.

    The op in place runs if the other would run on placements that its result has too; otherwise the
    other runs, and its result is redistributed and copied. Errors of the op in place, such as for
    a dtype that it cannot write, are raised first, as on one device.
    """
    registry.output_metas(schema)
    written, to = op_schemas.specs_of(schema)[0], op_schemas.specs_of(found.wanted)[0]
    made = found.specs[0]
    if found.function is found.schema.op and tuple(made.placements) == tuple(to.placements):
        return replace(found, schema=schema, results=written, kernel=schema.op)
    nested = schema
    if not found.takes_all:
        nested = op_schemas.with_specs(schema, op_schemas.specs_of(found.wanted))
    kernel = TakingBack(schema.op, found.function, schema, nested, made)
    return OpPlan(schema, written, kernel=kernel, takes_all=True)


def _as_what_is_written(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> OpPlan | None:
    """The plan for a pointwise op that writes to a tensor, or to each of a list: its other operands
    are redistributed to the placements of the tensor that it writes to. None if a tensor that is
    written to is pending, or an operand is plain.
    """
    arguments, wanted = op_schemas.arguments(schema), []
    targets = [found for is_written, found in arguments if is_written]
    for is_written, found in arguments:
        fitting = next((some for some in targets if len(some) in (1, len(found))), None)
        for i, spec in enumerate(found):
            of = None if fitting is None else fitting[i % len(fitting)]
            if spec is None or of is None:
                return None
            if is_written and tuple(of.placements) != tuple(spec.placements):
                return None
            wanted.append(tuple(spec.placements) if is_written else following(of, spec))
    written = [spec for some in targets for spec in some if spec is not None]
    if not are_understood(specs) or any(
        isinstance(p, Partial) for spec in written for p in spec.placements
    ):
        return None
    as_order = are_read_as_order(specs)
    if as_order and not keeps_the_only_shards(specs, wanted):
        return None
    count(name, "signature")
    logger.debug("%s: operands as what is written: %s", name, ", ".join(map(text, wanted)))
    return placed(
        schema,
        specs,
        wanted,
        [tuple(spec.placements) for spec in written],
        registry.output_metas(schema),
        as_order=as_order,
    )


def following(written: DTensorSpec, operand: DTensorSpec) -> tuple[Placement, ...]:
    """The placements that give each device the rows of the operand, which may be broadcast, for its
    part of the tensor that is written to.
    """
    before = len(written.shape) - len(operand.shape)

    def placed(p: Placement) -> Placement:
        if (
            not isinstance(p, (Shard, StridedShard))
            or p.dim < before
            or (
                symints.is_truly(operand.shape[p.dim - before] == 1)
                and not symints.is_truly(written.shape[p.dim] == 1)
            )
        ):
            return Replicate()
        return on_dim(p, p.dim - before)

    return tuple([placed(p) for p in written.placements])


def by_write(question: Question) -> OpPlan | None:
    """The plan for a pointwise op that writes to an operand; None for others. A pending operand has
    to be reduced before it is written to, as for the op that returns a new tensor.
    """
    schema = question.schema
    if not (question.is_pointwise and schema.op._schema.is_mutable):
        return None
    try:
        found = _as_what_is_written(question.name, schema, question.specs)
        return found or question.moved_by_plan(question.torchs(schema))
    except Exception:
        if not any(
            isinstance(p, Partial)
            for _, spec in op_schemas.written(schema.op, schema)
            for p in spec.placements
        ):
            raise
    finished = without_partials(schema)
    specs = op_schemas.specs_of(finished)
    found = _as_what_is_written(question.name, finished, specs) or question.torchs(finished)
    kernel = outside_loss_parallel(schema.op) if question.smooths_labels else found.kernel
    return replace(found.asked(schema), kernel=kernel)


def by_lists(question: Question) -> OpPlan | None:
    """The plan for a pointwise op on lists (``_foreach_copy_``, ``_foreach_maximum``) that torch's
    table of rules lacks, which has about 60 of them, by name: pending tensors of its first list are
    reduced, and the tensors of its other lists are redistributed to the placements of those of the
    first. None for other ops, or if a list has plain tensors.
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


def without_partials(schema: OpSchema) -> OpSchema:
    """The op on operands of which every pending one is replicated."""
    return op_schemas.replaced_specs(schema, lambda spec: without((Partial,), spec.placements))
