"""Decides what an op does: the placements that it needs, and those of its results.

A decision is a function of the op, the specs of its operands, the settings and the release of
torch. :func:`propagation` first describes operands of several meshes on one mesh (:mod:`.meshes`).
A movement op is answered by its map of rows (:mod:`.movement`), mostly only with the setting
``movement``, unless the program has registered a rule for it. All other ops are answered in the
order of :func:`decide`:

1. *Program*: the program has registered a rule for the op: that rule, after the gate.
2. *View*: the same layout, read under the shape of the output (:mod:`.views`).
3. *Decompose*: torch decomposes the op except in inference mode, and the op as a whole is not
   known to be right: it is decomposed here too.
4. *Fix*: torch's rule is wrong on placements that it accepts (:mod:`..fixes`).
5. *Written, made anew*: ops in place of which only the form that returns a new tensor has a rule;
   pointwise ops on lists without a rule; pointwise ops that write to an operand; ops whose results
   do not depend on the values of a pending operand.
6. *Signature*: torch has no rule of its own, and the op has a signature.
7. *Torch*: its rule is right, unless the signature receives less (:func:`_torchs_or_less`).
8. *Signature*: the placements are of kinds that only views make.
9. *Torch*: a pointwise op without a signature.
10. *Gate*: torch's rule, after the placements on which it is not known to be right are replicated.

How data then moves is in :mod:`..run`.

If a result without dims is pending, it is reduced together with the op (:mod:`.scalars`).

Convolutions, ``argmax`` and ``argmin`` start in :func:`.gate.gated_handler`: torch has functions of
its own for them, which run where no fix says that they are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.decide.gate import placed_by_search
from cute_sharding.dtensor.decide.local_arguments import with_kernel_arguments
from cute_sharding.dtensor.decide.local_results import in_order
from cute_sharding.dtensor.decide.meshes import on_one_mesh
from cute_sharding.dtensor.decide.movement import moved
from cute_sharding.dtensor.decide.on_lists import decide_lists
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.decide.refusals import in_words
from cute_sharding.dtensor.decide.scalars import with_scalars_finished
from cute_sharding.dtensor.decide.signatures import for_less
from cute_sharding.dtensor.decide.values import by_numbers, of_values
from cute_sharding.dtensor.decide.views import answer_view
from cute_sharding.dtensor.decide.written import (
    decide_write,
    taken_back,
    without_partials,
    written_by_new,
)
from cute_sharding.dtensor.door.cuts import leave_one_without
from cute_sharding.dtensor.fixes.table import ALL, CUTS, Fix, Remedy, fix_of
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.op_schemas import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpSchema,
)
from cute_sharding.dtensor.replaced.tensor_specs import Partial, StridedShard
from cute_sharding.dtensor.run.graph_keys import tag_traced
from cute_sharding.dtensor.run.placements import without


def propagation(torchs: Callable[[OpSchema], Any], settings: Settings) -> Callable[[OpSchema], Any]:
    """The propagator's function from an op on specs to the placements that it needs and gives."""

    def stock(schema: OpSchema) -> Any:
        return op_schemas.with_keywords_of_rule(torchs(schema), schema)

    def propagate(schema: OpSchema) -> Any:
        question = Question(schema, tuple(op_schemas.specs_of(schema)), stock, settings)
        try:
            is_of_the_program = registry.is_of_the_program(schema.op)
            if not is_of_the_program and (found := by_numbers(question)) is not None:
                return found
            found = None if is_of_the_program else moved(question)
            is_moved = found is not None
            found = found if is_moved else _complete(question, decide(question))
        except (
            NotImplementedError,
            DynamicOutputShapeException,
            DataDependentOutputException,
        ) as error:
            by_values = None if isinstance(error, NotImplementedError) else of_values(question)
            if by_values is None:
                raise in_words(error, question.schema, question.specs) from error
            return by_values
        if not is_tracing():
            return found
        if is_moved or question.is_view:
            tag_traced()
        answers.settle_strides(found, asks=settings.redistribution or settings.movement)
        return found

    return on_one_mesh(propagate)


def decide(question: Question) -> Any:
    """The answer in torch's form, in the order that the docstring of this file gives."""
    if registry.is_of_the_program(question.schema.op):
        strided = question.is_strided
        return question.gated((StridedShard,)) if strided else question.stock(question.schema)
    if question.is_view:
        return answer_view(question)
    if question.is_wrong_in_one:
        raise NotImplementedError  # torch then decomposes the op
    fix = fix_of(question.schema, question.specs)
    if fix is not None:
        return _apply_fix(question, fix)
    if (new := op_schemas.new_form(question.schema.op)) is not None:
        return _decide_in_place(question, new)
    if (found := decide_lists(question)) is not None:
        return found
    if question.is_pointwise and question.schema.op._schema.is_mutable:
        return decide_write(question)
    if question.is_made_anew:
        return _decide_new(question)
    if question.is_derived_in_torch and (found := question.signed()) is not None:
        return found
    if question.is_right_in_torch:
        return _torchs_or_less(question)
    if (found := question.signed()) is not None:
        return found
    return _torchs_or_less(question) if question.is_pointwise else _gated(question)


def _gated(question: Question) -> Any:
    """The gate's answer. If the op writes, torch may refuse that too: then the written tensor has a
    plain placement that the op cannot keep.
    """
    try:
        return question.gated((StridedShard,))
    except (RuntimeError, ValueError):
        refused = _where_torch_refuses(question)
        if refused is None:
            raise
        return refused


def _apply_fix(question: Question, fix: Fix) -> Any:
    match fix.remedy:
        case Remedy.FALSE:
            on = question.specs[0].mesh
            return answers.by_function(question.schema, lambda *_: False, on, [], None)
        case Remedy.FUNCTION:
            return placed_by_search(question.stock(question.schema), question.schema)
        case Remedy.GATE:
            return question.gated(fix.kinds)
        case Remedy.SUM:
            summed = op_schemas.of_sum(question.schema, 3)
            return answers.from_other_specs(decide(replace(question, schema=summed)), summed)
        case Remedy.SIGNATURE:
            return question.signed() or question.gated(fix.kinds)


def _complete(question: Question, found: Any) -> Any:
    """The answer, with everything that running the op needs beside torch's answer."""
    schema = question.schema
    found = with_kernel_arguments(question.name, schema, answers.with_keywords(found, schema))
    if schema.op._schema._is_view_op() or question.is_view:
        return answers.of_view(found, schema, by_plan=question.is_view)
    return taken_back(in_order(with_scalars_finished(found, schema), schema), schema)


def _torchs_or_less(question: Question) -> Any:
    """torch's answer, with operands moved by plan; or the signature's, in four cases: torch refuses
    (the gate's if there is no signature); a device gets no rows and the op cannot compute on none;
    torch moves operands of which one is strided; it moves others and the signature receives less.
    """
    try:
        found = question.stock(question.schema)
    except (RuntimeError, ValueError):
        refused = _where_torch_refuses(question)
        if refused is None:
            raise
        return refused
    row, wanted = question.row, found.redistribute_schema or question.schema
    if row is None:
        return found
    if row.filled and leave_one_without(op_schemas.specs_of(wanted)):
        return question.signed() or found
    if wanted is question.schema or not question.is_sharded:
        return found
    if question.is_strided:
        return question.signed() or question.moved_by_plan(found)
    less = for_less(row, question.name, question.schema, question.specs, found)
    return less or question.moved_by_plan(found)


def _where_torch_refuses(question: Question) -> Any | None:
    """The answer by the op's signature if there is one, and else the gate's. If the op writes, a
    pending operand is reduced too.
    """
    if question.is_composite:
        raise NotImplementedError
    found = question.signed()
    kinds = ALL if question.schema.op._schema.is_mutable else CUTS
    if found is None and (question.is_sharded or (kinds is ALL and question.is_pending)):
        try:
            found = question.gated(kinds)
        except Exception:  # torch did not refuse because of the placements
            return None
    return found


def _decide_in_place(question: Question, new: Any) -> Any:
    """The answer for an op in place, by that for ``new``, the op that returns a new tensor."""
    given = question.schema
    schema = op_schemas.OpSchema(
        new, given.args_schema, given.kwargs_schema, registry.schema_info(new)
    )
    found = answers.with_keywords(decide(replace(question, schema=schema)), schema)
    return written_by_new(
        with_kernel_arguments(registry.name_of(new), schema, found), schema, given
    )


def _decide_new(question: Question) -> Any:
    schema = question.schema
    if schema.op._schema.is_mutable:
        finished = without_partials(schema)
        return answers.from_other_specs(question.stock(finished), finished)
    return answers.with_outputs(
        _torchs_or_less(question), lambda spec: without((Partial,), spec.placements)
    )
