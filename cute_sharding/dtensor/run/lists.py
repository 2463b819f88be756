"""Redistributions of several tensors at once: those on one mesh share their exchanges.

Used for operands that an op takes in lists (``_foreach_``, ``_fused_``, ``cat``, ``stack``). A
tensor takes part if elements are sent or reduced, and nothing is made pending. Cuts that each
device makes alone run tensor by tensor, and so do reductions by methods of placements, and those
that hand out blocks which are no rows of a dim. Which tensors take part follows from each
redistribution's arguments (:mod:`.redistribute`), so it is the same on all ranks, eagerly and in
graphs. A graph has one op for them (:mod:`.in_graphs`), or one all-gather if it is one and sizes
are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, count_moves
from cute_sharding.dtensor.replaced import communication, dispatch_modes, symints
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    dtype_of_powers,
    powers,
    root,
)
from cute_sharding.dtensor.run.executor import is_shown
from cute_sharding.dtensor.run.in_graphs import on_all_ranks, run_opaque
from cute_sharding.dtensor.run.packing import lay_out
from cute_sharding.dtensor.run.placements import say_redistributed
from cute_sharding.dtensor.run.redistribute import (
    Prepared,
    planned_for,
    redistribute_local_tensor,
    settle_divisions,
)
from cute_sharding.dtensor.run.together import Turn, are_collectives, is_joined, run_together, turns


class LocalMove(NamedTuple):
    """A local tensor, and the specs between which to redistribute it."""

    local: torch.Tensor
    current: DTensorSpec
    target: DTensorSpec


def redistribute_all(wanted: Sequence[LocalMove], *, counted: bool = True) -> list[torch.Tensor]:
    """Redistribute each of them, together where possible."""
    return [
        redistribute_local_tensor(*one, counted=counted) if moved is None else moved
        for one, moved in zip(wanted, exchange_together(wanted, counted=counted))
    ]


def exchange_together(
    wanted: Sequence[LocalMove | None], *, counted: bool
) -> list[torch.Tensor | None]:
    """The results of redistributions that share exchanges; None for None, and for one that no other
    tensor on its mesh can join.

    Raises:
        OtherShape: a local tensor does not have the shape that its spec gives.
    """
    results: list[torch.Tensor | None] = [None] * len(wanted)
    ends = [None if one is None else (one.current, one.target, one.local.dtype) for one in wanted]
    for mesh, found in plans_that_join(ends).items():
        given: Any = [wanted[i] for i in found]
        moved = _redistribute_together([*found.values()], given, mesh, counted=counted)
        for i, x in zip(found, moved):
            results[i] = x
    return results


# From one spec to another, of elements of this dtype.
Ends: TypeAlias = "tuple[DTensorSpec, DTensorSpec, torch.dtype]"


def plans_that_join(wanted: Sequence[Ends | None]) -> dict[Any, dict[int, Prepared]]:
    """For each mesh on which several redistributions share exchanges, their plans, by number."""
    joined: dict[Any, dict[int, Prepared]] = {}
    for i, ends in enumerate(wanted if len(wanted) > 1 else ()):
        found = None if ends is None else _exchanges(*ends)
        if ends is not None and found is not None:
            joined.setdefault(ends[0].mesh, {})[i] = found
    return {mesh: some for mesh, some in joined.items() if len(some) > 1}


def turns_of(found: Sequence[Prepared], dtypes: Iterable[torch.dtype]) -> tuple[Turn, ...]:
    """The turns of plans that join, for tensors of these dtypes, and the dtypes that they send."""
    plans = tuple([tuple(each.plan.steps) for each in found])
    sent = [
        dtype if each.norm is None else dtype_of_powers(dtype) for each, dtype in zip(found, dtypes)
    ]
    return turns(plans, tuple(sent))


def _exchanges(current: DTensorSpec, target: DTensorSpec, dtype: torch.dtype) -> Prepared | None:
    """The plan, if all of its steps can run together with others and something is sent; otherwise
    None.
    """
    mesh: Any = current.mesh
    if mesh != target.mesh or not mesh._is_current_rank_part_of_mesh():
        return None
    found = planned_for(current, target)
    if found.first or found.reductions or found.made:
        return None
    if not all(is_joined(step, dtype, mesh) for step in found.plan.steps):
        return None
    return found if any(step.communicates for step in found.plan.steps) else None


def _redistribute_together(
    found: Sequence[Prepared], wanted: Sequence[LocalMove], mesh: Any, *, counted: bool
) -> list[torch.Tensor]:
    dtypes = [one.local.dtype for one in wanted]
    together = turns_of(found, dtypes)
    if counted:
        kinds = _shared(together, tuple([each.kind for each in found]))
        for each, one, kind in zip(found, wanted, kinds):
            count_moves(kind)
            plan, before, after = each.plan, one.current.placements, one.target.placements
            say_redistributed(mesh, plan.shape, before, after, plan, among=len(wanted))
    tensors = [communication.wait_for(one.local) for one in wanted]
    tensors = [x if of.norm is None else powers(of.norm, x) for of, x in zip(found, tensors)]
    shapes = [tuple(one.current.shape) for one in wanted]
    is_seen = not symints.is_symbolic(*shapes) and all(
        are_collectives(steps, [tensors[i].dtype for i in members], mesh)
        if len(steps) > 1
        else is_shown(steps[0], tensors[members[0]].dtype, mesh)
        for members, steps in together
    )
    with on_all_ranks([each.plan for each in found], dtypes, mesh, *shapes):
        if dispatch_modes.is_tracing() and not is_seen:
            for each, shape in zip(found, shapes):
                settle_divisions(each.plan, shape, mesh)
            moved = run_opaque([each.plan for each in found], tensors, mesh, shapes)
        else:
            moved = run_together([tuple(each.plan.steps) for each in found], tensors, mesh)
        moved = [
            x if of.norm is None else root(of.norm, x, dtype)
            for of, x, dtype in zip(found, moved, dtypes)
        ]
        return [lay_out(x, one.target.tensor_meta) for x, one in zip(moved, wanted)]


@remembered
def _shared(together: tuple[Turn, ...], kinds: tuple[Kind, ...]) -> list[Kind]:
    """The statistics of each tensor; the shared collectives count for the first one."""

    def moved(i: int, kind: Kind) -> Moved:
        collectives = 0 if i else sum(turn.collectives for turn in together)
        return kind.moved._replace(collectives=collectives)

    return [Kind(partial(moved, i, kind)) for i, kind in enumerate(kinds)]
