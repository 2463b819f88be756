"""DTensor's redistribution by plan: what stands in for
torch.distributed.tensor._redistribute.redistribute_local_tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.stats import Moved, count_moves, logger
from cute_sharding.dtensor.compiled.symbols import known, sizes_at_hand, symbols_of, unknown
from cute_sharding.dtensor.redistributing.dynamic import run_opaque
from cute_sharding.dtensor.redistributing.executor import looks_at_sizes, run
from cute_sharding.dtensor.redistributing.groups import Means, groups_at_hand, means
from cute_sharding.dtensor.redistributing.placements import text
from cute_sharding.dtensor.redistributing.reading import left_to_right, of_source, of_target
from cute_sharding.dtensor.redistributing.stock import stock_plan
from cute_sharding.dtensor.torch_private import (
    dispatch_modes,
    redistribution_hook,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.torch_private.tensor_specs import (
    DTensorSpec,
    MaskPartial,
    Partial,
    Placement,
    Shard,
    mesh_dim_text,
)
from cute_sharding.layout import Size
from cute_sharding.layout.symbolic import Int
from cute_sharding.redistribution.chains import Chains
from cute_sharding.redistribution.network import Network
from cute_sharding.redistribution.plan import Held, RedistributionPlan, collectives, received_by
from cute_sharding.redistribution.planner import plan_steps, questions
from cute_sharding.redistribution.routes import Groups, admits
from cute_sharding.redistribution.step import Step

# Reductions that equal contributions of all devices give back what they were made of.
MADE_OF_COPIES = frozenset({"sum", "avg", "min", "max"})


class Traffic:
    """What one redistribution moves each time that it runs, for :func:`cute_sharding.stats`. Worked
    out when somebody asks.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        mesh: tuple[int, ...],
        before: tuple[Placement, ...],
        after: tuple[Placement, ...],
        steps: Sequence[Step],
    ) -> None:
        self._question, self._steps = (shape, mesh, before, after), steps

    @cached_property
    def moved(self) -> Moved:
        received = sum(step.received_elements for step in self._steps if step.communicates)
        return Moved(
            plan=1,
            collectives=sum(step.collectives for step in self._steps),
            received_elements=received,
        )

    @cached_property
    def stock_received_elements(self) -> int | None:
        plan = stock_plan(*self._question)
        return plan.received_elements if plan.error is None else None


class Prepared(NamedTuple):
    """A plan, and what placements do by methods of their own: mesh dims whose reduction comes
    before it, and on which the result is made a contribution after it.

    ``handed_out`` is one of the former, whose reduction hands out blocks as they are wanted:
    nothing is left to do then.
    """

    plan: RedistributionPlan
    foreign: tuple[int, ...]
    made: tuple[int, ...]
    traffic: Traffic
    handed_out: int | None = None


def redistribute_local_tensor(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    *,
    async_op: bool = False,
    is_explicit: bool = False,
    counted: bool = True,
) -> torch.Tensor:
    """Take this rank's local tensor from the placements of ``current`` to those of ``target``.

    Pending reductions of torch's own Partial are part of the plan; those of other kinds (a masked
    embedding's, a norm's) are finished first, by the placement's own method. What the specs tell to
    be wrong is refused before anything is sent, by every rank alike; a local tensor that is not of
    the shape its spec gives it, by the rank that has it.

    Raises:
        NotImplementedError: the meshes differ, or a masked embedding's reduction is to stay pending
            while elements move.
        RuntimeError: a change of one pending reduction into another.
        ValueError: mixed reductions that do not commute, or a pending reduction that a result
            cannot be turned back into.
    """
    mesh: Any = current.mesh
    if mesh != target.mesh:
        raise NotImplementedError(
            f"redistribution from mesh {mesh} to another, {target.mesh}: DTensor has no such "
            "communication yet"
        )
    if not mesh._is_current_rank_part_of_mesh():
        return local  # an empty tensor
    before, after = tuple(current.placements), tuple(target.placements)
    shape = sizes_at_hand(current.shape)
    at_hand = (
        [tensor_specs.with_shape(spec, shape) for spec in (current, target)]
        if symints.is_symbolic(tuple(current.shape))
        else [current, target]
    )
    source, wanted = of_source(at_hand[0], local), of_target(at_hand[1], is_explicit=is_explicit)
    plan, foreign, made, traffic, handed_out = planned(mesh, shape, before, after, source, wanted)
    steps = plan.steps
    if steps and counted:
        count_moves(traffic)
    debug = dispatch_modes.active_debug_mode()
    record = (
        nullcontext()
        if debug is None
        else debug.record_redistribute_calls(
            local, before, after, " -> ".join(step.kind for step in steps), is_explicit=is_explicit
        )
    )
    with record:
        for m in foreign:
            if m == handed_out:
                local = redistribution_hook.reduce_shard_value(before[m], local, mesh, m, after[m])
            else:
                local = redistribution_hook.reduce_value(before[m], local, mesh, m)
        if at_hand[0] is current:
            local = run(steps, local, mesh, async_op=async_op and not made)
        else:
            local = _run_on_symbols(plan, local, current)
        for m in made:
            local = redistribution_hook.partition_value(after[m], local, mesh, m)
    return local


def planned(
    mesh: Any,
    shape: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    source: Chains | None = None,
    target: Chains | None = None,
) -> Prepared:
    """The plan that runs on the groups that ``mesh`` has, and on its backend. A function of the
    mesh, the shape and the placements alone, so that all ranks and graphs come to the same.
    """
    return _planned(mesh, shape, before, after, source, target, means(mesh))


@lru_cache(maxsize=1 << 12)
def _planned(
    mesh: Any,
    shape: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    source: Chains | None,
    target: Chains | None,
    by: Means,
) -> Prepared:
    prepared = prepare(
        shape,
        tuple(mesh.shape),
        before,
        after,
        source,
        target,
        names=mesh.mesh_dim_names,
        **by._asdict(),
    )
    plan = prepared.plan
    if len(plan.steps) > 1:
        best = plan_steps(
            plan.shape, plan.mesh, plan.source, plan.target.chains, Network.of_programs(plan.mesh)
        )
        missing = tuple(
            sorted(
                {
                    tuple(sorted(step.mesh_dims))
                    for step in best
                    if not admits(by.groups, step.mesh_dims)
                }
            )
        )
        if missing and received_by(best) < received_by(plan.steps):
            _say_what_is_missing(mesh, missing, text(before), text(after), plan, best)
    return prepared


# The sets of mesh dims that were found missing and said.
_said: set[tuple[Any, ...]] = set()


def _say_what_is_missing(
    mesh: Any,
    missing: tuple[tuple[int, ...], ...],
    before: str,
    after: str,
    plan: RedistributionPlan,
    best: Sequence[Step],
) -> None:
    """Once for each set of mesh dims."""
    if (mesh, missing) in _said:
        return
    _said.add((mesh, missing))
    names, dims = mesh.mesh_dim_names, missing[0]
    flatten = f"mesh[{', '.join(repr(names[m]) for m in dims)}]._flatten() or " if names else ""
    logger.warning(
        "a tensor of shape %s on the mesh %s goes from %s to %s in %d collectives and receives %d "
        "elements. With a process group of the mesh dims %s together it would be %d collectives "
        "and %d elements: call %scute_sharding.prepare_groups(mesh) on all ranks first. (Said once "
        "for these mesh dims.)",
        *(plan.shape, plan.mesh, before, after, plan.collectives, plan.received_elements),
        *(" and ".join(map(str, missing)), collectives(best), received_by(best), flatten),
    )


def _run_on_symbols(
    plan: RedistributionPlan, local: torch.Tensor, spec: DTensorSpec
) -> torch.Tensor:
    """A plan for the sizes at hand, on a tensor whose sizes are symbolic.

    What a rank sends lies in the order of its elements, in a graph for many sizes as where a
    program runs eagerly: else ranks that do one and ranks that do the other would take each other's
    elements for something else. A compiler can say that of collectives of whole tensor dims, and
    sees those; other steps are one op that plans and runs anew in each call. By what the steps were
    chosen (redistribution/planner.py) becomes guards of the former, so that every call of the graph
    is one for which they are chosen. Of the latter, that sizes divide does, where they do at hand,
    as what follows then computes with sizes that are simpler.
    """
    if not plan.steps:
        return local
    if any(n % _count(d, plan.steps) for d, n in enumerate(plan.shape)):
        return run_opaque(plan, local, spec.mesh, tuple(spec.shape))
    alone = not any(step.communicates for step in plan.steps)
    seen = alone or not any(looks_at_sizes(step, local.dtype, spec.mesh) for step in plan.steps)
    asked = questions(
        plan.shape, plan.mesh, plan.source, plan.target.chains, groups_at_hand(spec.mesh)
    )
    with symbols_of(tuple(spec.shape)):
        for d, (n, (least, counts)) in enumerate(zip(known(tuple(spec.shape)), asked)):
            if isinstance(n, Size):
                _ = n % _count(d, plan.steps) == 0
            if isinstance(n, Size) and seen:
                if not least <= n:
                    int(unknown(n))
                else:
                    _ = [n % count == 0 for count in counts]
    if alone:
        return _run_on_blocks(plan.steps, local, spec)
    return (
        run(plan.steps, local, spec.mesh)
        if seen
        else run_opaque(plan, local, spec.mesh, tuple(spec.shape))
    )


def _run_on_blocks(steps: Sequence[Step], local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Steps of which none communicates, planned for the sizes at hand, on a tensor whose sizes are
    symbolic.

    Let all cuts of a dim divide it into U parts of one size. Then the steps move whole such parts,
    whatever their size: they are the steps of a tensor of U rows, of which each stands for a block
    of n / U. So sizes that divide stay symbolic (with the guard that they do), and the others are
    fixed.
    """
    with symbols_of(tuple(spec.shape)):
        counts, blocks = zip(
            *(_blocks(n, d, steps) for d, n in enumerate(known(tuple(spec.shape)))), strict=True
        )
        blocks = unknown(blocks, local=True)
    ndim = len(counts)
    scaled = [replace(step, shape=counts) for step in steps]
    device = tuple(spec.mesh.get_coordinate())  # type: ignore[arg-type]
    held = scaled[0].local_shape(scaled[0].source, device)
    apart = local.reshape([n for pair in zip(held, blocks) for n in pair]).permute(
        *range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)
    )
    moved = run(scaled, apart, spec.mesh)
    held = scaled[-1].local_shape(scaled[-1].target, device)
    together = moved.permute([d for pair in zip(range(ndim), range(ndim, 2 * ndim)) for d in pair])
    return together.reshape([n * block for n, block in zip(held, blocks)])


def _blocks(n: Int, dim: int, steps: Sequence[Step]) -> tuple[int, Int]:
    """Into how many blocks the steps divide a dim of ``n`` rows, and how long each is."""
    if not isinstance(n, Size):
        return n, 1
    count = _count(dim, steps)
    if n % count == 0:
        return count, n // count
    return int(unknown(n)), 1


def _count(dim: int, steps: Sequence[Step]) -> int:
    """Into how many blocks the steps want to divide a dim."""
    count = 1
    for step in steps:
        for chains in (step.source, step.target):
            count = lcm(count, prod(factor * step.mesh[m] for m, factor in chains[dim]))
    return count


@lru_cache(maxsize=1 << 12)
def prepare(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    source: Chains | None = None,
    target: Chains | None = None,
    network: Network | None = None,
    memory_limit: int | None = None,
    groups: Groups = None,
    native: bool = False,
    names: tuple[str, ...] | None = None,
) -> Prepared:
    """The plan from one tuple of placements to another; ``source`` and ``target`` say how they cut,
    where that is not left to right; ``groups`` which sets of mesh dims have a process group;
    ``names`` what refusals call the mesh dims.
    """
    tensor_specs.check_no_mixed_partials(before)
    tensor_specs.check_no_mixed_partials(after)
    changing = [m for m in range(len(mesh)) if mesh[m] > 1 and before[m] != after[m]]
    pending = [m for m in changing if isinstance(before[m], Partial)]
    made = tuple([m for m in changing if isinstance(after[m], Partial)])
    for m in pending:
        if m in made:
            raise RuntimeError(
                f"redistribution from one pending reduction, {before[m]}, to another, {after[m]}, "
                f"on {mesh_dim_text(m, names)}: redistribute to Replicate or Shard first"
            )
    for m in made:
        wanted: Any = after[m]
        if type(wanted) is Partial and wanted.reduce_op not in MADE_OF_COPIES:
            raise ValueError(
                f"redistribution from {before[m]} to {after[m]} on {mesh_dim_text(m, names)}: no "
                f"contributions of equal devices reduce to a given result by {after[m]}"
            )
    foreign = tuple([m for m in pending if type(before[m]) is not Partial])
    handed_out = None
    source = left_to_right(shape, mesh, before) if source is None else source
    target = left_to_right(shape, mesh, after) if target is None else target
    for m, placement in enumerate(before):
        if (
            source != target
            and mesh[m] > 1
            and m not in pending
            and isinstance(placement, MaskPartial)
        ):
            raise NotImplementedError(
                f"the mask of {placement} on {mesh_dim_text(m, names)} lies as the elements lie, "
                "so it cannot stay pending while they move: redistribute it to Replicate first"
            )
    if len(foreign) == 1 and changing == [*foreign]:
        given: Any = after[foreign[0]]
        if type(given) is Shard and target[given.dim][-1:] == ((foreign[0], 1),):
            handed_out, source = foreign[0], target
    ops: list[Any] = [getattr(placement, "reduce_op", None) for placement in before]
    reduced = tuple([(m, ops[m]) for m in pending if m not in foreign])
    held = Held(
        source,
        reduced,
        tuple([m for m in range(len(mesh)) if isinstance(before[m], Partial) and m not in pending]),
    )
    steps = plan_steps(
        shape,
        mesh,
        held,
        target,
        (network or Network.of_programs(mesh)).checked(mesh),
        memory_limit,
        groups,
        native,
    )
    network = (network or Network.default(mesh)).checked(mesh)
    return Prepared(
        RedistributionPlan(shape, mesh, held, Held(target), steps, network),
        foreign,
        made,
        Traffic(shape, mesh, before, after, steps),
        handed_out,
    )
