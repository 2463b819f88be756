"""Decides what a call of an op does: an :class:`~cute_sharding.dtensor.run.op_plan.OpPlan`.

A decision is a function of the op, the specs of its operands, the settings and the release of
torch. :func:`propagation` first describes operands of several meshes on one mesh (:mod:`.meshes`).
Then the first function of :data:`ORDER` that has a plan decides, and :func:`_completed` adds what
running the op needs beside it. How data then moves is in :mod:`..run`.

Convolutions, ``argmax`` and ``argmin`` start in :func:`.gate.gated_handler`: torch has functions of
its own for them, which run where no fix says that they are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.decide.gate import placed_by_search
from cute_sharding.dtensor.decide.local_arguments import for_kernel
from cute_sharding.dtensor.decide.local_results import in_order, with_numbers_finished
from cute_sharding.dtensor.decide.meshes import on_one_mesh
from cute_sharding.dtensor.decide.movement import by_movement
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.decide.refusals import in_words
from cute_sharding.dtensor.decide.values import by_numbers, of_values
from cute_sharding.dtensor.decide.views import by_view
from cute_sharding.dtensor.decide.written import (
    by_lists,
    by_write,
    taken_back,
    without_partials,
    written_by_new,
)
from cute_sharding.dtensor.fixes.table import ALL, CUTS, Remedy, fix_of
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.op_schemas import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpSchema,
    OutputSharding,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, StridedShard
from cute_sharding.dtensor.run.graph_keys import tag_traced
from cute_sharding.dtensor.run.op_plan import OpPlan, by_function
from cute_sharding.dtensor.run.ops import Runner
from cute_sharding.dtensor.run.placements import without


def propagation(
    torchs: Callable[[OpSchema], OutputSharding], settings: Settings
) -> Callable[[OpSchema], OutputSharding]:
    """The propagator's function from an op on specs to the placements that it needs and gives."""

    def plan(schema: OpSchema) -> OpPlan:
        question = Question(schema, tuple(op_schemas.specs_of(schema)), torchs, settings)
        try:
            found = decide(question)
        except NotImplementedError as error:
            raise in_words(error, schema, question.specs) from error
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            by_values = of_values(question)
            if by_values is None:
                raise in_words(error, schema, question.specs) from error
            return by_values
        found = _completed(question, found)
        if is_tracing():
            if isinstance(found.kernel, Runner) or question.is_view:
                tag_traced()
            found.settle_strides(asks=settings.redistribution or settings.movement)
        return found

    plan_on_one_mesh = on_one_mesh(plan)
    return lambda schema: plan_on_one_mesh(schema).for_torch()


def decide(question: Question) -> OpPlan:
    """The plan of the first of :data:`ORDER` that has one."""
    return next(plan for answer in ORDER if (plan := answer(question)) is not None)


def by_program(question: Question) -> OpPlan | None:
    """By the rule that the program has registered for the op; after the gate, if it may not know
    some placements.
    """
    if not registry.is_of_the_program(question.schema.op):
        return None
    if question.is_strided:
        return question.gated((StridedShard,))
    return question.torchs(question.schema)


def by_parts(question: Question) -> None:
    """
    Raises:
        NotImplementedError: the op as a whole is not known to be right. On this error torch
            decomposes it, as it does except in inference mode, and asks for its parts.
    """
    if question.is_wrong_in_one:
        raise NotImplementedError


def by_fix(question: Question) -> OpPlan | None:
    """Where torch's rule is wrong on placements that it accepts (:mod:`..fixes`)."""
    schema = question.schema
    fix = fix_of(schema, question.specs)
    if fix is None:
        return None
    match fix.remedy:
        case Remedy.FALSE:
            return by_function(schema, lambda *_: False, question.specs[0].mesh, [], None)
        case Remedy.FUNCTION:
            return placed_by_search(question.torchs(schema), schema)
        case Remedy.GATE:
            return question.gated(fix.kinds)
        case Remedy.SUM:
            return decide(replace(question, schema=op_schemas.of_sum(schema, 3))).asked(schema)
        case Remedy.SIGNATURE:
            return question.signed() or question.gated(fix.kinds)


def by_new_form(question: Question) -> OpPlan | None:
    """For an op in place, if only the form that returns a new tensor has a rule: by that."""
    schema = question.schema
    op = op_schemas.new_form(schema.op)
    if op is None:
        return None
    new = OpSchema(op, schema.args_schema, schema.kwargs_schema, registry.schema_info(op))
    found = decide(replace(question, schema=new))
    return written_by_new(found.prepared(for_kernel(registry.name_of(op), found.wanted)), schema)


def by_shape(question: Question) -> OpPlan | None:
    """For ops whose results do not depend on the values of an operand that is pending: they are the
    same everywhere.
    """
    if not question.is_made_anew:
        return None
    schema = question.schema
    if schema.op._schema.is_mutable:
        return question.torchs(without_partials(schema)).asked(schema)
    found = by_torch(question) or by_gate(question)
    return found.placed(lambda spec: without((Partial,), spec.placements))


def by_rule(question: Question) -> OpPlan | None:
    """By the op's signature (:mod:`.signatures`); but not if a reduction is pending that signatures
    do not know, such as that of a norm, and torch has a rule that may.
    """
    row = question.row
    torch_may = (
        question.is_pending_otherwise
        and question.is_right_in_torch
        and row is not None
        and not row.filled
        and not registry.is_derived(question.schema.op)
    )
    return None if torch_may else question.signed()


def by_torch(question: Question) -> OpPlan | None:
    """By torch's rule, if it is right on these placements. None if it refuses them."""
    if not (question.is_right_in_torch or question.is_pointwise):
        return None
    try:
        return question.moved_by_plan(question.torchs(question.schema))
    except (RuntimeError, ValueError):
        return None


def by_gate(question: Question) -> OpPlan:
    """By torch's rule, after the placements on which it is not known to be right are replicated;
    and if it refuses that, all shards. If it still refuses, by the signature, after pending
    reductions that signatures do not know; without one, as torch would have refused at first.
    """
    writes = question.schema.op._schema.is_mutable
    kinds: list[tuple[type, ...]] = [(StridedShard,)] if question.is_strided else []
    if question.is_sharded or (writes and question.is_pending):
        kinds.append(ALL if writes else CUTS)
    refused: Exception | None = None
    for each in kinds:
        try:
            return question.gated(each)
        except Exception as error:
            refused = refused or error
    if (found := question.signed()) is not None:
        return found
    if question.is_composite:
        raise NotImplementedError from refused  # torch then decomposes the op
    if question.is_strided and refused is not None:
        raise refused
    return question.torchs(question.schema)


# The first that has a plan decides.
ORDER: tuple[Callable[[Question], OpPlan | None], ...] = (
    by_program,
    by_numbers,
    by_movement,
    by_view,
    by_parts,
    by_fix,
    by_new_form,
    by_lists,
    by_write,
    by_shape,
    by_rule,
    by_torch,
    by_gate,
)


def _completed(question: Question, plan: OpPlan) -> OpPlan:
    """The plan, with what running the op needs beside it."""
    if plan.finishes is not None or plan.takes_all:
        return plan
    plan = plan.prepared(for_kernel(question.name, plan.wanted))
    if question.schema.op._schema._is_view_op() or question.is_view:
        return _of_view(plan, by_plan=question.is_view)
    return taken_back(in_order(with_numbers_finished(plan)))


def _of_view(plan: OpPlan, *, by_plan: bool) -> OpPlan:
    """The plan for a view. If its input is redistributed first, by our plan (``by_plan``) or by
    torch, the output is a copy.
    """
    before: Any = plan.schema.args_schema[0]
    if plan.needs is None or not isinstance(before, DTensorSpec):
        return plan
    after: Any = plan.needs.args_schema[0]
    if tuple(before.placements) == tuple(after.placements):
        return plan
    return replace(plan, copied=True, by_plan=by_plan or plan.by_plan)
