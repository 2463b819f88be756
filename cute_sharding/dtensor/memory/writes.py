"""In-place ops on views of a DTensor, where the view could not be had without communication: they
reach the tensor that was viewed.

Whatever writes to a copy (:mod:`.copies`), by whatever alias (a detached tensor, ``.data``, a view
as other numbers), what it holds is taken back: by the redistribution that leads there, or by the
exchange of a movement op run backward. The former seldom communicates: what was moved is a replica,
mostly, of which each device takes its part.

What was moved twice stays one tensor: copies with the same placements are written to together. One
that was made before its source was written to is stale, and was brought up to date before the op
read it. Whether it is is known alike on every rank, so that these exchanges meet. In a program that
AOTAutograd traces all this becomes part of the graph. Of what a graph writes to its inputs it is
done after the graph has run (:func:`before_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from cute_sharding.dtensor.memory.copies import (
    Copy,
    copy_in,
    has_memory,
    is_followed,
    is_linked,
    may_be_told,
    outdate,
    way_back,
)
from cute_sharding.dtensor.redistributing.groups import group_of
from cute_sharding.dtensor.redistributing.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.torch_private import (
    collective_ops,
    dispatch,
    dispatch_modes,
    local_tensors,
    op_schemas,
    registry,
    tensor_specs,
)
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec, Partial


def reach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``op`` has written, also in what the tensors that it wrote to were moved from.

    Where it wrote to several that are of one tensor, they are written to again, one after the
    other.

    Raises:
        RuntimeError: what was written cannot be taken there, or not be written again.
    """
    written = [
        tensor
        for tensor in _written_by(op, args, kwargs)
        if may_be_told(tensor._local_tensor) and is_followed(tensor._local_tensor)
    ]
    if not written:
        return
    memories = [_memory(tensor) for tensor in written]
    for tensor, memory in zip(written, memories):
        for copy in way_back(memory):
            copy.check(registry.name_of(op), tensor)
    again = _are_of_one(memories)
    for memory in memories:
        if not again or not way_back(memory):
            _written(memory)
    if again:
        _write_again(op, args, kwargs)


def before_program(tensors: Sequence[Any]) -> Callable[[], None]:
    """What is to be called after a compiled program that writes to these of its inputs: it writes
    to local tensors, and no op of DTensors' tells of it.

    Raises:
        RuntimeError: what it is going to write cannot be taken to what was moved.
    """
    tensors = [tensor for tensor in tensors if may_be_told(tensor._local_tensor)]
    memories = [_memory(tensor) for tensor in tensors]
    for tensor, memory in zip(tensors, memories):
        for copy in way_back(memory):
            copy.check("a compiled program", tensor)
    if _are_of_one(memories):
        raise RuntimeError(
            "a compiled program writes to several of its inputs that are views of one tensor and "
            "copies of what they view, and what it writes to one would not be in the others. "
            "Have it take these views itself, of that tensor."
        )

    def after() -> None:
        with torch.no_grad():
            for memory in memories:
                _written(memory)

    return after


def _are_of_one(memories: Sequence[Any]) -> bool:
    """Whether several of what was written to have one source: each then has its own part of what
    was written.
    """
    ways = {
        id(memory): [
            id(memory),
            *(id(local_tensors.storage_of(copy.source)) for copy in way_back(memory)),
        ]
        for memory in memories
    }
    passed = [place for way in ways.values() for place in way]
    return len(ways) > 1 and any(
        len(way) > 1 and any(passed.count(place) > 1 for place in way) for way in ways.values()
    )


# Ops of which two, of different tensors, may as well come one before as after the other.
_COMMUTE = ("_foreach_add_", "_foreach_sub_", "_foreach_mul_", "_foreach_div_")


def _write_again(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bring the copies among the arguments up to date, and write to those again that the op writes
    to, one after the other.
    """
    several = args[0] if args and isinstance(args[0], (list, tuple)) else []
    copies = [len(way_back(_memory(tensor))) > 0 for tensor in several]
    others = sum(isinstance(arg, (list, tuple)) for arg in args) > 1
    if (
        torch.Tag.nondeterministic_seeded in op.tags
        or not several
        or any(argument.is_out for argument in op._schema.arguments)
        or (others and False in copies and op._opname not in _COMMUTE)
    ):
        raise RuntimeError(
            f"{registry.name_of(op)} writes at once to several views of one tensor that are copies "
            "of what they view, and cannot write to them again, one after the other. Write to one "
            "at a time."
        )
    for leaf in local_tensors.leaves(args, kwargs):
        if tensor_specs.is_dtensor(leaf) and has_memory(leaf._local_tensor):
            for copy in reversed(way_back(_memory(leaf))):
                copy.refresh()
    for i, is_copy in enumerate(copies):
        if is_copy:
            op(
                *[
                    arg[i : i + 1]
                    if isinstance(arg, (list, tuple)) and len(arg) == len(several)
                    else arg
                    for arg in args
                ],
                **kwargs,
            )


def take_back(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moved: dispatch.Moved
) -> list[DTensorSpec]:
    """What an op wrote to copies of DTensors, in these; the specs of what it writes to.

    A tensor that was pending, and had to be finished to be written to, is the copy from now on.
    Where others share its memory, as what it views does or a detached alias, it stays where it is
    and pending: one device has all of the sum, and the others nothing.

    Args:
        moved: by id of a local tensor, what the op was given instead, and its spec.
    """
    written = _written_by(op, args, kwargs)
    for tensor in written:
        wrote, spec = moved.get(id(tensor._local_tensor), (tensor._local_tensor, tensor._spec))
        if tuple(spec.placements) == tuple(tensor._spec.placements):
            continue
        finished = any(
            isinstance(p, Partial) and not isinstance(q, Partial)
            for p, q in zip(tensor._spec.placements, spec.placements)
        )
        if finished and not _on_any_rank(tensor, _is_shared(tensor)):
            tensor._local_tensor, tensor._spec = wrote, spec
        else:
            # What came as out= was written to where it lies, where that is as long.
            tensor._local_tensor.copy_(
                redistribute_local_tensor(
                    wrote.clone() if wrote is tensor._local_tensor else wrote,
                    spec,
                    tensor._spec,
                    counted=False,
                )
            )
    return [tensor._spec for tensor in written]


def _is_shared(tensor: Any) -> bool:
    """Whether others see what is written to the tensor: what it is a view of, or was moved from, or
    what is a view of it.
    """
    local = collective_ops.in_flight(tensor._local_tensor)
    if getattr(tensor, "_base", None) is not None or not has_memory(local):
        return getattr(tensor, "_base", None) is not None
    memory = local_tensors.storage_of(local)
    return is_linked(memory) or local_tensors.is_shared(local)


def _on_any_rank(tensor: Any, is_so: bool) -> bool:
    """Whether it is so on some rank of the mesh, by a tiny all-reduce: who still holds what, ranks
    do not know of one another, and placements must be the same on all.
    """
    local = tensor._local_tensor
    if local_tensors.is_imagined(local) or dispatch_modes.local_tensor_mode() is not None:
        return is_so
    flag = torch.tensor([is_so], dtype=torch.int32, device=local.device)
    for m, n in enumerate(tensor.device_mesh.shape):
        if n > 1:
            flag = collective_ops.waited(
                collective_ops.all_reduce(flag, "max", group_of(tensor.device_mesh, (m,)))
            )
    return bool(flag.item())


def _written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The DTensors that the op writes to."""
    found = []
    for i, name in _places_written(op):
        value = kwargs.get(name, args[i] if i < len(args) else None)
        some = value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in some if tensor_specs.is_dtensor(tensor)]
    return found


@cache
def _places_written(op: Any) -> list[tuple[int, str]]:
    """Where among the op's arguments, and by which names, those are that it writes to."""
    return [
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if op_schemas.is_written(op, argument)
    ]


def _memory(tensor: Any) -> Any:
    return local_tensors.storage_of(collective_ops.in_flight(tensor._local_tensor))


def _written(memory: Any, by: Copy | None = None) -> None:
    """Something was written to ``memory``: its copies are stale, but for ``by``, from which
    it was written, and what could be told the same; and its source is told.
    """
    outdate(memory, by)
    copy = copy_in(memory)
    moved = None if copy is None else copy.moved()
    if copy is not None and moved is not None:
        copy.take_back(moved)
        copy.has_taken_back()
        _written(local_tensors.storage_of(copy.source), copy)
