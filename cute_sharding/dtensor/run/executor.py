"""Running the steps of a plan on local tensors, with DTensor's functional collectives.

What a collective gives is waited for where its elements are needed, and not before: by the next
step, by what unpacks it, by who gets the result. In a graph it is the collective that has the op
that waits behind it (see compiled/__init__.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced import collective_ops, dispatch_modes, process_groups, watching
from cute_sharding.dtensor.replaced.collective_ops import waited
from cute_sharding.dtensor.run.groups import group_of
from cute_sharding.dtensor.run.messages import exchanged, needing
from cute_sharding.dtensor.run.packing import (
    WIRE,
    alone,
    checked,
    from_wire,
    in_blocks,
    joined,
    keep,
    packed,
    padded,
    parts_of,
    unpacked,
)
from cute_sharding.dtensor.run.ranks import (
    copies_natively,
    in_order,
    on_each_rank,
    true_on_each_rank,
)
from cute_sharding.exchange.all_to_all import AllToAll
from cute_sharding.exchange.native import Along
from cute_sharding.exchange.reduction import Reduction
from cute_sharding.exchange.step import Step


def run(
    steps: Sequence[Step], local: torch.Tensor, mesh: Any, *, async_op: bool = False
) -> torch.Tensor:
    """Take the local tensor of this rank through ``steps``. Its sizes may be symbols where none of
    them :func:`looks_at_sizes`, or, where none communicates, its elements blocks: it then has more
    dims than they say.

    With ``async_op``, what the last collective brings is returned unwaited, if it is the result as
    it lies.
    """
    if steps:
        local = checked(steps[0], waited(local), mesh)
    for k, step in enumerate(steps, 1):
        local, is_async = waited(local), async_op and k == len(steps)
        if not step.communicates:
            local = _kept(step, local, mesh, alias=False)
            continue
        with _told(step, local):
            if isinstance(step, AllToAll):
                local = _exchange(step, local, mesh, is_async)
            else:
                assert isinstance(step, Reduction)
                local = _reduce(step, local, mesh, is_async)
    return local if async_op else waited(local)


def whole_dim(step: Step, dtype: torch.dtype, mesh: Any) -> Along | None:
    """The step as a backend's own collective of a whole tensor dim, if it runs as one."""
    assert isinstance(step, (AllToAll, Reduction))
    how = step.along
    if how is None or not (how.even or step.padded) or not in_order(mesh, how.mesh_dims):
        return None
    return (
        None
        if isinstance(step, AllToAll) and (how.scattered is not None or dtype not in WIRE)
        else how
    )


def looks_at_sizes(step: Step, dtype: torch.dtype, mesh: Any) -> bool:
    """Whether the step cannot run on sizes that are symbols: it is neither a collective of a tensor
    dim whose blocks are as long as each other, nor an all-reduce of all that a device has.
    """
    if isinstance(step, Reduction) and not step.scatters:
        return step.source != step.target
    how = whole_dim(step, dtype, mesh)
    return how is None or not how.even


def _kept(step: Step, local: torch.Tensor, mesh: Any, *, alias: bool) -> torch.Tensor:
    """What each device keeps of its own in the step."""
    return on_each_rank(lambda rank, x: keep(alone(step, mesh, rank), x, alias=alias), local)


def _exchange(step: AllToAll, local: torch.Tensor, mesh: Any, async_op: bool) -> torch.Tensor:
    group = group_of(mesh, step.mesh_dims)
    how = whole_dim(step, local.dtype, mesh)
    if how is not None:
        if not how.even:
            return _gather_padded(step, local, mesh, group)
        return collective_ops.all_gather(local, group, how.gathered or 0, async_op=async_op)
    gathers, part = step.gathers, parts_of(step, mesh, step.gathers)
    is_result = true_on_each_rank(lambda rank: None in part(rank).unpacks)
    # What a gather brings lies the same on all ranks of the group, so all of them decide alike.
    if gathers and not is_result and not copies_natively(group, mesh):
        gathers, part = False, parts_of(step, mesh)
        is_result = true_on_each_rank(lambda rank: None in part(rank).unpacks)
    is_async = async_op and is_result
    received = exchanged(part, [local], group, mesh, gathers=gathers, async_op=is_async)
    result = on_each_rank(
        lambda rank, got, x: unpacked(part(rank), 0, from_wire(got, x.dtype), [x]), received, local
    )
    return needing(result, 0, part, received) if dispatch_modes.is_tracing() else result


def _gather_padded(step: AllToAll, local: torch.Tensor, mesh: Any, group: Any) -> torch.Tensor:
    """An all-gather of blocks made equal."""
    equal = block_of(step, local, mesh)
    with dispatch_modes.of_this_rank():  # others may have added nothing
        gathered = collective_ops.all_gather(equal, group)
    return on_each_rank(lambda rank, x: whole_of(step, x, mesh, rank), gathered)


def block_of(step: AllToAll, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """What a rank gives to a gather of a whole tensor dim: as many rows as any other. They lie in
    the order of the blocks, and only the last ones are short: so what was added lies behind all
    rows.
    """
    dim, parts = _gathered(step, mesh)

    def block(rank: int, x: torch.Tensor) -> torch.Tensor:
        part = alone(step, mesh, rank)
        return padded(x, dim, -(-part.target_shape()[dim] // parts))

    return on_each_rank(block, local)


def whole_of(step: AllToAll, blocks: torch.Tensor, mesh: Any, rank: int) -> torch.Tensor:
    """What comes of the blocks of all ranks, one behind the other."""
    return joined(blocks, *_gathered(step, mesh), alone(step, mesh, rank).target_shape())


def _gathered(step: AllToAll, mesh: Any) -> tuple[int, int]:
    """The tensor dim that is gathered, and from how many ranks."""
    how = step.along
    assert how is not None, "a step is asked before (whole_dim)"
    return how.gathered or 0, prod(mesh.size(m) for m in how.mesh_dims)


def _told(step: Step, local: torch.Tensor) -> AbstractContextManager[Any]:
    """Those who watch are told what the busiest rank receives of a collective of the step."""
    itemsize = local.element_size()
    return watching.exchange(
        lambda: -(-step.received_elements // max(step.collectives, 1)) * itemsize
    )


def _reduce(step: Reduction, local: torch.Tensor, mesh: Any, async_op: bool) -> torch.Tensor:
    group = group_of(mesh, step.mesh_dims)
    op, local, finish = _scaled(step, local, group, mesh)
    reduce = _scatter if step.scatters else _all_reduce
    return finish(reduce(step, op, local, mesh, group, async_op))


def _scaled(
    step: Reduction, local: torch.Tensor, group: Any, mesh: Any
) -> tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """(the op that the collective is to have, the contribution that it gets, what is to be done
    with its result), where an average is wanted.

    Contributions are divided before they are summed, so that averages of halves do not overflow; a
    backend that averages does so, too. Whole numbers are divided afterwards.
    """
    if step.divisor == 1:
        return step.op, local, lambda result: result
    if not (local.is_floating_point() or local.is_complex()):
        return (
            step.op,
            local,
            lambda result: torch.div(waited(result), step.divisor, rounding_mode="trunc"),
        )
    if step.divisor == step.parts and process_groups.averages(group, mesh.device_type):
        return "avg", local, lambda result: result
    return step.op, waited(local) / step.divisor, lambda result: result


def _all_reduce(
    step: Reduction, op: str, local: torch.Tensor, mesh: Any, group: Any, async_op: bool
) -> torch.Tensor:
    # Of what its source has, a device keeps its target; all of the group keep the same.
    kept = _kept(step, local, mesh, alias=True)
    return collective_ops.all_reduce(kept, op, group, async_op=async_op)


def _scatter(
    step: Reduction, op: str, local: torch.Tensor, mesh: Any, group: Any, async_op: bool
) -> torch.Tensor:
    part = parts_of(step, mesh)

    def shape(rank: int) -> tuple[int, ...]:
        return alone(step, mesh, rank).target_shape()

    how = whole_dim(step, local.dtype, mesh)
    if how is not None:
        dim = how.scattered or 0
        if how.even:
            return collective_ops.reduce_scatter(local, op, group, dim, async_op=async_op)
        blocks = on_each_rank(lambda rank, x: in_blocks(x, dim, step.parts), local)
        scattered = collective_ops.reduce_scatter(blocks, op, group)
        return on_each_rank(
            lambda rank, x: x[0].narrow(dim, 0, shape(rank)[dim]).contiguous(), scattered
        )
    if step.even and copies_natively(group, mesh):
        scattered = collective_ops.reduce_scatter(
            on_each_rank(lambda rank, x: packed(part(rank), [x]), local),
            op,
            group,
            async_op=async_op,
        )
        return on_each_rank(lambda rank, got: got.view(shape(rank)), scattered)
    # Blocks of different sizes: everyone sends its contributions, and the receiver reduces them.
    received = exchanged(part, [local], group, mesh)
    result = on_each_rank(
        lambda rank, got: _REDUCE[step.op](
            from_wire(got, local.dtype).view(step.parts, *shape(rank))
        ),
        received,
    )
    return (
        result / step.parts if op == "avg" else result
    )  # of a backend that averages, in a group that is not in order


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
