"""DTensor's redistribution by plan, in place of torch's; its sizes may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, Received, count_moves
from cute_sharding.dtensor.compiled.symbols import symbols_of, to_sizes, to_symints
from cute_sharding.dtensor.replaced import (
    communication,
    dispatch_modes,
    observing,
    redistribution_hook,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    MaskPartial,
    NormPartial,
    Partial,
    Placement,
    Shard,
    is_by_elements,
    is_masked,
    is_of_torchs_own,
    mesh_dim_text,
    powers,
    root,
)
from cute_sharding.dtensor.run.executor import looks_at_sizes, run
from cute_sharding.dtensor.run.groups import PLAIN, Means, group_of, groups_at_hand, means
from cute_sharding.dtensor.run.in_graphs import on_all_ranks, run_opaque, run_steps
from cute_sharding.dtensor.run.packing import check_shape, lay_out
from cute_sharding.dtensor.run.placements import (
    chains_of_placements,
    chains_of_spec,
    say_redistributed,
    say_what_is_missing,
)
from cute_sharding.exchange.foreign import ForeignReduction, ForeignWay, cheapest
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.plan import (
    RedistributionPlan,
    collectives,
    received_by,
    received_by_all,
)
from cute_sharding.exchange.planner import admits, plan_steps, questions
from cute_sharding.exchange.step import Step
from cute_sharding.layout import Size
from cute_sharding.layout.symbolic import Int
from cute_sharding.sharding.rows import Chains

# -- redistribute ----------------------------------------------------------------------------------
# DTensor's redistribution by plan, in place of
# torch.distributed.tensor._redistribute.redistribute_local_tensor.

# Reductions under which equal contributions of all devices can give a value: it, or a part of it.
MADE_OF_COPIES = frozenset({"sum", "avg", "min", "max"})


class Prepared(NamedTuple):
    """A plan, with what methods of placements do: the reductions before it, in order, and the mesh
    dims on which the result becomes a contribution after it.

    ``first``: a plan that runs before the reductions, and slices what each device holds, so that
    there is less to reduce; None: nothing does. ``norm``: what is pending, if the plan adds up the
    powers of a norm.
    """

    plan: RedistributionPlan
    reductions: tuple[ForeignReduction, ...]
    made: tuple[int, ...]
    kind: Kind
    first: RedistributionPlan | None = None
    norm: NormPartial | None = None

    def seconds(self, network: Network) -> float:
        """The modelled time of all of it."""
        steps = [*(self.first.steps if self.first else ()), *self.plan.steps]
        mesh = self.plan.mesh
        reducing = [each.seconds(network, mesh[each.mesh_dim]) for each in self.reductions]
        return sum(step.seconds(network) for step in steps) + sum(reducing)


def redistribute_local_tensor(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    *,
    async_op: bool = False,
    is_explicit: bool = False,
    counted: bool = True,
    memory_limit: int | None = None,
) -> torch.Tensor:
    """Redistribute this rank's local tensor from ``current`` to ``target``, also to another mesh
    (:mod:`.across_meshes`); a moved tensor is laid out by its global strides (:mod:`.packing`).

    Pending reductions of torch's own Partial are part of the plan, and so are norms, as sums of
    powers. Those of other placements (a masked embedding's) run first, by the placement's own
    method. Every rank refuses specs that are wrong before anything is sent; a local tensor with
    another shape than its spec gives is refused by its rank.

    Raises:
        NotImplementedError: the meshes differ while a graph is traced, or a masked embedding's
            reduction would stay pending while elements move.
        RuntimeError: a pending reduction would change into another one.
        ValueError: mixed reductions that do not commute; a result would have to become pending
            under a reduction that cannot give it back; or no plan keeps every rank within
            ``memory_limit`` elements.
    """
    mesh: Any = current.mesh
    if mesh != target.mesh:
        # Programs on one mesh do not import this.
        from cute_sharding.dtensor.run.across_meshes import move_across

        return move_across(local, current, target, memory_limit)
    if not mesh._is_current_rank_part_of_mesh():
        return local  # an empty tensor
    found = planned_for(current, target, memory_limit)
    plan, before, after = found.plan, current.placements, target.placements
    if counted and (plan.steps or found.reductions):
        count_moves(found.kind)
    if counted and plan.steps:
        say_redistributed(mesh, plan.shape, before, after, plan)
    plans = [plan] if found.first is None else [found.first, plan]
    with on_all_ranks(plans, [local.dtype] * len(plans), mesh, *current.shape):
        with _recorded(plan, local, before, after, is_explicit):
            moved = _done(found, local, current, target, async_op=async_op)
        # torch gives a redistribution's gradient the strides of the input, not of ``target``.
        return local if moved is local else lay_out(moved, current.tensor_meta)


def combined(state: torch.Tensor, current: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The states of all devices, combined: :func:`redistribute_local_tensor` of a state that an op
    has made, which is not counted, since the op is. A plan of all-reduces runs as these alone, on a
    plain tensor that nobody watches.
    """
    is_watched = observing.are_there() or dispatch_modes.active_debug_mode() is not None
    if type(state) is torch.Tensor and not is_watched:
        plan, mesh = planned_for(current, target).plan, current.mesh
        if plan.all_reduces:
            state = check_shape(plan.steps[0], state, mesh)
            for op, dims in plan.all_reduces:
                state = communication.all_reduce(state, op, group_of(mesh, dims))
            return state
    return redistribute_local_tensor(state, current, target, counted=False)


def planned_for(
    current: DTensorSpec, target: DTensorSpec, memory_limit: int | None = None
) -> Prepared:
    """The plan between two specs on one mesh; symbolic sizes count by their present values.

    Raises:
        RuntimeError: a size has no value yet.
        ValueError: no plan keeps every rank within ``memory_limit`` elements.
    """
    if symints.is_symbolic(*current.shape):
        shape = symints.numbers_at_hand(tuple(current.shape))
        if shape is None:
            raise RuntimeError(
                f"the shape {tuple(current.shape)} has sizes without a value while the program is "
                "compiled: redistribute the tensor outside of the compiled program"
            )
        current, target = (tensor_specs.with_shape(spec, shape) for spec in (current, target))
    by = means(current.mesh)
    if memory_limit is not None:
        by = by._replace(memory_limit=memory_limit)
    return _planned(current, target, by)


def received_to(spec: DTensorSpec, after: Sequence[Placement]) -> Callable[[], Received]:
    """A function for the elements that a redistribution by plan receives, on the mesh's present
    groups.
    """
    by = means(spec.mesh)
    ends = tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements), tuple(after)
    return lambda: prepare(*ends, by=by).kind.moved.received


def _done(
    found: Prepared,
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    *,
    async_op: bool,
) -> torch.Tensor:
    """The local tensor after the plan, and after what methods of placements do."""
    mesh, before, after = current.mesh, tuple(current.placements), tuple(target.placements)
    is_symbolic = symints.is_symbolic(*current.shape)

    def after_plan(plan: RedistributionPlan, is_async: bool = False) -> torch.Tensor:
        if is_symbolic:
            return run_on_symbols(plan, local, current)
        return run_steps(plan, local, current, async_op=is_async)

    if found.first is not None:
        local = after_plan(found.first)
    for m, hands_out, _ in found.reductions:  # by the placements' own methods
        if hands_out:
            local = redistribution_hook.reduce_shard_value(before[m], local, mesh, m, after[m])
        else:
            local = redistribution_hook.reduce_value(before[m], local, mesh, m)
    if found.norm is None:
        local = after_plan(found.plan, async_op and not found.made)
    else:
        dtype, local = local.dtype, powers(found.norm, local)
        local = root(found.norm, after_plan(found.plan), dtype)
    for m in found.made:
        local = redistribution_hook.partition_value(after[m], local, mesh, m)
    return local


def _recorded(
    plan: RedistributionPlan,
    local: torch.Tensor,
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    is_explicit: bool,
) -> AbstractContextManager[Any]:
    """A context in which torch's DebugMode, if one is on, records the redistribution."""
    debug = dispatch_modes.active_debug_mode()
    if debug is None:
        return nullcontext()
    kinds = " -> ".join(step.kind for step in plan.steps)
    recorded: AbstractContextManager[Any] = debug.record_redistribute_calls(
        local, before, after, kinds, is_explicit=is_explicit
    )
    return recorded


@remembered
def _planned(current: DTensorSpec, target: DTensorSpec, by: Means) -> Prepared:
    """The plan for the mesh's groups and backend: a function of the mesh, the shape and the specs'
    cuts alone, so that it is the same on all ranks and in all graphs.
    """
    mesh: Any = current.mesh
    before, after = tuple(current.placements), tuple(target.placements)
    how: Any = {"names": mesh.mesh_dim_names, "hands_out": communication.is_ascending(mesh)}
    cut = chains_of_spec(current), chains_of_spec(target)
    prepared = prepare(tuple(current.shape), tuple(mesh.shape), before, after, *cut, by, **how)
    plan = prepared.plan
    if len(plan.steps) > 1:
        network = Network.of_programs(plan.mesh, by.network)
        best = plan_steps(plan.source, plan.target, network)
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
            say_what_is_missing(mesh, missing, before, after, plan, best)
    return prepared


@remembered
def prepare(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    source: Chains | None = None,
    target: Chains | None = None,
    by: Means = PLAIN,
    *,
    names: tuple[str, ...] | None = None,
    timed: Network | None = None,
    hands_out: bool = True,
) -> Prepared:
    """The plan from one tuple of placements to another. ``source`` and ``target``: their chains of
    cuts, if specs say more than the placements. ``by``: what programs choose and show plans by.
    ``names``: the mesh dims' names in errors. ``timed``: another network, whose latency counts in
    the choice as well. ``hands_out``: whether ranks ascend on the mesh; if they do not, a
    placement's own method, which goes by the place in the process group, would give a rank another
    rank's block.
    """
    source = chains_of_placements(shape, mesh, before) if source is None else source
    target = chains_of_placements(shape, mesh, after) if target is None else target
    changes = _changes(mesh, before, after, names)
    if source != target:
        _check_masks(mesh, before, changes.pending, names)
    pending: list[tuple[int, Any]] = [
        (m, p.reduce_op) for m, p in enumerate(before) if isinstance(p, Partial)
    ]
    held = tuple([each for each in pending if each[0] not in changes.foreign])
    kept = tuple([each for each in pending if each[0] not in changes.pending])
    network = Network.of_programs(mesh, by.network) if timed is None else timed.checked(mesh)
    shown = Network.of(mesh, by.network) if timed is None else timed

    def plan(start: Placed, goal: Placed) -> RedistributionPlan:
        steps = plan_steps(start, goal, network, by.memory_limit, by.groups, by.native)
        return RedistributionPlan(start, goal, steps, shown)

    foreign = changes.foreign
    shards = frozenset(m for m in foreign if hands_out and type(after[m]) is Shard)
    may_move = all(is_by_elements(before[m]) for m in foreign)
    ends = (
        Placed.numbered(shape, mesh, source, held),
        Placed.numbered(shape, mesh, target, kept),
    )
    way = cheapest(plan, *ends, foreign, shards, may_move=may_move)
    kind = Kind(partial(_moved_by, way, prod(mesh)))
    norm = _norm(before, after) if changes.pending else None
    return Prepared(way.then, way.reductions, changes.made, kind, way.first, norm)


def _moved_by(way: ForeignWay, devices: int) -> Moved:
    reduced = sum(each.received_elements for each in way.reductions)
    by_all = received_by_all(way.steps) + devices * reduced
    count = collectives(way.steps) + len(way.reductions)
    return Moved(plan=1, collectives=count, received=Received(way.received_elements, by_all))


class _Changes(NamedTuple):
    """The mesh dims on which placements change: those that are reduced; among these the ones whose
    placement is not torch's own Partial; and those that become contributions.
    """

    pending: tuple[int, ...]
    foreign: tuple[int, ...]
    made: tuple[int, ...]


def _reduce_alike(before: Placement, after: Placement) -> bool:
    """Whether both are pending by one reduction of what devices have, as it is: a sum, and a sum of
    picked rows.
    """
    return (
        isinstance(before, Partial)
        and isinstance(after, Partial)
        and is_of_torchs_own(before)
        and is_of_torchs_own(after)
        and before.reduce_op == after.reduce_op
    )


def _changes(
    mesh: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    names: tuple[str, ...] | None,
) -> _Changes:
    """The changes between two tuples of placements.

    Raises:
        RuntimeError: one pending reduction would become another.
        ValueError: mixed reductions that do not commute, or a result would have to become pending
            under a reduction that cannot give it back.
    """
    tensor_specs.check_no_mixed_partials(before)
    tensor_specs.check_no_mixed_partials(after)
    dims = tuple(
        [
            m
            for m in range(len(mesh))
            if mesh[m] > 1 and before[m] != after[m] and not _reduce_alike(before[m], after[m])
        ]
    )
    pending = tuple([m for m in dims if isinstance(before[m], Partial)])
    made = tuple([m for m in dims if isinstance(after[m], Partial)])
    for m in made:
        if m in pending:
            raise RuntimeError(
                f"cannot redistribute from one Partial, {before[m]}, to another Partial, "
                f"{after[m]}, on {mesh_dim_text(m, names)}: first redistribute to Replicate or "
                "Shard"
            )
        wanted: Any = after[m]
        if type(wanted) is Partial and wanted.reduce_op not in MADE_OF_COPIES:
            raise ValueError(
                f"cannot redistribute from {before[m]} to {after[m]} on "
                f"{mesh_dim_text(m, names)}, because a redistribution cannot create a {after[m]}: "
                "use Replicate or Shard as the target"
            )
    norm = _norm(before, after)
    foreign = tuple([m for m in pending if not (norm or is_of_torchs_own(before[m]))])
    return _Changes(pending, foreign, made)


def _norm(before: Sequence[Placement], after: Sequence[Placement]) -> NormPartial | None:
    """The norm that is all that is pending before and after; otherwise None."""
    pending = {p for p in (*before, *after) if isinstance(p, Partial)}
    only = next(iter(pending), None)
    return only if len(pending) == 1 and isinstance(only, NormPartial) else None


def _check_masks(
    mesh: tuple[int, ...],
    before: tuple[Placement, ...],
    pending: tuple[int, ...],
    names: tuple[str, ...] | None,
) -> None:
    """Raises:
    NotImplementedError: a masked embedding's reduction would stay pending while elements move.
    """
    for m, placement in enumerate(before):
        waits = mesh[m] > 1 and m not in pending and isinstance(placement, MaskPartial)
        if waits and not is_masked(placement):
            raise NotImplementedError(
                f"the mask of {placement} on {mesh_dim_text(m, names)} fits only the current "
                "placements. The tensor cannot stay Partial while its elements move. First "
                "redistribute the tensor to Replicate"
            )


# -- on symbols ------------------------------------------------------------------------------------
# Redistributions of compiled programs with symbolic sizes: the steps that a compiler can describe
# for many sizes are in the graph; other exchanges are one op (``in_graphs``).


def run_on_symbols(
    plan: RedistributionPlan, local: torch.Tensor, spec: DTensorSpec
) -> torch.Tensor:
    """Run a plan, made for the sizes at hand, on a tensor whose sizes are symbolic.

    In a graph for many sizes, a rank must send elements in the same order as in an eager program;
    else compiled and eager ranks would misread each other's messages. A compiler can describe that
    order for collectives of whole tensor dims, and the graph shows these. Other steps are one op
    that plans and runs anew in each call. For collectives that the graph shows, the conditions by
    which the steps were chosen (exchange/planner.py) become guards, so the steps are right in every
    call of the graph. For the op, only the divisibility of sizes does, if they divide at hand,
    because what follows then computes with simpler sizes.
    """
    if not plan.steps:
        return local
    asked = _questions(plan, spec.mesh)
    if _is_of_any_size(plan, tuple(spec.shape), asked):
        return run_opaque([plan], [local], spec.mesh, [tuple(spec.shape)])[0]
    alone = not any(step.communicates for step in plan.steps)
    seen = alone or not any(looks_at_sizes(step, local.dtype, spec.mesh) for step in plan.steps)
    with symbols_of(tuple(spec.shape)):
        for d, (n, (least, counts)) in enumerate(zip(to_sizes(tuple(spec.shape)), asked)):
            if isinstance(n, Size):
                _ = n % _count(d, plan.steps) == 0
            if isinstance(n, Size) and seen:
                _ = least <= n, [n % count == 0 for count in counts]
    if alone:
        return _run_on_blocks(plan.steps, local, spec)
    return (
        run(plan.steps, local, spec.mesh)
        if seen
        else run_opaque([plan], [local], spec.mesh, [tuple(spec.shape)])[0]
    )


def settle_divisions(plan: RedistributionPlan, shape: tuple[Any, ...], mesh: Any) -> None:
    """Add guards that sizes divide, where they do at hand, for a plan that the op runs."""
    if not _is_of_any_size(plan, shape, _questions(plan, mesh)):
        with symbols_of(shape):
            for d, n in enumerate(to_sizes(shape)):
                if isinstance(n, Size):
                    _ = n % _count(d, plan.steps) == 0


def _questions(plan: RedistributionPlan, mesh: Any) -> list[tuple[int, tuple[int, ...]]]:
    groups = groups_at_hand(mesh)
    return questions(plan.source, plan.target, groups)


def _is_of_any_size(
    plan: RedistributionPlan, shape: tuple[Any, ...], asked: Sequence[tuple[int, Any]]
) -> bool:
    """Whether the graph gets no guards on sizes, since they do not divide or are too few.

    A size with fewer rows than the choice of steps asks for would have to become a number, and so
    would all sizes computed from it; when a backward pass is traced, it is too late for that.
    """
    return any(
        n % _count(d, plan.steps) or (isinstance(size, torch.SymInt) and n < least)
        for d, (n, size, (least, _)) in enumerate(zip(plan.shape, shape, asked))
    )


def _run_on_blocks(steps: Sequence[Step], local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Run steps of which none communicates, planned for the sizes at hand, on symbolic sizes.

    Let all cuts of a dim divide it into U parts of one size. Then the steps move whole parts,
    whatever their size: they are the steps of a tensor of U rows, each of which stands for a block
    of n / U rows. So sizes that divide stay symbolic (with a guard that they do), and other sizes
    become numbers.
    """
    with symbols_of(tuple(spec.shape)):
        counts, blocks = zip(
            *(_blocks(n, d, steps) for d, n in enumerate(to_sizes(tuple(spec.shape)))), strict=True
        )
        blocks = to_symints(blocks, local=True)
    ndim = len(counts)
    scaled = [step.of_shape(counts) for step in steps]
    before, after = scaled[0].ends[0], scaled[-1].ends[1]
    rank = before.mesh.rank(tuple(spec.mesh.get_coordinate()))  # type: ignore[arg-type]
    held = before.shape_on(rank)
    apart = local.reshape([n for pair in zip(held, blocks) for n in pair]).permute(
        *range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)
    )
    moved = run(scaled, apart, spec.mesh)
    held = after.shape_on(rank)
    together = moved.permute([d for pair in zip(range(ndim), range(ndim, 2 * ndim)) for d in pair])
    return together.reshape([n * block for n, block in zip(held, blocks)])


def _blocks(n: Int, dim: int, steps: Sequence[Step]) -> tuple[int, Int]:
    """How many blocks the steps divide a dim of ``n`` rows into, and the length of each."""
    if not isinstance(n, Size):
        return n, 1
    count = _count(dim, steps)
    if n % count == 0:
        return count, n // count
    return int(to_symints(n)), 1


def _count(dim: int, steps: Sequence[Step]) -> int:
    """The number of blocks into which the steps together would divide a dim."""
    count = 1
    for step in steps:
        for placed in step.ends:
            count = lcm(count, prod(factor * step.mesh[m] for m, factor in placed.chains[dim]))
    return count
