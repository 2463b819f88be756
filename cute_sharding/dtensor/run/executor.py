"""Runs the steps of a plan on local tensors, with DTensor's functional collectives.

A collective is waited for only when its elements are needed: by the next step, by the code that
unpacks them, or by whoever gets the result. In a graph, each collective is followed by an op that
waits (see compiled/__init__.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.replaced import communication, dispatch_modes, observing
from cute_sharding.dtensor.replaced.communication import wait_for
from cute_sharding.dtensor.run.bundles import shipment_of
from cute_sharding.dtensor.run.groups import (
    copies_natively,
    group_of,
    on_each_rank,
    true_on_each_rank,
)
from cute_sharding.dtensor.run.packing import (
    WIRE,
    begin,
    check_shape,
    complete,
    exchange_messages,
    from_wire,
    in_blocks,
    join_blocks,
    keep,
    pack,
    pad_rows,
    part_alone,
    parts_of,
    unpack,
)
from cute_sharding.exchange.step import AllToAll, Along, Reduction, Step


def run(
    steps: Sequence[Step], local: torch.Tensor, mesh: Any, *, async_op: bool = False
) -> torch.Tensor:
    """Take the local tensor of this rank through ``steps``. Its sizes may be symbols if no step
    :func:`looks_at_sizes`. If no step communicates, its elements may be blocks: it then has more
    dims than the steps say.

    With ``async_op``, the last collective's result is returned unwaited, if it needs no unpacking.
    """
    if steps:
        local = check_shape(steps[0], wait_for(local), mesh)
    for k, step in enumerate(steps, 1):
        local, is_async = wait_for(local), async_op and k == len(steps)
        if not step.communicates:
            local = keep_own(step, local, mesh)
            continue
        started = start(step, local, mesh, async_op=is_async)
        local = started.received if is_async and started.finish is None else started.result()
    return local if async_op else wait_for(local)


class Started(NamedTuple):
    """A step that communicates, after its collective has started.

    Attributes:
        received: what the collective writes to; it may not have ended.
        finish: makes the step's result of what was received; None: it is the result.
        into: the memory of the result, if there is some that ``finish`` completes.
    """

    received: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    into: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        """The step's result, after the collective has ended."""
        received = wait_for(self.received)
        return received if self.finish is None else self.finish(received)

    def behind(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Started:
        """The same, with a function of its result as the result."""
        finish = self.finish
        return Started(self.received, lambda got: function(got if finish is None else finish(got)))


def start(
    step: Step, local: torch.Tensor, mesh: Any, *, async_op: bool = False, apart: bool = False
) -> Started:
    """Start the collective of a step.

    Args:
        async_op: whether the collective may go on when this returns.
        apart: whether the operand may change before the collective has ended: what a rank keeps of
            it is copied first.
    """
    with _telling_observers(step, local):
        return _communicate(step, local, mesh, async_op, apart)


def _communicate(
    step: Step, local: torch.Tensor, mesh: Any, async_op: bool, apart: bool
) -> Started:
    natively = step.by_whole_dims
    trade = traded(natively, local.dtype, mesh) if dispatch_modes.is_tracing() else None
    if natively is not step and trade is None:
        natively = natively if whole_dim(natively, local.dtype, mesh) is not None else step
    if natively is not step:
        local = local.reshape(natively.shapes_on(0)[0])  # sizes divide: all ranks' are equal
    if trade is not None:
        started = Started(_trade(trade, local, group_of(mesh, step.mesh_dims)))
    elif isinstance(natively, AllToAll):
        started = _exchange(natively, local, mesh, async_op, apart)
    else:
        assert isinstance(natively, Reduction)
        started = _reduce(natively, local, mesh, async_op)
    if natively is step:
        return started
    shape = step.shapes_on(0)[1]
    if started.finish is None:
        return Started(started.received.reshape(shape))
    return started.behind(lambda result: result.reshape(shape))


def whole_dim(step: Step, dtype: torch.dtype, mesh: Any) -> Along | None:
    """The step's form as the backend's own collective of a tensor dim; None if it has none."""
    assert isinstance(step, (AllToAll, Reduction))
    how = step.along
    if (
        how is None
        or not (how.even or step.padded)
        or not communication.in_order(mesh, how.mesh_dims)
    ):
        return None
    return (
        None
        if isinstance(step, AllToAll) and (how.scattered is not None or dtype not in WIRE)
        else how
    )


def traded(step: Step, dtype: torch.dtype, mesh: Any) -> Along | None:
    """The step's form as an all-to-all of equal blocks, which gathers one tensor dim and scatters
    another; None if it has none. Graphs show it as one, with the same nodes on all ranks; eagerly a
    rank packs its messages, in the same order, and sends itself nothing.
    """
    if not isinstance(step, AllToAll) or step.rounds > 1 or dtype not in WIRE:
        return None
    how = step.along
    if how is None or how.dim_of_blocks is not None or not how.even:
        return None
    return how if communication.in_order(mesh, how.mesh_dims) else None


def _trade(how: Along, local: torch.Tensor, group: Any) -> torch.Tensor:
    """Give each rank a block of rows of one dim, and join the blocks of another dim."""
    parts, gathered, scattered = group.size(), how.gathered or 0, how.scattered or 0
    blocks = local.unflatten(scattered, (parts, local.shape[scattered] // parts))
    blocks = blocks.movedim(scattered, 0).contiguous()
    got = communication.all_to_all(blocks.view(parts, -1), [1] * parts, [1] * parts, group)
    return got.view(blocks.shape).movedim(0, gathered).flatten(gathered, gathered + 1)


def looks_at_sizes(step: Step, dtype: torch.dtype, mesh: Any) -> bool:
    """Whether the step cannot run on symbolic sizes: it can as a collective of a tensor dim in
    equal blocks, and as an all-reduce of the whole local tensor.
    """
    if isinstance(step, Reduction) and not step.scatters:
        return step.source != step.target
    how = whole_dim(step, dtype, mesh)
    return how is None or not how.even


def is_native(step: Step, dtype: torch.dtype, mesh: Any) -> bool:
    """Whether the step is local slices, or in a graph a collective of whole tensor dims or of the
    whole local tensor.
    """
    step = step.by_whole_dims
    if not step.communicates or (isinstance(step, Reduction) and not step.scatters):
        return True
    return (whole_dim(step, dtype, mesh) or traded(step, dtype, mesh)) is not None


def is_shown(step: Step, dtype: torch.dtype, mesh: Any) -> bool:
    """Whether graphs show the step, for sizes that are numbers: if it :func:`is_native`, in rounds,
    or an exchange of equal blocks of whole dims. Of any other exchange a compiler would see this
    rank's messages alone.
    """
    return (
        is_native(step, dtype, mesh)
        or (step.along is not None and step.along.even)
        or (isinstance(step, AllToAll) and step.rounds > 1)
    )


def keep_own(step: Step, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The result of a step that does not communicate, in memory of its own."""
    return _keep(step, local, mesh, alias=False)


def _keep(step: Step, local: torch.Tensor, mesh: Any, *, alias: bool) -> torch.Tensor:
    """The part of its local tensor that each device keeps in the step."""
    return on_each_rank(lambda rank, x: keep(part_alone(step, mesh, rank), x, alias=alias), local)


def _exchange(
    step: AllToAll, local: torch.Tensor, mesh: Any, async_op: bool, apart: bool
) -> Started:
    group = group_of(mesh, step.mesh_dims)
    if step.rounds > 1:
        shipment = shipment_of((step,), (local.dtype,), mesh)
        return Started(shipment.run([local], group, step.rounds)[0])
    how = whole_dim(step, local.dtype, mesh)
    if how is not None:
        if not how.even:
            return _gather_padded(step, local, mesh, group, async_op)
        dim = how.gathered or 0
        return Started(communication.all_gather(local, group, dim, async_op=async_op))
    gathers, part = step.gathers, parts_of(step, mesh, step.gathers)
    is_result = true_on_each_rank(lambda rank: None in part(rank).unpacks)
    # A gather's result is the same on all ranks of the group, so all decide alike.
    if gathers and not is_result and not copies_natively(group, mesh):
        gathers, part = False, parts_of(step, mesh)
        is_result = true_on_each_rank(lambda rank: None in part(rank).unpacks)
    is_async = async_op and (is_result or apart)
    received = exchange_messages(part, [local], group, gathers=gathers, async_op=is_async)
    if is_async and not is_result:
        return _started_apart(part(communication.this_rank()), received, local)
    finish = partial(
        on_each_rank,
        lambda rank, got, x: unpack(part(rank), 0, from_wire(got, x.dtype), [x]),
    )
    if is_async and local.dtype in WIRE:
        return Started(finish(received, local))
    return Started(received, lambda got: finish(got, local))


def _started_apart(part: Any, received: torch.Tensor, local: torch.Tensor) -> Started:
    """An exchange of messages under way, whose result has what this rank keeps already."""
    into = begin(part, 0, [local])

    def finish(got: torch.Tensor) -> torch.Tensor:
        complete(part, 0, from_wire(got, into.dtype), into)
        return into

    return Started(received, finish, into)


def _gather_padded(
    step: AllToAll, local: torch.Tensor, mesh: Any, group: Any, async_op: bool
) -> Started:
    """All-gather blocks, padded to equal sizes."""
    equal = block_of(step, local, mesh)
    with dispatch_modes.of_this_rank():  # other ranks may have no padding
        gathered = communication.all_gather(equal, group, async_op=async_op)
    whole = partial(on_each_rank, lambda rank, x: whole_of(step, x, mesh, rank))
    return Started(gathered, whole)


def block_of(step: AllToAll, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This rank's block for an all-gather of a tensor dim, padded with zero rows to the longest
    block. Blocks are gathered in their order and only the last ones are short, so the padding ends
    up behind all rows.
    """
    dim, parts = _gathered_dim(step, mesh)

    def block(rank: int, x: torch.Tensor) -> torch.Tensor:
        part = part_alone(step, mesh, rank)
        return pad_rows(x, dim, -(-part.target_shape()[dim] // parts))

    return on_each_rank(block, local)


def whole_of(step: AllToAll, blocks: torch.Tensor, mesh: Any, rank: int) -> torch.Tensor:
    """The gathered tensor, from the blocks of all ranks one behind the other."""
    return join_blocks(
        blocks, *_gathered_dim(step, mesh), part_alone(step, mesh, rank).target_shape()
    )


def _gathered_dim(step: AllToAll, mesh: Any) -> tuple[int, int]:
    """The tensor dim that is gathered, and the number of ranks."""
    how = step.along
    assert how is not None, "a step is asked before (whole_dim)"
    return how.gathered or 0, prod(mesh.size(m) for m in how.mesh_dims)


def _telling_observers(step: Step, local: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which observers see what the busiest rank receives in each collective."""
    if not observing.are_there():
        return nullcontext()
    itemsize = local.element_size()
    return observing.exchange(
        lambda: -(-step.received_elements // max(step.collectives, 1)) * itemsize
    )


def _reduce(step: Reduction, local: torch.Tensor, mesh: Any, async_op: bool) -> Started:
    group = group_of(mesh, step.mesh_dims)
    op, local, finish = scaled(step, local, group, mesh)
    reduce = _scatter if step.scatters else _all_reduce
    started = reduce(step, op, local, mesh, group, async_op)
    return started if finish is None else started.behind(finish)


def scaled(
    step: Reduction, local: torch.Tensor, group: Any, mesh: Any
) -> tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """For an average: (the op of the collective, this rank's contribution, a function of the
    result, or None). Otherwise the collective needs no change.

    Contributions are divided before they are summed, so that averages of halves do not overflow, as
    in backends with an average. Integers are divided afterwards.
    """
    if step.divisor == 1:
        return step.op, local, None
    if not (local.is_floating_point() or local.is_complex()):
        return (
            step.op,
            local,
            lambda result: torch.div(result, step.divisor, rounding_mode="trunc"),
        )
    if step.divisor == step.parts and communication.averages(group, mesh.device_type):
        return "avg", local, None
    return step.op, wait_for(local) / step.divisor, None


def keep_part(step: Step, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """What an all-reduce reduces: a device keeps its target's part of its source, and all devices
    of its group keep the same part.
    """
    return _keep(step, local, mesh, alias=True)


def _all_reduce(
    step: Reduction, op: str, local: torch.Tensor, mesh: Any, group: Any, async_op: bool
) -> Started:
    if step.source != step.target:
        local = keep_part(step, local, mesh)
    return Started(communication.all_reduce(local, op, group, async_op=async_op))


def _scatter(
    step: Reduction, op: str, local: torch.Tensor, mesh: Any, group: Any, async_op: bool
) -> Started:
    part = parts_of(step, mesh)

    def shape(rank: int) -> tuple[int, ...]:
        return part_alone(step, mesh, rank).target_shape()

    how = whole_dim(step, local.dtype, mesh)
    if how is not None:
        dim = how.scattered or 0
        if how.even:
            return Started(communication.reduce_scatter(local, op, group, dim, async_op=async_op))
        blocks = on_each_rank(lambda rank, x: in_blocks(x, dim, step.parts), local)
        scattered = communication.reduce_scatter(blocks, op, group, async_op=async_op)
        unpadded = partial(
            on_each_rank, lambda rank, x: x[0].narrow(dim, 0, shape(rank)[dim]).contiguous()
        )
        return Started(scattered, unpadded)
    if step.even and copies_natively(group, mesh):
        scattered = communication.reduce_scatter(
            on_each_rank(lambda rank, x: pack(part(rank), [x]), local),
            op,
            group,
            async_op=async_op,
        )
        return Started(on_each_rank(lambda rank, got: got.view(shape(rank)), scattered))
    # Blocks of different sizes: each rank sends its contributions, and the receiver reduces them.
    received, dtype = exchange_messages(part, [local], group, async_op=async_op), local.dtype
    reduced = partial(
        on_each_rank,
        lambda rank, got: _REDUCE[step.op](from_wire(got, dtype).view(step.parts, *shape(rank))),
    )
    # a backend that averages, in a group that is not in order
    return Started(received, reduced if op != "avg" else lambda got: reduced(got) / step.parts)


def _bitwise(op: Any) -> Any:
    def reduce(stacked: torch.Tensor) -> torch.Tensor:
        result = stacked[0]
        for contribution in stacked[1:]:
            result = op(result, contribution)
        return result

    return reduce


_REDUCE = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "band": _bitwise(torch.bitwise_and),
    "bor": _bitwise(torch.bitwise_or),
    "bxor": _bitwise(torch.bitwise_xor),
}
