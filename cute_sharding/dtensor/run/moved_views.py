"""Views that moved: a slice of a sharded dim, or a view whose operand was redistributed first.

To autograd such a result is a view; in memory it is a copy, because its rows came from other
devices. Two things make up for that:

- A write to the result, through any alias of it (a detached tensor, ``.data``, a view as another
  dtype), goes to the viewed tensor at once: by the redistribution back, or by the exchange of the
  movement run backward. All ranks run the write, so the exchanges meet.
- Another write to the viewed tensor makes the result *stale*. Ranks do not know which results the
  other ranks still hold, so nobody could bring it up to date, and the next read of it raises a
  :class:`StaleView` on all ranks, which names the two lines.

In a program that AOTAutograd traces, both become part of the graph. A graph's writes to its inputs
are followed after the graph has run. (:mod:`.writes` takes writes back.)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from cute_sharding.dtensor.replaced import (
    codes,
    collective_ops,
    dispatch_modes,
    local_tensors,
)
from cute_sharding.dtensor.replaced.read_hook import Reads
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor

# Weak references to views. Each removes itself from its sets when Python collects the view, which
# may happen at any point of this code, or in another thread.
Views: TypeAlias = "set[weakref.ref[MovedView]]"

# All of them. If there are none, writes skip the check, which costs a fortieth of the op.
LIVE: Views = set()
# The stale ones. If there are none, reads skip the check.
_STALE: Views = set()

# Attributes of a memory: the result that lies in it, and the views of it that are not stale.
_RESULT, _VIEWS = "_cute_sharding_result", "_cute_sharding_views"


class StaleView(RuntimeError):
    """A program reads a view of a DTensor that is a copy, after a write to the DTensor.

    Attributes:
        taken_at, written_at: the lines, as ``file:number``; "an unknown line" if the program has
            none.
        writer: the op that wrote.
    """

    def __init__(self, message: str, taken_at: str, writer: str, written_at: str) -> None:
        super().__init__(message)
        self.taken_at, self.writer, self.written_at = taken_at, writer, written_at


class ViewMove(Protocol):
    """How a view op has moved a tensor: the runner of a movement op, or a redistribution."""

    def back(self, number: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write a result's elements back to ``source``. All ranks together."""

    def check_back(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: a write to a result cannot be taken back.
        """

    def is_apart(self, number: int, other: ViewMove) -> bool:
        """Whether a result has no row in common with any result of another view of the tensor."""


class MovedView:
    """A view op that moved its operand. Its results have no row in common. It is an attribute of
    their memory, lives as long, and keeps the operand alive.

    Attributes:
        way: how it was moved.
        source, spec: the operand's local tensor and spec.
        line: of the program that took the view.
        written: the (op, line) of the write that made it stale; None before.
        writes: how often the program had written to ``source`` itself, and not by a DTensor, when
            the results last had its elements.
    """

    __slots__ = ("__weakref__", "line", "source", "spec", "way", "writes", "written")

    def __init__(self, way: ViewMove, source: torch.Tensor, spec: DTensorSpec) -> None:
        self.way, self.source, self.spec = way, source, spec
        self.line = codes.line_of_program(sys._getframe(1))
        self.written: tuple[str, codes.Line | None] | None = None
        self.writes = own_writes(source)
        LIVE.add(weakref.ref(self, LIVE.discard))

    def outdate(self, writer: str, line: codes.Line | None) -> None:
        self.written = writer, line
        _STALE.add(weakref.ref(self, _STALE.discard))
        Reads.watch()

    def check_read(self) -> None:
        """
        Raises:
            StaleView: the operand was written to after the view was taken.
        """
        if self.written is not None:
            spec, (writer, line) = self.spec, self.written
            taken_at, written_at = codes.line_text(self.line), codes.line_text(line)
            raise StaleView(
                f"a view that was taken at {taken_at} is read after {writer} at {written_at} wrote "
                f"to the viewed DTensor (shape {tuple(spec.shape)}, placements "
                f"{text(spec.placements)}). The view needed communication, so it is a copy without "
                "the written values. Take the view again after the write; or, if the old values "
                "are wanted, call .clone() on the view before the write.",
                taken_at,
                writer,
                written_at,
            )

    def check_write(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: a write to a result cannot be taken back to the operand.
        """
        if self.writes != own_writes(self.source):
            raise RuntimeError(
                f"{writer} writes to a view of shape {tuple(tensor.shape)} and placements "
                f"{text(tensor.placements)}, taken at {codes.line_text(self.line)}. The "
                f"view is a copy of rows of a DTensor of shape {tuple(self.spec.shape)}. After "
                "it was taken, the program wrote to the local tensor of this DTensor, and the view "
                "does not have the written values. Take the view again."
            )
        self.way.check_back(writer, tensor)


class Redistributed(NamedTuple):
    """The :class:`ViewMove` of a view op that first redistributes its operand from ``spec`` to
    ``wanted``.
    """

    spec: DTensorSpec
    wanted: DTensorSpec

    def back(self, number: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        source.copy_(redistribute_local_tensor(moved, self.wanted, self.spec, counted=False))

    def check_back(self, writer: str, tensor: Any) -> None:
        """Do nothing: there is always a way back."""

    def is_apart(self, number: int, other: ViewMove) -> bool:
        """The whole operand is in the result."""
        return False


class PartView(NamedTuple):
    """The rows that a view which did not move has of a local tensor.

    Attributes:
        local: finds the view's local tensor while it exists.
        way, number: of the view, and the position of the result.
        source: the local tensor.
    """

    local: weakref.ref[torch.Tensor]
    way: ViewMove
    number: int
    source: torch.Tensor

    def is_apart(self, view: MovedView) -> bool:
        """Whether a write to these rows leaves the results of ``view`` as they are."""
        return view.source is self.source and self.way.is_apart(self.number, view.way)


# By the number (``id``) of a local tensor.
_PARTS: dict[int, PartView] = {}


def note_parts(way: ViewMove, local: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Record a view op whose results ``parts`` are views of the local tensor ``local``."""
    for number, part in enumerate(parts):
        key = id(part)
        gone = partial(_forget_part, _PARTS, key)
        _PARTS[key] = PartView(weakref.ref(part, gone), way, number, local)


def _forget_part(parts: dict[int, PartView], key: int, gone: weakref.ref[torch.Tensor]) -> None:
    found = parts.get(key)
    if found is not None and found.local is gone:  # another tensor may have the number by now
        del parts[key]


def part_of(local: torch.Tensor) -> PartView | None:
    found = _PARTS.get(id(local))
    return found if found is not None and found.local() is local else None


class Result(NamedTuple):
    """A result of a moved view, as an attribute of its memory.

    Attributes:
        view, number: the view, and the position of the result.
        lies: finds the local tensor while its memory exists, and does not keep it alive. A tensor
            in a graph has no memory: it is kept while the graph is traced.
    """

    view: MovedView
    number: int
    lies: Callable[[], torch.Tensor | None]

    def is_apart(self, view: MovedView) -> bool:
        """Whether a write to this result leaves the results of ``view`` as they are, or has written
        them itself.
        """
        if view is self.view:
            return True
        return view.source is self.view.source and self.view.way.is_apart(self.number, view.way)


class _Place(NamedTuple):
    """Where the local tensor of a rank lies."""

    rank: int
    memory: Callable[[], Any]
    dtype: torch.dtype
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, x: torch.Tensor) -> _Place:
        memory = weakref.ref(x.untyped_storage())
        return cls(rank, memory, x.dtype, x.storage_offset(), x.size(), x.stride())


def _tensor_at(places: Sequence[_Place]) -> torch.Tensor | None:
    """The local tensor, of each rank of this process; None if its memory is gone."""
    found = {}
    for rank, memory, dtype, offset, size, stride in places:
        storage = memory()
        if storage is None:
            return None
        with dispatch_modes.no_modes():
            empty = torch.empty(0, dtype=dtype, device=storage.device)
            found[rank] = empty.set_(storage, offset, size, stride)
    return local_tensors.local_tensor(found)


def note_views(
    way: ViewMove, local: torch.Tensor, spec: DTensorSpec, moved: Sequence[torch.Tensor]
) -> None:
    """Record a view op that has moved the local tensor ``local`` with that spec, if results
    ``moved`` lie in other memory.
    """
    local = collective_ops.in_flight(local)
    memory = _followed_memory(local)
    if memory is None:
        return
    in_graph, view = local_tensors.is_functional(local), None
    for number, result in enumerate(moved):
        result = collective_ops.in_flight(result)
        lies_in = local_tensors.memory_of(result)
        if lies_in is None or lies_in is memory:
            continue
        if in_graph and not local_tensors.is_functional(result):
            continue
        view = view or MovedView(way, local, spec)
        setattr(lies_in, _RESULT, Result(view, number, _finder(result)))
    if view is not None:
        views: Views | None = getattr(memory, _VIEWS, None)
        if views is None:
            views = set()
            setattr(memory, _VIEWS, views)
        views.add(weakref.ref(view, views.discard))


def _finder(result: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    if local_tensors.is_functional(result):
        dispatch_modes.keep_while_traced(result)
        return weakref.ref(result)
    parts = local_tensors.parts_of(result).items()
    return partial(_tensor_at, [_Place.of(rank, part) for rank, part in parts])


# -- reads -----------------------------------------------------------------------------------------


def has_stale() -> bool:
    """Whether there are stale views."""
    return bool(_STALE)


def check_read(local: torch.Tensor) -> bool:
    """Check a local tensor that is about to be read.

    Returns:
        whether there may still be stale views.

    Raises:
        StaleView: it is in a stale view.
    """
    if not _STALE:
        return False
    memory = _followed_memory(collective_ops.in_flight(local))
    for view in () if memory is None else views_of(memory):
        view.check_read()
    return True


# -- memory ----------------------------------------------------------------------------------------


def views_of(memory: Any) -> Iterator[MovedView]:
    """The views from that memory back to the tensor that was viewed first."""
    while (result := getattr(memory, _RESULT, None)) is not None:
        yield result.view
        memory = local_tensors.storage_of(result.view.source)


def result_in(memory: Any) -> Result | None:
    """The result of a view that lies there, if one does."""
    return getattr(memory, _RESULT, None)


def views_that_hold(memory: Any) -> Views:
    """The views of what lies there that are not stale."""
    found: Views | None = getattr(memory, _VIEWS, None)
    return set() if found is None else found


def living(views: Views) -> list[MovedView]:
    found = [each() for each in list(views)]
    return [each for each in found if each is not None]


def is_of_view(local: torch.Tensor) -> bool:
    """Whether a write to a local tensor may concern views. While there are any, every write asks
    this.
    """
    memory = local_tensors.memory_of(collective_ops.in_flight(local))
    return hasattr(memory, _RESULT) or hasattr(memory, _VIEWS)


def own_writes(local: torch.Tensor) -> int | None:
    """The number of writes to a plain tensor and its views; None if torch does not count them. (It
    does not count DTensor's own writes there.)
    """
    if type(local) is not torch.Tensor and (
        isinstance(local, local_tensors.LocalTensor) or local_tensors.is_functional(local)
    ):
        return None
    return None if local.is_inference() else local._version


def is_followed(local: torch.Tensor) -> bool:
    """Whether operations on the local tensor run now, or become part of a graph. (Before
    AOTAutograd, dynamo traces a program with tensors without data.)
    """
    return not dispatch_modes.is_tracing() or local_tensors.is_functional(local)


def _followed_memory(local: torch.Tensor) -> torch.UntypedStorage | None:
    return local_tensors.memory_of(local) if is_followed(local) else None
