"""Copies of DTensors that would be views of plain tensors: what they were moved from, and whether
they still equal it.

A slice of a sharded dim, or a view that redistributes, gives a DTensor that is a view to autograd
and a copy in memory. So the memory of such a copy has an attribute that says what it was moved
from, as long as the memory exists; how to take a write to it back to the source
(:meth:`Copy.take_back`); and how to bring it up to date when it is read (:meth:`Copy.refresh`).

A copy whose source was written to is *stale*, and so are copies of it. A write keeps as up to date
only the copies that it reached: its cost does not depend on their number. A copy is brought up to
date when a DTensor in its memory is next read, by an op, a redistribution or a compiled program:
all ranks run these in one order, so the exchanges meet. At the write this would be impossible,
because ranks do not know which copies other ranks still hold. ``to_local()`` is no such read, since
one rank may call it alone: it raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from cute_sharding.dtensor.extras.memory import count_of_writes, is_followed, memory_of
from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch_modes,
    local_tensors,
    symints,
)
from cute_sharding.dtensor.replaced.read_hook import Reads
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor

# Weak references to copies. Each removes itself from its sets when Python collects the copy, which
# may happen at any point of this code, or in another thread.
Known: TypeAlias = "set[weakref.ref[Copy]]"

# All copies. If there are none, writes skip the check, which costs a fortieth of the op.
LIVE: Known = set()
# The stale copies. If there are none, reads skip the check.
_STALE: Known = set()

# Attributes of a memory: the copy that lies in it; and, on the memory of a source, those of its
# copies that are up to date.
_COPY, _FRESH = "_cute_sharding_copy", "_cute_sharding_copies"


class Way(Protocol):
    """How a view op has moved a tensor: the runner of a movement op, or a redistribution.

    Attributes:
        has: a key for the elements of the single result: results with equal keys are equal. None:
            it is not known which results are equal.
    """

    @property
    def has(self) -> Any: ...

    def again(self, number: int, source: torch.Tensor) -> torch.Tensor:
        """A result, made anew from the present local tensor ``source``."""

    def back(self, number: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write a result's elements back to ``source``. All ranks together."""

    def check_back(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: a write to a result cannot be taken back.
        """


class Copy:
    """A result of a view op in other memory than the local tensor of the viewed DTensor. It is an
    attribute of its own memory and lives as long; it keeps its source alive.

    Attributes:
        way, number: how it was made, and the position of the result.
        source, spec: the local tensor that was moved, and its spec.
        op: the call that made it. Results of one call have no row in common.
        writes: how often the source had been written to when the copy was last up to date.
    """

    __slots__ = (
        "__weakref__",
        "_fresh",
        "_lies",
        "number",
        "op",
        "source",
        "spec",
        "way",
        "writes",
    )

    def __init__(
        self,
        way: Way,
        number: int,
        source: torch.Tensor,
        spec: DTensorSpec,
        op: object,
        fresh: Known,
        lies: Any,
    ) -> None:
        self.way, self.number, self.source, self.spec = way, number, source, spec
        self.op, self._fresh, self._lies = op, fresh, lies
        self.writes = count_of_writes(source)
        LIVE.add(weakref.ref(self, LIVE.discard))
        fresh.add(weakref.ref(self, fresh.discard))

    @property
    def is_stale(self) -> bool:
        """Whether a DTensor has written to the source and the write has not reached this copy."""
        return weakref.ref(self) in _STALE

    def moved(self) -> torch.Tensor | None:
        """The copy as a whole local tensor; None if its memory is gone."""
        if isinstance(self._lies, weakref.ref):
            return self._lies()
        found = {}
        for rank, memory, dtype, offset, size, stride in self._lies:
            storage = memory()
            if storage is None:
                return None
            with dispatch_modes.no_modes():
                found[rank] = torch.empty(0, dtype=dtype, device=storage.device).set_(
                    storage, offset, size, stride
                )
        return local_tensors.local_tensor(found)

    def refresh(self) -> None:
        """Bring the copy up to date with its source. All ranks together."""
        moved = self.moved()
        if moved is not None:
            with torch.no_grad():
                moved.copy_(self.way.again(self.number, self.source))
            outdate(local_tensors.storage_of(moved))
        self.writes = count_of_writes(self.source)
        self._fresh.add(weakref.ref(self, self._fresh.discard))
        _STALE.discard(weakref.ref(self))

    def take_back(self, moved: torch.Tensor) -> None:
        """Write the copy's elements, in ``moved``, back to the source. All ranks together."""
        before = count_of_writes(self.source)
        self.way.back(self.number, moved, self.source)
        now = count_of_writes(self.source)
        # Other results of the op stay up to date if they were: none of their rows was written to.
        for each in _living(self._fresh):
            if each.op is self.op and each.writes == before:
                each.writes = now

    def check(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: a write to the copy cannot be taken back to the source.
        """
        spec = self.spec
        is_what = (
            f"{writer} writes to a view of shape {tuple(tensor.shape)} and "
            f"placements {text(tensor.placements)}. The view has copies of the rows of a DTensor "
            f"of shape {tuple(spec.shape)} and placements {text(spec.placements)}"
        )
        if self.writes != count_of_writes(self.source):
            raise RuntimeError(
                f"{is_what}. After the view was taken, the program wrote to the local tensor of "
                "this DTensor, and the view does not have the written values. Take the view again."
            )
        self.way.check_back(writer, tensor)

    def alike(self) -> list[Copy]:
        """The other copies of the source that are up to date and known to equal this one. After a
        write only the copies that it reached are up to date. So each copy is examined once for each
        time that it was brought up to date, however many copies and writes there are.
        """
        has = self.way.has
        if has is None:
            return []
        return [each for each in _living(self._fresh) if each is not self and each.way.has == has]


def _living(copies: Known) -> list[Copy]:
    found = [each() for each in list(copies)]
    return [each for each in found if each is not None]


def _lying(moved: torch.Tensor, memory: Any) -> Any:
    """The place of a local tensor, which finds the tensor while its memory exists and does not keep
    it alive; a reference to the tensor would. A tensor in a graph has no memory: it is kept while
    the graph is traced.
    """
    if type(moved) is torch.Tensor:  # by far the most
        return [_place(-1, moved, memory)]
    if local_tensors.is_functional(moved):
        dispatch_modes.keep_while_traced(moved)
        return weakref.ref(moved)
    parts = local_tensors.parts_of(moved).items()
    return [_place(rank, part, part.untyped_storage()) for rank, part in parts]


def _place(rank: int, x: torch.Tensor, memory: Any) -> tuple[Any, ...]:
    return rank, weakref.ref(memory), x.dtype, x.storage_offset(), x.size(), x.stride()


class Redistributed:
    """The :class:`Way` of a view op that first redistributes its operand ``local`` from one spec to
    another: it makes one copy.
    """

    def __init__(self, local: torch.Tensor, spec: DTensorSpec, wanted: DTensorSpec) -> None:
        self._local, self._spec, self._wanted = local, spec, wanted

    @cached_property
    def has(self) -> Any:
        """The place of the source and the wanted placements. Symbols are text: comparing them would
        add a guard.
        """
        parts = local_tensors.parts_of(self._local).values()
        lies = [(x.storage_offset(), x.size(), x.stride()) for x in parts]
        sizes = local_tensors.leaves(lies, list(self._spec.shape))
        return [*map(symints.size_text, sizes), *map(repr, self._wanted.placements)]

    def again(self, number: int, source: torch.Tensor) -> torch.Tensor:
        return redistribute_local_tensor(source, self._spec, self._wanted, counted=False)

    def back(self, number: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        source.copy_(redistribute_local_tensor(moved, self._wanted, self._spec, counted=False))

    def check_back(self, writer: str, tensor: Any) -> None:
        """Do nothing: there is always a way back."""


def note_copies(
    way: Way, local: torch.Tensor, spec: DTensorSpec, moved: Sequence[torch.Tensor]
) -> None:
    """Record a view op that has moved the local tensor ``local`` with that spec: those of its
    results ``moved`` that are in other memory are copies.
    """
    local = collective_ops.in_flight(local)
    memory = memory_of(local) if is_followed(local) else None
    if memory is None:
        return
    in_graph, op = local_tensors.is_functional(local), object()
    for number, result in enumerate(moved):
        if type(result) is not torch.Tensor:  # almost never
            result = collective_ops.in_flight(result)
        lies_in = memory_of(result)
        if lies_in is None or lies_in is memory:
            continue
        if in_graph and not local_tensors.is_functional(result):
            continue
        fresh = getattr(memory, _FRESH, None)
        if fresh is None:
            fresh = set()
            setattr(memory, _FRESH, fresh)
        copy = Copy(way, number, local, spec, op, fresh, _lying(result, lies_in))
        setattr(lies_in, _COPY, copy)


def note_copy(
    local: torch.Tensor, spec: DTensorSpec, spec_of_moved: DTensorSpec, moved: torch.Tensor
) -> None:
    """Record a view that redistributes: the local tensor ``local`` has become ``moved``."""
    way = Redistributed(collective_ops.in_flight(local), spec, spec_of_moved)
    note_copies(way, local, spec, [moved])


def way_back(memory: Any) -> list[Copy]:
    """The chain of copies from that memory back to the tensor that was moved first."""
    found = []
    while (copy := copy_in(memory)) is not None:
        found.append(copy)
        memory = local_tensors.storage_of(copy.source)
    return found


def copy_in(memory: Any) -> Copy | None:
    """The copy that lies there, if one does."""
    return getattr(memory, _COPY, None)


def may_be_told(local: torch.Tensor) -> bool:
    """Whether a write to a local tensor may concern copies. While there are copies of any tensor,
    every write calls it.
    """
    if type(local) is not torch.Tensor or local.layout is not torch.strided:
        return memory_of(local) is not None
    memory = local.untyped_storage()
    return hasattr(memory, _COPY) or hasattr(memory, _FRESH)


def outdate(memory: Any, by: Copy | None = None) -> None:
    """Mark the copies of the tensor in this memory as stale after a write to it. Not stale are
    ``by``, the other results of its op, and copies equal to ``by``, which get its elements.
    """
    fresh: Known | None = getattr(memory, _FRESH, None)
    if fresh is None:
        return
    has, told = (None, set[int]()) if by is None else (by.moved(), {id(by.op)})
    if by is not None and has is not None:
        for copy in by.alike():
            moved = copy.moved()
            if moved is not None:
                moved.copy_(has)
                told.add(id(copy.op))
                outdate(local_tensors.storage_of(moved))
    for copy in _living(fresh):
        if id(copy.op) not in told:
            # Add before discarding: at any time the copy is in one of the sets.
            _STALE.add(weakref.ref(copy, _STALE.discard))
            fresh.discard(weakref.ref(copy))
            Reads.watch()


# -- reads -----------------------------------------------------------------------------------------


def has_stale() -> bool:
    """Whether there are stale copies."""
    return bool(_STALE)


def before_read(local: torch.Tensor, alone: bool) -> bool:
    """Bring a local tensor that is about to be read up to date, if it is in a stale copy.

    Args:
        alone: whether this rank may be the only one that reads.

    Returns:
        whether there may still be stale copies.

    Raises:
        RuntimeError: it is stale, and ``alone``.
    """
    if not _STALE:
        return False
    if (
        type(local) is torch.Tensor
        and local.layout is torch.strided
        and copy_in(local.untyped_storage()) is None
    ):
        return True  # almost always; this costs 1/50 of an op
    local = collective_ops.in_flight(local)
    if not is_followed(local) or memory_of(local) is None:
        return True
    for copy in reversed(way_back(local_tensors.storage_of(local))):
        if copy.is_stale and alone:
            spec = copy.spec
            raise RuntimeError(
                f"to_local() cannot update a view of a DTensor of shape {tuple(spec.shape)} with "
                f"placements {text(spec.placements)}. The program wrote to the DTensor after the "
                "program took the view. The written rows are on other devices, "
                "and to_local() does not communicate. Take the view again, or call full_tensor() "
                "or clone() of the view on all ranks."
            )
        if copy.is_stale:
            copy.refresh()
    return bool(_STALE)
