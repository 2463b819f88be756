"""Redistributes what ops need, and moves back what they write to redistributed operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.bookkeeping.stats import count, count_left_to_torch, logger
from cute_sharding.dtensor.decide.question import Question, is_torchs, is_torchs_alone
from cute_sharding.dtensor.decide.values import outside_loss_parallel
from cute_sharding.dtensor.door.cuts import are_read_as_order, are_understood, keeps_the_only_shards
from cute_sharding.dtensor.replaced import (
    dispatch,
    dispatch_modes,
    local_tensors,
    op_schemas,
    redistribution_hook,
    symints,
    tensor_specs,
)
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
from cute_sharding.dtensor.run.in_graphs import tag
from cute_sharding.dtensor.run.lists import LocalMove, exchange_together
from cute_sharding.dtensor.run.op_plan import OpPlan, placed, plan_of
from cute_sharding.dtensor.run.ops import Redistributed, note_views
from cute_sharding.dtensor.run.packing import OtherShape, lay_out
from cute_sharding.dtensor.run.placements import on_dim, say_redistributed, text, without
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.run.written import TakingBack

# -- redistributions -------------------------------------------------------------------------------
# Redistributes what ops need: which redistributions run by plan, and which by torch.


def redistribution_of_arguments(local_args: Callable[..., None]) -> Callable[..., None]:
    """The dispatcher's step that redistributes an op's arguments: by plan if a rule of ours
    answered. The planned redistributions of an op on lists run together.
    """

    def redistribute_local_args(
        op_info: Any, suggested_input_schema: OpSchema, use_val_from_redistribute_schema: bool
    ) -> None:
        schema, takes_others = suggested_input_schema, use_val_from_redistribute_schema
        plan, settings = plan_of(schema), in_force()
        if plan is not None and plan.read is not None:
            plan.read(op_info)
        if plan is not None and plan.takes_all:
            return  # the function takes the arguments without redistribution
        if settings is None or not settings.views:
            plan = None
        before, answered = op_info.local_args, plan is not None and plan.by_plan
        of_lists = dispatch.is_of_lists(op_info)
        if answered or (of_lists and settings is not None and settings.redistribution):
            move = partial(all_redistributed, at_once=of_lists, answered=answered)
            dispatch.redistribute_arguments(op_info, schema, takes_others, move)
        else:
            local_args(op_info, schema, takes_others)
        if plan is None:
            return
        for name, (spec, wanted) in plan.keywords.items():
            dispatch.observe(spec, wanted, f"argument {name}")
            local = op_info.local_kwargs[name]
            op_info.local_kwargs[name] = redistribute(local, spec, wanted, answered=True)
        if plan.copied:
            specs: Any = plan.schema.args_schema[0], plan.wanted.args_schema[0]
            way = Redistributed(*specs)
            note_views(way, before[0], way.spec, [op_info.local_args[0]])

    return redistribute_local_args


def all_redistributed(
    moves: Sequence[tuple[torch.Tensor, DTensorSpec, DTensorSpec]],
    *,
    at_once: bool,
    answered: bool,
) -> list[torch.Tensor]:
    """Redistributed tensors: with ``at_once``, as for an op on lists, the planned exchanges run
    together.
    """
    settings = in_force()
    moved: list[torch.Tensor | None] = [None] * len(moves)
    if at_once and len(moves) > 1 and settings is not None:
        wanted = [LocalMove(one[0], *_settle(*one, settings)) for one in moves]
        planned = [one if _is_planned(*one, settings, answered) else None for one in wanted]
        moved = exchange_together(planned, counted=settings.redistribution or not answered)
    return [
        redistribute(*move, answered=answered) if local is None else local
        for move, local in zip(moves, moved)
    ]


def _settle(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, settings: Settings
) -> tuple[DTensorSpec, DTensorSpec]:
    # What is traced with symbols is no plain tensor.
    if type(local) is torch.Tensor or not dispatch_modes.is_tracing():
        return current, target
    tag(settings)  # dynamo calls this before it looks into a cache
    return symints.settled_spec(current), symints.settled_spec(target)


def redistribute(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    *,
    answered: bool = False,
    async_op: bool = False,
    is_explicit: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Runs in place of torch's redistribute_local_tensor: by plan if that is wanted, else torch's.
    ``answered``: a rule of ours asks for it, for an op's argument. It is then planned under any
    setting, if a plan is possible, and is not counted again, because the op is.
    """
    stock = redistribution_hook.stock_redistribute
    settings = in_force()
    how = {"async_op": async_op, "is_explicit": is_explicit}
    if settings is None:
        return stock(local, current, target, **how, **options)
    current, target = _settle(local, current, target, settings)
    if _is_planned(local, current, target, settings, answered):
        counted = settings.redistribution or not answered
        try:
            return redistribute_local_tensor(local, current, target, counted=counted, **how)
        except OtherShape:
            if not is_torchs_alone(current, target):
                raise
    if settings.redistribution:
        count_left_to_torch()
        say_redistributed(
            current.mesh, tuple(current.shape), current.placements, target.placements, None
        )
    moved = stock(local, current, target, **how, **options)
    if is_explicit or moved is local or local_tensors.is_wrapper(local):
        return moved  # a redistribution that a program asks torch for keeps torch's layout
    return lay_out(moved, current.tensor_meta)


def _is_planned(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    settings: Settings,
    answered: bool,
) -> bool:
    """Whether a plan redistributes, and not torch. The same on all ranks: it depends only on the
    specs, the settings and the op.
    """
    if local_tensors.is_wrapper(local):
        return False
    if not (
        tensor_specs.are_known(current.placements) and tensor_specs.are_known(target.placements)
    ):
        return False
    is_wanted = settings.redistribution or answered or not is_torchs(current, target)
    return is_wanted and not _lacks_numbers(current.shape)


def _lacks_numbers(shape: Sequence[Any]) -> bool:
    """Whether some size is a symbol without a value."""
    return symints.is_symbolic(*shape) and symints.numbers_at_hand(tuple(shape)) is None


# -- written ---------------------------------------------------------------------------------------
# Ops that write to operands: writes to redistributed copies are moved back; for pointwise ops the
# other operands are redistributed to the placements of the tensor that is written to.


def taken_back(plan: OpPlan) -> OpPlan:
    """The plan for an op. If it redistributes tensors that it writes to, the op runs so that what
    it writes is moved back to them: torch would go on with the copy, or lose it.
    """
    schema, op = plan.schema, plan.schema.op
    if plan.needs is None or plan.takes_all:
        return plan
    if _keeps_what_is_written(plan):
        return plan
    written = [spec for _, spec in op_schemas.written(op, schema)]
    # torch lists the specs of lists of tensors one by one, between the other arguments.
    nested = op_schemas.with_specs(schema, op_schemas.specs_of(plan.needs))
    gives_these = op_schemas.is_in_place(op) and plan.results is not None
    results: Any = plan.results
    if gives_these or any(argument.is_out for argument in op._schema.arguments):
        results = written[0] if len(written) == 1 else tuple(written)
    kernel = TakingBack(op, plan.function, schema, nested)
    return OpPlan(schema, results, plan.needs, kernel=kernel, takes_all=True)


def _keeps_what_is_written(plan: OpPlan) -> bool:
    """Whether the op runs on the tensors that it writes to as they lie."""
    op = plan.schema.op
    written, moved = (op_schemas.written(op, each) for each in (plan.schema, plan.wanted))
    return all(tuple(a.placements) == tuple(b.placements) for (_, a), (_, b) in zip(written, moved))


def written_by_new(found: OpPlan, schema: OpSchema) -> OpPlan:
    """The plan for an op in place, from ``found``, that for the op on the same arguments that
    returns a new tensor. The tensor that is written to keeps its placements.

    The op in place runs if the other would run on placements that its result has too; otherwise the
    other runs, and its result is redistributed and copied. Errors of the op in place, such as for
    a dtype that it cannot write, are raised first, as on one device.
    """
    op_schemas.output_metas(schema)
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
        op_schemas.output_metas(schema),
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
    to be reduced before it is written to, as for the op that returns a new tensor, if the op does
    not commute with the reduction.
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
    commuting = question.signed()
    if commuting is not None and _keeps_what_is_written(commuting):
        return commuting
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
        op_schemas.output_metas(schema),
        as_order=are_read_as_order(specs),
    )


def without_partials(schema: OpSchema) -> OpSchema:
    """The op on operands of which every pending one is replicated."""
    return op_schemas.replaced_specs(schema, lambda spec: without((Partial,), spec.placements))
