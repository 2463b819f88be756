"""Runs an op of rows in place of torch's local op, and says when a view that has moved is read or
written after the tensor that it was taken of.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import (
    communication,
    dispatch,
    dispatch_modes,
    local_tensors,
    observing,
    op_schemas,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.read_hook import WatchedReads
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Placement,
    Replicate,
    TensorMeta,
)
from cute_sharding.dtensor.run.groups import on_each_rank, place
from cute_sharding.dtensor.run.in_graphs import moved_in_graph, write_back_in_graph
from cute_sharding.dtensor.run.lists import LocalMove, redistribute_all
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.op_plan import as_list
from cute_sharding.dtensor.run.packing import lie_in, order_of
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.exchange.exchange import ends_otherwise
from cute_sharding.propagation.movements import PlacedView as PlacedStep
from cute_sharding.relations.moves import Fold, Window, are_apart
from cute_sharding.sharding.rows import chains_of

# -- moved views -----------------------------------------------------------------------------------
# Views that moved: a slice of a sharded dim, or a view whose operand was redistributed first.
#
# To autograd such a result is a view; in memory it is a copy, because its rows came from other
# devices. Two things make up for that:
#
# - A write to the result, through any alias of it (a detached tensor, ``.data``, a view as another
#   dtype), goes to the viewed tensor at once: by the redistribution back, or by the exchange of the
#   movement run backward. All ranks run the write, so the exchanges meet.
# - Another write to the viewed tensor makes the result *stale*. Ranks do not know which results the
#   other ranks still hold, so nobody could bring it up to date, and the next read of it raises a
#   ``StaleView`` on all ranks, which names the two lines.
#
# In a program that AOTAutograd traces, both become part of the graph. A graph's writes to its
# inputs are followed after the graph has run. (``ops`` takes writes back.)

# Weak references to views. Each removes itself from its sets when Python collects the view, which
# may happen at any point of this code, or in another thread.
Views: TypeAlias = "set[weakref.ref[MovedView]]"

# All of them, and all kept copies. If there are none, writes skip the check, which costs a fortieth
# of the op.
LIVE: set[weakref.ref[Any]] = set()
# The stale ones. If there are none, reads skip the check.
_STALE: Views = set()

# Attributes of a memory: the result that lies in it, the views of it that are not stale, and copies
# in other placements.
_RESULT, _VIEWS = "_cute_sharding_result", "_cute_sharding_views"
_COPIES = "_cute_sharding_copies"


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
        self.line = observing.line_of_program(sys._getframe(1))
        self.written: tuple[str, observing.Line | None] | None = None
        self.writes = own_writes(source)
        LIVE.add(weakref.ref(self, LIVE.discard))

    def outdate(self, writer: str, line: observing.Line | None) -> None:
        self.written = writer, line
        _STALE.add(weakref.ref(self, _STALE.discard))
        WatchedReads.watch()

    def check_read(self) -> None:
        """
        Raises:
            StaleView: the operand was written to after the view was taken.
        """
        if self.written is not None:
            spec, (writer, line) = self.spec, self.written
            taken_at, written_at = observing.line_text(self.line), observing.line_text(line)
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
                f"{text(tensor.placements)}, taken at {observing.line_text(self.line)}. The "
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
    local = communication.in_flight(local)
    memory = _followed_memory(local)
    if memory is None:
        return
    in_graph, view = local_tensors.is_functional(local), None
    for number, result in enumerate(moved):
        result = communication.in_flight(result)
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
    memory = _followed_memory(communication.in_flight(local))
    for view in () if memory is None else views_of(memory):
        view.check_read()
    return True


# -- memory ----------------------------------------------------------------------------------------


def views_of(memory: Any) -> Iterator[MovedView]:
    """The views from that memory back to the tensor that was viewed first."""
    while (result := getattr(memory, _RESULT, None)) is not None:
        yield result.view
        memory = local_tensors.storage_of(result.view.source)


class Copies:
    """Copies of tensors in one memory, by what tells them apart, until something writes to it, in
    whichever thread.
    """

    __slots__ = ("__weakref__", "made")

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}


def copies_of(memory: Any) -> Copies | None:
    """What is kept of a memory."""
    found: Copies | None = getattr(memory, _COPIES, None)
    return found


def keep_copies(memory: Any) -> Copies:
    """A place for copies of what lies in a memory, which ends with it."""
    found = copies_of(memory)
    if found is None:
        found = Copies()
        LIVE.add(weakref.ref(found, LIVE.discard))
        setattr(memory, _COPIES, found)
    return found


def forget_copies(memory: Any) -> None:
    """Keep nothing of a memory any more."""
    if copies_of(memory) is not None:
        delattr(memory, _COPIES)


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
    """Whether a write to a local tensor may concern views or copies. While there are any, every
    write asks this.
    """
    memory = local_tensors.memory_of(communication.in_flight(local))
    return any(hasattr(memory, name) for name in (_RESULT, _VIEWS, _COPIES))


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


# -- writes ----------------------------------------------------------------------------------------
# Writes to views of DTensors that have moved (``ops``): each reaches the tensor that was viewed, at
# once, and makes other views of it stale.


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
        name = op_schemas.name_of(op)
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
        line = observing.line_of_program(sys._getframe(1))
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
    line = observing.line_of_program(sys._getframe(1))
    for tensor in tensors:
        _record_write(_memory_of(tensor), writer, line, part_of(tensor._local_tensor))


def _record_write(
    memory: Any, writer: str, line: observing.Line | None, by: PartView | Result | None
) -> None:
    """Record a write to ``memory``, through a view of it or otherwise: the views of it that may
    have the written rows are stale. If the memory is itself a view's, the tensor that was viewed is
    written to. Copies of it are forgotten.
    """
    forget_copies(memory)
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
    return local_tensors.storage_of(communication.in_flight(tensor._local_tensor))


# -- ops -------------------------------------------------------------------------------------------
# Runs an op of rows in place of torch's local op: movements and views of the local tensors, one
# after the other.


class LocalView(NamedTuple):
    """A view under which each device keeps its elements in their order: a view of the local tensor.

    Attributes:
        to: the step's output, as a sharded tensor.
        mesh: the DeviceMesh.
    """

    to: PlacedStep
    mesh: Any
    dims: tuple[int, ...] = ()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [on_each_rank(self._viewed, x) for x in operands]

    def _viewed(self, rank: int, local: torch.Tensor) -> torch.Tensor:
        if self.to.step.row.op == "torch.permute":
            return local.permute(*self.to.step.args)
        shape, on = self.to.shape, Mesh.numbered(tuple(self.mesh.shape))
        placed = Placed(shape, on, chains_of(self.to.cuts, len(shape), on.sizes))
        return local.reshape(placed.shape_of(place(self.mesh, rank)))


class LocalStep(Protocol):
    """A function of local tensors: a :class:`Movement`, also one of any size, or a
    :class:`LocalView`.

    Attributes:
        dims: the mesh dims whose ranks exchange rows.
    """

    @property
    def dims(self) -> tuple[int, ...]: ...

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs an op, called with the op's arguments in which local tensors stand for DTensors.

    Attributes:
        name: the op's.
        specs: the operands'.
        placements: to which the operands are redistributed first.
        plan: makes the steps that run then, each on the results of the one before it. torch keeps
            a runner for as long as the program runs; its steps, which are far larger, are
            remembered while there is room (cute_sharding/_memory.py), and made again.
        metas: the results' TensorMetas; results are laid out by their strides. No list for a single
            result.
        note: for an op whose results are views, which is a single movement: called for those that
            are copies, with (runner, local tensor, its spec, results).
    """

    name: str
    specs: Sequence[DTensorSpec]
    placements: Sequence[tuple[Placement, ...]]
    plan: Callable[[], tuple[LocalStep, ...]]
    metas: TensorMeta | Sequence[TensorMeta]
    note: Callable[[Any, torch.Tensor, DTensorSpec, list[torch.Tensor]], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(_tensors_of((*args, *kwargs.values())), self.moved)

    def run(
        self,
        given: list[torch.Tensor],
        moved: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    ) -> Any:
        """Run the op on local tensors; ``moved`` makes results of the redistributed ones."""
        for spec, whole in _gathered(self):
            dispatch.observe(spec, whole, self.name)
        operands = self._brought([communication.wait_for(x) for x in given])
        step, results = self.steps[0], None
        if self.note is not None and isinstance(step, Movement):
            results = step.views(operands) if self._steps_fit else None
        if results is not None:
            note_parts(self, given[0], results)
        else:
            results = list(map(lie_in, moved(operands), self._orders))
            if self.note is not None:
                self.note(self, given[0], self.specs[0], results)
        return results[0] if isinstance(self.metas, TensorMeta) else results

    @property
    def steps(self) -> tuple[LocalStep, ...]:
        return _steps(self)

    @cached_property
    def _steps_fit(self) -> bool:
        """Whether dims of a result that a global view may merge can be merged on each device too.
        Counterexample: every other row of a cut dim, if devices have odd numbers of rows.
        """
        return not any(
            meta.shape[d] * meta.stride[d] in meta.stride
            for k, meta in enumerate(as_list(self.metas))
            for d in ends_otherwise(self.movement.exchange, k)
        )

    @property
    def movement(self) -> Any:
        """The movement, of a runner with a single step."""
        (step,) = self.steps
        return step

    @cached_property
    def _orders(self) -> list[tuple[int, ...] | None]:
        """For each result, the memory order of its dims."""
        return list(map(order_of, as_list(self.metas)))

    @cached_property
    def _targets(self) -> dict[int, DTensorSpec]:
        """By number, the specs of the operands that have to be redistributed."""
        return {
            i: DTensorSpec(spec.mesh, placements, spec.tensor_meta)
            for i, (spec, placements) in enumerate(zip(self.specs, self.placements))
            if placements != tuple(spec.placements)
        }

    def _brought(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The operands, redistributed to where the steps start."""
        if not self._targets:
            return given
        wanted = [LocalMove(given[i], self.specs[i], to) for i, to in self._targets.items()]
        moved = dict(zip(self._targets, redistribute_all(wanted, counted=False)))
        return [moved.get(i, x) for i, x in enumerate(given)]

    def moved(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results' local tensors, in memory of their own."""
        results = list(operands)
        for step in self.steps:
            if isinstance(step, Movement) and dispatch_modes.is_tracing():
                results = moved_in_graph(step, results)
            else:
                results = step(results)
        if isinstance(self.steps[-1], LocalView):  # the op is no view op: those are one movement
            results = [on_each_rank(lambda _, x, y: _in_own_memory(x, y), *results, *operands)]
        return results

    def back(self, output: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write the rows of one result, ``moved``, back to ``source``, the operand's local tensor;
        its other rows stay. All ranks together.
        """
        movement = self.movement
        if isinstance(movement, Movement) and dispatch_modes.is_tracing():
            write_back_in_graph(movement, output, moved, source)
        else:
            movement.back(output, moved, source)

    def is_apart(self, output: int, other: Any) -> bool:
        """Whether a result has no row in common with any result of ``other``, which ran on the same
        operand. False also where that is not known.
        """
        one, two = self.movement, getattr(other, "movement", None)
        if not isinstance(one, Movement) or not isinstance(two, Movement):
            return False
        moves = one.exchange.move, two.exchange.move
        return all(are_apart(moves[0], output, moves[1], k) for k in range(len(moves[1].outputs)))

    def check_back(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: an element that ``writer`` writes to has no single place in the operand:
                the result is windows, which may overlap, or the operand was expanded.
        """
        windows = any(
            isinstance(rows.form, (Window, Fold))
            for part in self.movement.exchange.move.links
            for pair in part.pairs
            for rows in pair
        )
        spec = self.specs[0]
        meta = spec.tensor_meta
        expanded = meta is not None and any(
            n > 1 and not step for n, step in zip(meta.shape, meta.stride)
        )
        if windows or expanded:
            raise RuntimeError(
                f"{writer} cannot write in place to the result of {self.name} of a DTensor of "
                f"shape {tuple(spec.shape)} with placements {text(spec.placements)}. Windows of a "
                "sharded dim, or parts of an expanded tensor, may have one element in several "
                "places. Write to a .clone() instead."
            )


@remembered
def _steps(runner: Runner) -> tuple[LocalStep, ...]:
    return runner.plan()


@remembered
def _gathered(runner: Runner) -> list[tuple[DTensorSpec, DTensorSpec]]:
    """For each operand of which rows are sent: its spec, and the one that torch would have
    redistributed it to.
    """
    dims = {m for step in runner.steps for m in step.dims}
    found = []
    for spec in runner.specs:
        whole = [Replicate() if m in dims else p for m, p in enumerate(spec.placements)]
        if tuple(whole) != tuple(spec.placements):
            found.append((spec, DTensorSpec(spec.mesh, tuple(whole), spec.tensor_meta)))
    return found


def _tensors_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among an op's arguments, also those in a list."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += [x for x in argument if isinstance(x, torch.Tensor)]
    return found


def _in_own_memory(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own: these ops are no views, though all their steps may be."""
    is_shared = (
        dispatch_modes.is_tracing()
        or local_tensors.is_imagined(x)
        or x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )
    return x.clone() if is_shared else x
