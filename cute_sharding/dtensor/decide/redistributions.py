"""Redistributes what ops need: which redistributions run by plan, and which by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.bookkeeping.stats import count_left_to_torch
from cute_sharding.dtensor.decide.stock import is_torchs, is_torchs_alone
from cute_sharding.dtensor.replaced import (
    dispatch,
    dispatch_modes,
    local_tensors,
    redistribution_hook,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.graph_keys import tag
from cute_sharding.dtensor.run.lists import LocalMove, exchange_together
from cute_sharding.dtensor.run.moved_views import Redistributed, note_views
from cute_sharding.dtensor.run.op_plan import plan_of
from cute_sharding.dtensor.run.order import lay_out
from cute_sharding.dtensor.run.packing import OtherShape
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.run.words import say_redistributed


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
            move = partial(_all_redistributed, at_once=of_lists, answered=answered)
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


def _all_redistributed(
    moves: Sequence[tuple[torch.Tensor, DTensorSpec, DTensorSpec]],
    *,
    at_once: bool,
    answered: bool,
) -> list[torch.Tensor]:
    """The redistributed arguments of an op. For an op on lists (``at_once``), the planned exchanges
    run together.
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
