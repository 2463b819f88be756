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

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

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

# The ids of all Copies. While it is empty, no write looks for copies, which costs 1/40 of an op.
LIVE: set[int] = set()
# The ids of the CopiesOfOne of memories with a stale copy. While it is empty, no read looks for
# stale copies.
_STALE: set[int] = set()

_COPY, _COPIES = "_cute_sharding_copy", "_cute_sharding_copies"


class CopiesOfOne:
    """The copies of one memory, to which this object belongs. It keeps them no longer than their
    own memory exists.

    They are known by the ids of Copies, the copies of one op: Python may collect these at any time,
    also in the middle of any method here, or in another thread.
    """

    def __init__(self) -> None:
        # Copies of which some are up to date; and the ids of those of which some are not.
        self._fresh: dict[int, weakref.ref[Copies]] = {}
        self._stale: set[int] = set()

    def __del__(self, forget: Callable[[int], None] = _STALE.discard) -> None:
        forget(id(self))

    def add(self, copies: Copies) -> None:
        """Add copies that were just made."""
        number = id(copies)
        LIVE.add(number)
        self._fresh[number] = weakref.ref(copies)

    def alike(self, copy: Copy) -> list[Copy]:
        """The copies that are up to date and hold the same as ``copy``, if that is known. After a
        write, which calls this, only the copies that it reached are up to date: so each copy is
        looked at only once after each time that it was brought up to date.
        """
        has = copy.copies.way.has
        if has is None:
            return []
        found = (each() for each in list(self._fresh.values()))
        return [Copy(each, 0) for each in found if each is not None and each.way.has == has]

    def refreshed(self, copies: Copies) -> None:
        """Record that one more of the copies of an op is up to date."""
        self._fresh[id(copies)] = weakref.ref(copies)
        if copies.are_fresh:
            self._stale.discard(id(copies))
        self._note()

    def outdate(self, told: Iterable[Copies]) -> None:
        """Record a write to the memory. Of the copies ``told``, those that were up to date before
        still are.
        """
        have = {id(copies) for copies in told}
        for number in [each for each in list(self._fresh) if each not in have]:
            # In this order: if the copies are forgotten meanwhile, neither set has them afterwards.
            self._stale.add(number)
            known = self._fresh.pop(number, None)
            copies = None if known is None else known()
            if copies is None:
                self._stale.discard(number)
            else:
                copies.fresh.clear()
        self._note()

    def forget(self, copies: Copies) -> None:
        """Remove copies that are about to be collected."""
        number = id(copies)
        LIVE.discard(number)
        self._fresh.pop(number, None)
        if self._stale:
            self._stale.discard(number)
            if not self._stale:
                _STALE.discard(id(self))

    def _note(self) -> None:
        if self._stale:
            _STALE.add(id(self))
            Reads.watch()
        else:
            _STALE.discard(id(self))


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


class Copies:
    """The results of a view op on a DTensor's local tensor that are in other memory: several for a
    split, which have no row in common. Their memory keeps this object alive, and this object keeps
    their source alive.

    Attributes:
        way: how they were made.
        source, spec: the local tensor that was moved, and its spec.
        of: all copies of the source's memory.
        fresh: the numbers of the copies that have all writes to the source by DTensors.
    """

    __slots__ = ("__weakref__", "_lie", "_writes", "fresh", "of", "source", "spec", "way")

    def __init__(
        self,
        way: Way,
        source: torch.Tensor,
        spec: DTensorSpec,
        of: CopiesOfOne,
        lie: dict[int, Any],
    ) -> None:
        self.way, self.source, self.spec, self.of = way, source, spec, of
        self._lie, self.fresh = lie, {*lie}
        self._writes: dict[int, int | None] = dict.fromkeys(lie, count_of_writes(source))
        of.add(self)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending() and hasattr(self, "of"):
            self.of.forget(self)

    @property
    def are_fresh(self) -> bool:
        """Whether all copies that still exist are up to date."""
        return all(number in self.fresh or self.moved(number) is None for number in self._lie)

    def moved(self, number: int) -> torch.Tensor | None:
        """The whole local tensor of that copy; None if it is gone."""
        lies = self._lie[number]
        if isinstance(lies, weakref.ref):
            return lies()
        found = {}
        for rank, memory, dtype, offset, size, stride in lies:
            storage = memory()
            if storage is None:
                return None
            with dispatch_modes.no_modes():
                found[rank] = torch.empty(0, dtype=dtype, device=storage.device).set_(
                    storage, offset, size, stride
                )
        return local_tensors.local_tensor(found)

    def refresh(self, number: int) -> None:
        """Update a copy from the present source. All ranks together."""
        moved = self.moved(number)
        if moved is not None:
            with torch.no_grad():
                moved.copy_(self.way.again(number, self.source))
            outdate(local_tensors.storage_of(moved))
        self._writes[number] = count_of_writes(self.source)
        self.fresh.add(number)
        self.of.refreshed(self)

    def take_back(self, number: int, moved: torch.Tensor) -> None:
        """Update the source from a copy, whose local tensor is ``moved``. All ranks together."""
        before = count_of_writes(self.source)
        self.way.back(number, moved, self.source)
        now = count_of_writes(self.source)
        # Copies that had all other writes still do: no row of theirs was written to.
        for each, then in self._writes.items():
            if then == before:
                self._writes[each] = now

    def check(self, number: int, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: a write to a copy cannot be taken back to the source.
        """
        spec = self.spec
        is_what = (
            f"{writer} writes to a view of shape {tuple(tensor.shape)} and "
            f"placements {text(tensor.placements)} that is a copy of its source, a DTensor "
            f"of shape {tuple(spec.shape)} and placements {text(spec.placements)}"
        )
        if self._writes[number] != count_of_writes(self.source):
            raise RuntimeError(
                f"{is_what}, whose local tensor was written to after the view was taken: the view "
                "does not have that write. Take the view again, after it."
            )
        self.way.check_back(writer, tensor)


class Copy(NamedTuple):
    """One copy of those that an op has made, by its number."""

    copies: Copies
    number: int

    @property
    def is_stale(self) -> bool:
        """Whether a DTensor has written to the source since, without updating this copy."""
        return self.number not in self.copies.fresh

    def moved(self) -> torch.Tensor | None:
        """The whole local tensor of the copy; None if it is gone."""
        return self.copies.moved(self.number)


def _lying(moved: torch.Tensor) -> Any:
    """The place of a local tensor, by which it can be found while its memory exists; a tensor would
    keep the memory alive. In a graph there is no memory, so the tensor is kept while the graph is
    traced.
    """
    if type(moved) is torch.Tensor:  # almost always
        return [_place(-1, moved)]
    if local_tensors.is_functional(moved):
        dispatch_modes.keep_while_traced(moved)
        return weakref.ref(moved)
    return [_place(rank, part) for rank, part in local_tensors.parts_of(moved).items()]


def _place(rank: int, x: torch.Tensor) -> tuple[Any, ...]:
    memory = weakref.ref(x.untyped_storage())
    return rank, memory, x.dtype, x.storage_offset(), x.size(), x.stride()


class Redistributed:
    """The way of a view op whose operand ``local`` is redistributed from one spec to another first:
    it makes one copy.
    """

    def __init__(self, local: torch.Tensor, spec: DTensorSpec, wanted: DTensorSpec) -> None:
        self._spec, self._wanted = spec, wanted
        # Read now, because an in-place view may change the shape of the source later.
        parts = local_tensors.parts_of(local).values()
        self._lies = [(x.storage_offset(), x.size(), x.stride()) for x in parts]

    @cached_property
    def has(self) -> Any:
        """The place of the source and the wanted placements. Symbols are text: comparing them would
        add a guard.
        """
        sizes = local_tensors.leaves(self._lies, list(self._spec.shape))
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
    in_graph, lie, lie_in = local_tensors.is_functional(local), {}, []
    for number, result in enumerate(moved):
        if type(result) is not torch.Tensor:  # almost never
            result = collective_ops.in_flight(result)
        lies_in = memory_of(result)
        if lies_in is None or lies_in is memory:
            continue
        if in_graph and not local_tensors.is_functional(result):
            continue
        lie[number] = _lying(result)
        lie_in.append((lies_in, number))
    if lie:
        of: CopiesOfOne | None = getattr(memory, _COPIES, None)
        if of is None:
            of = CopiesOfOne()
            setattr(memory, _COPIES, of)
        copies = Copies(way, local, spec, of, lie)
        for lies_in, number in lie_in:
            setattr(lies_in, _COPY, (copies, number))


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
        memory = local_tensors.storage_of(copy.copies.source)
    return found


def copy_in(memory: Any) -> Copy | None:
    """The copy in that memory, if there is one."""
    found = getattr(memory, _COPY, None)
    return None if found is None else Copy(*found)


def may_be_told(local: torch.Tensor) -> bool:
    """Whether a write to a local tensor may concern copies. While there are copies of any tensor,
    every write calls it.
    """
    if type(local) is not torch.Tensor or local.layout is not torch.strided:
        return memory_of(local) is not None
    memory = local.untyped_storage()
    return hasattr(memory, _COPY) or hasattr(memory, _COPIES)


def outdate(memory: Any, by: Copy | None = None) -> None:
    """Record a write to this memory: its copies are stale, except ``by``, from which it was
    written, and those that can be updated from ``by``.
    """
    copies: CopiesOfOne | None = getattr(memory, _COPIES, None)
    if copies is None:
        return
    has = None if by is None else by.moved()
    told = [] if by is None else [by.copies]
    for copy in () if by is None or has is None else copies.alike(by):
        moved = copy.moved()
        if has is not None and copy.copies is not told[0] and moved is not None:
            moved.copy_(has)
            told.append(copy.copies)
            outdate(local_tensors.storage_of(moved))
    copies.outdate(told)


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
            spec = copy.copies.spec
            raise RuntimeError(
                "to_local() of a view that is a copy of its source, a DTensor of shape "
                f"{tuple(spec.shape)} with placements {text(spec.placements)} that was written to "
                "since: the written rows are on other devices, and to_local() does not "
                "communicate. Take the view again, after that write; or read it on all ranks, by "
                "full_tensor() or by any op, such as .clone()."
            )
        if copy.is_stale:
            copy.copies.refresh(copy.number)
    return bool(_STALE)
