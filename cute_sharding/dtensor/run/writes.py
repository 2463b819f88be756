"""Writes to views of DTensors that have moved (:mod:`.moved_views`): each reaches the tensor that
was viewed, at once, and makes other views of it stale.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any

import torch

from cute_sharding.dtensor.replaced import (
    codes,
    collective_ops,
    local_tensors,
    op_schemas,
    registry,
    tensor_specs,
)
from cute_sharding.dtensor.run.moved_views import (
    MovedView,
    PartView,
    Result,
    is_followed,
    is_of_view,
    living,
    own_writes,
    part_of,
    result_in,
    views_of,
    views_that_hold,
)


def reach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take what ``op`` has written to moved views to the viewed tensors.

    Raises:
        RuntimeError: a write cannot be taken back, or the op wrote to a tensor and a view of it.
    """
    written = [
        tensor
        for tensor in written_by(op, args, kwargs)
        if is_of_view(tensor._local_tensor) and is_followed(tensor._local_tensor)
    ]
    if written:
        name = registry.name_of(op)
        _check_writes(name, written)
        _record(written, name)


def before_program(tensors: Sequence[Any]) -> Callable[[], None]:
    """Check a compiled program's writes to these inputs, and return a function to call after it: it
    writes to local tensors, without an op on DTensors.

    Raises:
        RuntimeError: as :func:`reach`.
    """
    writer = "a compiled program"
    tensors = [tensor for tensor in tensors if is_of_view(tensor._local_tensor)]
    _check_writes(writer, tensors)

    def after() -> None:
        with torch.no_grad():
            _record(tensors, writer)

    return after


def _check_writes(writer: str, tensors: Sequence[Any]) -> None:
    """
    Raises:
        RuntimeError: a write to one of these tensors cannot be taken back, or would have to reach
            another one of them.
    """
    ways = {}
    for tensor in tensors:
        memory = _memory_of(tensor)
        ways[id(memory)] = _way_back(memory)
        for view in views_of(memory):
            view.check_write(writer, tensor)
    if any(_have_common_rows(*pair) for pair in combinations(ways.values(), 2)):
        # What was written to the views stays there: nobody may read it.
        line = codes.line_of_program(sys._getframe(1))
        for view in filter(None, chain.from_iterable(way.values() for way in ways.values())):
            view.outdate(writer, line)
        raise RuntimeError(
            f"{writer} writes to several views of one DTensor, or to a DTensor and a view of it, "
            "in one call. The views needed communication, so they are copies, and none would have "
            "what is written to another. Write to one at a time, and take the next view after the "
            "write."
        )


def _way_back(memory: Any) -> dict[int, MovedView | None]:
    """Each memory from that one back to the tensor that was viewed first, by number, with the view
    of it that is on the way.
    """
    way: dict[int, MovedView | None] = {id(memory): None}
    for view in views_of(memory):
        way[id(local_tensors.storage_of(view.source))] = view
    return way


def _have_common_rows(one: dict[int, MovedView | None], other: dict[int, MovedView | None]) -> bool:
    """Whether two tensors with these ways back may have a row in common: where the ways meet, they
    come through two views, or through none; and not through two results of one view.
    """
    meeting = next((number for number in one if number in other), None)
    if meeting is None:
        return False
    return one[meeting] is None or one[meeting] is not other[meeting]


def _record(tensors: Sequence[Any], writer: str) -> None:
    line = codes.line_of_program(sys._getframe(1))
    for tensor in tensors:
        _record_write(_memory_of(tensor), writer, line, part_of(tensor._local_tensor))


def _record_write(
    memory: Any, writer: str, line: codes.Line | None, by: PartView | Result | None
) -> None:
    """Record a write to ``memory``, through a view of it or otherwise: the views of it that may
    have the written rows are stale. If the memory is itself a view's, the tensor that was viewed is
    written to.
    """
    views = views_that_hold(memory)
    for view in living(views):
        if by is None or not by.is_apart(view):
            # Add before discarding: at any time the view is in one of the sets.
            view.outdate(writer, line)
            views.discard(weakref.ref(view))
    result = result_in(memory)
    moved = None if result is None else result.lies()
    if result is not None and moved is not None:
        view = result.view
        view.way.back(result.number, moved, view.source)
        view.writes = own_writes(view.source)
        _record_write(local_tensors.storage_of(view.source), writer, line, result)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The DTensors that the op writes to."""
    found = []
    for i, name in op_schemas.places_written(op):
        value = kwargs.get(name, args[i] if i < len(args) else None)
        some = value if isinstance(value, (list, tuple)) else [value]
        found += [tensor for tensor in some if tensor_specs.is_dtensor(tensor)]
    return found


def _memory_of(tensor: Any) -> Any:
    return local_tensors.storage_of(collective_ops.in_flight(tensor._local_tensor))
