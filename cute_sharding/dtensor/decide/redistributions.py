"""How what ops need gets to them: which redistributions run by plan, and which are torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.answer.running import complete_arguments
from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.bookkeeping.stats import count_left_to_torch
from cute_sharding.dtensor.decide.stock import is_torchs, is_torchs_alone
from cute_sharding.dtensor.extras.copies import note_copy
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
from cute_sharding.dtensor.run.lists import Wanted, exchanged_together
from cute_sharding.dtensor.run.order import laid_out
from cute_sharding.dtensor.run.packing import OtherShape
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.run.words import say_redistributed


def redistribution_of_arguments(local_args: Callable[..., None]) -> Callable[..., None]:
    """The dispatcher's step that redistributes an op's arguments; by plan for rules of ours. Of
    lists, what goes by plan goes together.
    """

    def redistribute_local_args(
        op_info: Any, suggested_input_schema: OpSchema, use_val_from_redistribute_schema: bool
    ) -> None:
        schema, takes_others = suggested_input_schema, use_val_from_redistribute_schema
        answer, settings = answers.answer_of(schema), in_force()
        if answer is not None and answer.read is not None:
            answer.read(op_info)
        if answer is not None and answer.takes_all:
            return  # it is given them as they are
        if settings is None or not settings.views:
            answer = None
        before, answered = op_info.local_args, answer is not None and answer.by_plan
        of_lists = dispatch.is_of_lists(op_info)
        if answered or (of_lists and settings is not None and settings.redistribution):
            move = partial(_all_redistributed, at_once=of_lists, answered=answered)
            dispatch.redistribute_arguments(op_info, schema, takes_others, move)
        else:
            local_args(op_info, schema, takes_others)
        if answer is None:
            return
        complete_arguments(op_info, schema, answer, partial(redistribute, answered=True))
        if answer.copied is not None:
            note_copy(before[0], *answer.copied, op_info.local_args[0])

    return redistribute_local_args


def _all_redistributed(
    moves: Sequence[tuple[torch.Tensor, DTensorSpec, DTensorSpec]],
    *,
    at_once: bool,
    answered: bool,
) -> list[torch.Tensor]:
    """The arguments of an op, where they are to be; what is exchanged of them ``at_once``, if it
    takes them in lists.
    """
    settings = in_force()
    moved: list[torch.Tensor | None] = [None] * len(moves)
    if at_once and len(moves) > 1 and settings is not None:
        wanted = [Wanted(x, *_settled(before, after, settings)) for x, before, after in moves]
        some = [i for i, one in enumerate(wanted) if _is_planned(*one, settings, answered)]
        counted = settings.redistribution or not answered
        together = exchanged_together([wanted[i] for i in some], counted=counted)
        for i, local in zip(some, together):
            moved[i] = local
    return [
        redistribute(*move, answered=answered) if local is None else local
        for move, local in zip(moves, moved)
    ]


def _settled(
    current: DTensorSpec, target: DTensorSpec, settings: Settings
) -> tuple[DTensorSpec, DTensorSpec]:
    if not dispatch_modes.is_tracing():
        return current, target
    tag(settings)  # dynamo comes by here before a cache is asked
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
    """What stands in for torch's redistribute_local_tensor: a plan's steps where they are wanted,
    else torch's. ``answered``: it is what a rule of ours asks for of an op's argument. That is by
    plan under any setting, where there may be one, and an outcome of the op, not counted again.
    """
    stock = redistribution_hook.stock_redistribute
    settings = in_force()
    how = {"async_op": async_op, "is_explicit": is_explicit}
    if settings is None:
        return stock(local, current, target, **how, **options)
    current, target = _settled(current, target, settings)
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
        return moved  # what a program asks torch for lies as torch leaves it
    return laid_out(moved, current.tensor_meta)


def _is_planned(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    settings: Settings,
    answered: bool,
) -> bool:
    """Whether a plan redistributes, and not torch. Alike on all ranks: it depends on the specs, the
    settings and the op alone.
    """
    if local_tensors.is_wrapper(local):
        return False
    if not (
        tensor_specs.are_known(current.placements) and tensor_specs.are_known(target.placements)
    ):
        return False
    shape = tuple(current.shape)
    is_symbolic = symints.is_symbolic(shape)
    # Placements that views make, and that torch would misread or move wrongly; and it counts the
    # rows of strided shards one by one, which it cannot of symbols.
    is_wanted = (
        settings.redistribution
        or answered
        or (is_symbolic and any(map(tensor_specs.split_factors, (current, target))))
        or not is_torchs(current, target)
    )
    return is_wanted and (not is_symbolic or symints.numbers_at_hand(shape) is not None)
