"""Runs steps of the plans of several tensors on one mesh at once. If they go over the same mesh
dims, or over some of them, everything that a rank sends another is one message
(:mod:`cute_sharding.exchange.bundle`).

If each step by itself is the backend's own all-gather, they become a single one. So do reductions
of one kind and dtype: one all-reduce, or one reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import communication, dispatch_modes, observing
from cute_sharding.dtensor.replaced.communication import wait_for
from cute_sharding.dtensor.run.bundles import dims_of, shipment_of
from cute_sharding.dtensor.run.executor import (
    block_of,
    keep_own,
    keep_part,
    scaled,
    start,
    whole_dim,
    whole_of,
)
from cute_sharding.dtensor.run.groups import all_on_each_rank, group_of, on_each_rank
from cute_sharding.dtensor.run.packing import (
    begin,
    check_shape,
    complete,
    in_blocks,
    part_alone,
)
from cute_sharding.exchange.step import AllToAll, Reduction, Step

# What has started: the memory of each result, if it is known; and a function that waits, and gives
# the results.
Begun: TypeAlias = "tuple[Sequence[torch.Tensor | None], Callable[[], list[torch.Tensor]]]"

# The most bytes that a rank receives in one exchange of several tensors, unless one tensor alone
# has more. Larger messages gain little by going together, and need twice their memory more: as sent
# and as received.
MOST = 1 << 24


class Turn(NamedTuple):
    """Steps that run at once.

    Attributes:
        members: the numbers of their tensors.
        steps: one step of each of these tensors' plans.
    """

    members: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def collectives(self) -> int:
        return 1 if len(self.steps) > 1 else self.steps[0].collectives


@remembered
def turns(plans: tuple[tuple[Step, ...], ...], dtypes: tuple[torch.dtype, ...]) -> tuple[Turn, ...]:
    """The steps of all plans, each plan's in its order, in as few turns as possible: a function of
    what all ranks know.
    """
    left, found = [list(steps) for steps in plans], []
    while any(left):
        for i, steps in enumerate(left):
            while steps and not steps[0].communicates:
                found.append(Turn((i,), (steps.pop(0),)))
        members = tuple(_members(left, dtypes))
        if members:
            found.append(Turn(members, tuple([left[i].pop(0) for i in members])))
    return tuple(found)


def _members(left: Sequence[Sequence[Step]], dtypes: Sequence[torch.dtype]) -> Iterator[int]:
    """The tensors with steps left whose next steps run at once: reductions of the first one's kind;
    or, if no reductions are next, steps over the largest set of mesh dims and over subsets of it.
    """
    fronts = {i: steps[0] for i, steps in enumerate(left) if steps}
    kinds = {i: _kind(step, dtypes[i]) for i, step in fronts.items()}
    kind = next(filter(None, kinds.values()), None)
    fronts = {i: step for i, step in fronts.items() if kinds[i] == kind}
    dims = dims_of([*fronts.values()])
    some = [i for i, step in fronts.items() if {*step.mesh_dims} <= {*dims}]
    some.sort(key=lambda i: fronts[i].mesh_dims != dims)  # first those that need the whole group
    room = MOST
    for i in some:
        size = fronts[i].received_elements * dtypes[i].itemsize
        if i == some[0] or size <= room:
            yield i
            room -= size


def _kind(step: Step, dtype: torch.dtype) -> tuple[Any, ...] | None:
    """What reductions have in common that run as one; None for an exchange."""
    if not isinstance(step, Reduction):
        return None
    return step.scatters, step.mesh_dims, step.op, step.divisor, dtype


def are_collectives(steps: Sequence[Step], dtypes: Sequence[torch.dtype], mesh: Any) -> bool:
    """Whether steps that run at once are a single collective of the backend, which graphs show."""
    return isinstance(steps[0], Reduction) or are_gathers(steps, dtypes, mesh)


def is_joined(step: Step, dtype: torch.dtype, mesh: Any) -> bool:
    """Whether the step can run together with others: any exchange, any all-reduce, and a
    reduce-scatter along a tensor dim.
    """
    if isinstance(step, Reduction):
        return not step.scatters or whole_dim(step, dtype, mesh) is not None
    return isinstance(step, AllToAll)


def are_gathers(steps: Sequence[Step], dtypes: Sequence[torch.dtype], mesh: Any) -> bool:
    """Whether each step is the backend's own all-gather, and all are in one group."""
    if any(isinstance(step, Reduction) for step in steps):
        return False
    return len({step.mesh_dims for step in steps}) == 1 and all(
        whole_dim(step, dtype, mesh) is not None for step, dtype in zip(steps, dtypes)
    )


def run_together(
    plans: Sequence[tuple[Step, ...]], tensors: Sequence[torch.Tensor], mesh: Any
) -> list[torch.Tensor]:
    """Take this rank's local tensors through the steps of their plans, which all can be joined, in
    shared turns.
    """
    return start_together(plans, tensors, mesh).results()


class Under(NamedTuple):
    """Plans under way: all of their collectives have started, and all but the last have ended.

    Attributes:
        into: for each tensor the memory of its result, if it is known; it may be incomplete.
        results: waits for the last collective, and gives the results.
    """

    into: list[torch.Tensor | None]
    results: Callable[[], list[torch.Tensor]]


def start_together(
    plans: Sequence[tuple[Step, ...]],
    tensors: Sequence[torch.Tensor],
    mesh: Any,
    *,
    async_op: bool = False,
) -> Under:
    """As :func:`run_together`, up to the start of the last collective, which may go on with
    ``async_op``; the tensors may change before it ends.
    """
    at, dtypes = list(tensors), tuple([x.dtype for x in tensors])
    for i, steps in enumerate(plans):
        at[i] = check_shape(steps[0], at[i], mesh) if steps else at[i]
    every = turns(tuple(plans), dtypes)
    last = max([k for k, (_, steps) in enumerate(every) if steps[0].communicates], default=-1)
    for turn in every[: max(last, 0)]:
        _put(at, turn.members, _start(turn.steps, [at[i] for i in turn.members], mesh)[1]())
    members, steps = every[last] if every and last >= 0 else Turn((), ())
    begun: Begun = ([], list)
    if members:
        begun = _start(steps, [at[i] for i in members], mesh, async_op=async_op)
    into, finish = begun

    def results() -> list[torch.Tensor]:
        _put(at, members, finish())
        for members_, steps in every[last + 1 :]:
            _put(at, members_, _start(steps, [at[i] for i in members_], mesh)[1]())
        return at

    again = {i for turn in every[last + 1 :] for i in turn.members}
    known: list[torch.Tensor | None] = [*at]
    _put(known, members, into)
    return Under([None if i in again else x for i, x in enumerate(known)], results)


def _put(at: list[Any], members: Sequence[int], moved: Sequence[Any]) -> None:
    for i, x in zip(members, moved):
        at[i] = x


def _start(
    steps: Sequence[Step], given: list[torch.Tensor], mesh: Any, *, async_op: bool = False
) -> Begun:
    """Start the steps of a turn."""
    given = [wait_for(x) for x in given]
    if len(steps) > 1:
        if isinstance(steps[0], Reduction):
            return _reduce(steps, given, mesh, async_op)
        if are_gathers(steps, [x.dtype for x in given], mesh):
            return _gather(steps, given, mesh, async_op)
        return _exchange(steps, given, mesh, async_op)
    if not steps[0].communicates:
        kept = [keep_own(steps[0], given[0], mesh)]
        return kept, lambda: kept
    started = start(steps[0], given[0], mesh, async_op=async_op, apart=async_op)
    into = communication.in_flight(started.received) if started.finish is None else started.into
    return [into], lambda: [started.result()]


def _exchange(steps: Any, given: Sequence[torch.Tensor], mesh: Any, async_op: bool) -> Begun:
    """All steps in one all-to-all."""
    shipment = shipment_of(tuple(steps), tuple([x.dtype for x in given]), mesh)
    rank, group = communication.this_rank(), group_of(mesh, dims_of(steps))
    bundle = shipment.bundle(rank)
    with observing.exchange(lambda: bundle.received_bytes):
        received = shipment.start([[x] for x in given], group, async_op=async_op)
    if not async_op:
        got = received()
        made = [shipment.result(k, got, [x], group=group) for k, x in enumerate(given)]
        return [*made], lambda: made
    parts = shipment.part(rank, group).parts
    into = [begin(part, 0, [x]) for part, x in zip(parts, given)]

    def results() -> list[torch.Tensor]:
        got = received()
        for part, x in zip(parts, into):
            complete(part, 0, got.view(x.dtype), x)
        return [*into]

    return [*into], results


# -- one all-gather -------------------------------------------------------------------------------


def _gather(steps: Any, given: Sequence[torch.Tensor], mesh: Any, async_op: bool) -> Begun:
    """All-gather a block of each tensor, padded to equal lengths on all ranks, in one buffer: of
    bytes with the widest elements first, if dtypes differ.
    """
    blocks = [block_of(step, x, mesh) for step, x in zip(steps, given)]
    dtypes = [x.dtype for x in blocks]
    order = sorted(range(len(blocks)), key=lambda k: -dtypes[k].itemsize)
    widest = dtypes[order[0]]
    kind = widest if len({*dtypes}) == 1 else torch.uint8

    def sent(_: int, *some: torch.Tensor) -> torch.Tensor:
        flat = [some[k].contiguous().view(-1).view(kind) for k in order]
        gap = -sum(map(len, flat)) % (widest.itemsize // kind.itemsize)
        return torch.cat([*flat, flat[0].new_zeros(gap)])

    def results(rank: int, got: torch.Tensor, *some: torch.Tensor) -> list[torch.Tensor]:
        # Blocks have equal lengths on all ranks of a group, but other groups may have others.
        found, start, rows = [], 0, got.view(parts, -1)
        for k in order:
            size = some[k].numel() * dtypes[k].itemsize // kind.itemsize
            mine = rows.narrow(1, start, size).view(dtypes[k])
            found.append((k, whole_of(steps[k], mine, mesh, rank)))
            start += size
        return [x for _, x in sorted(found, key=lambda pair: pair[0])]

    group = group_of(mesh, steps[0].mesh_dims)
    parts = group.size()
    buffer = on_each_rank(sent, *blocks)
    with dispatch_modes.of_this_rank():
        got = communication.all_gather(buffer, group, async_op=async_op)
    return [None] * len(given), lambda: all_on_each_rank(results, wait_for(got), *blocks)


# -- one reduction --------------------------------------------------------------------------------


def _reduce(steps: Any, given: Sequence[torch.Tensor], mesh: Any, async_op: bool) -> Begun:
    """Reduce contributions to each tensor in one buffer: for a reduce-scatter a row for each rank,
    with a block of each tensor, all padded to equal lengths.
    """
    first, parts = steps[0], steps[0].parts
    scatters, group = first.scatters, group_of(mesh, first.mesh_dims)
    dims = [step.along.scattered or 0 for step in steps] if scatters else [0] * len(steps)
    mine = given if scatters else [keep_part(step, x, mesh) for step, x in zip(steps, given)]

    def blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
        return in_blocks(x, dim, parts) if scatters else x[None]

    def sent(_: int, *some: torch.Tensor) -> torch.Tensor:
        rows = [blocks(x, dim) for x, dim in zip(some, dims)]
        return torch.cat([x.reshape(x.shape[0], -1) for x in rows], 1)

    def results(rank: int, got: torch.Tensor, *some: torch.Tensor) -> list[torch.Tensor]:
        shapes = [blocks(x, dim).shape[1:] for x, dim in zip(some, dims)]
        found = got.view(-1).split([shape.numel() for shape in shapes])
        return [
            part.view(shape)
            .narrow(dim, 0, part_alone(step, mesh, rank).target_shape()[dim])
            .contiguous()
            if scatters
            else part.view(shape)
            for step, part, shape, dim in zip(steps, found, shapes, dims)
        ]

    op, buffer, finish = scaled(first, on_each_rank(sent, *mine), group, mesh)
    received = sum(step.received_elements for step in steps) * given[0].element_size()
    with observing.exchange(lambda: received), dispatch_modes.of_this_rank():
        reduce = communication.reduce_scatter if scatters else communication.all_reduce
        got = reduce(buffer, op, group, async_op=async_op)

    def finished() -> list[torch.Tensor]:
        whole = wait_for(got)
        if finish is not None:
            with dispatch_modes.of_this_rank():
                whole = finish(whole)
        return all_on_each_rank(results, whole, *mine)

    return [None] * len(given), finished
