"""Copies of DTensors that are views on plain tensors: what they were moved from, and whether they
still have what that has.

A slice of a sharded dim, or a view that redistributes, gives a DTensor that is a view by what
autograd says and a copy by where its elements lie. So each memory that a view was moved to says
where it was moved from, for as long as there is that memory, and how to bring back what is written
to it (:meth:`Copy.take_back`) and up to date what is read of it (:meth:`Copy.refresh`).

A copy whose source was written to is *stale*, and so is what is a copy of that one. A write keeps
of the copies that are up to date only those that it reached: it costs the same however many there
are. A copy is brought up to date when a DTensor that lies
there is next read, by an op, a redistribution or a compiled program: all ranks run these in one
order, so the exchanges meet. To do it at once would not do: who still holds which copies, ranks do
not know of one another. ``to_local()`` is no such meeting, as one rank may ask alone: it raises.
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

# The copies that there are. Where there are none, no write asks: to ask costs a fortieth of the op.
LIVE: set[int] = set()
# The memories of which some copy is stale, by what knows of their copies. Where there are none, no
# read asks.
_STALE: set[int] = set()

_COPY, _COPIES = "_cute_sharding_copy", "_cute_sharding_copies"


class CopiesOfOne:
    """The copies of what lies in one memory, to which it belongs; they are kept no longer than what
    lies in them.

    They are known by the number of those that one op has made: copies go whenever Python collects
    them, also in the middle of any of this, or in another thread.
    """

    def __init__(self) -> None:
        # Those of which some have all that was written to the memory, and of which some have not.
        self._fresh: dict[int, weakref.ref[Copies]] = {}
        self._stale: set[int] = set()

    def __del__(self, forget: Callable[[int], None] = _STALE.discard) -> None:
        forget(id(self))

    def add(self, copies: Copies) -> None:
        """Know of copies that were just made."""
        number = id(copies)
        LIVE.add(number)
        self._fresh[number] = weakref.ref(copies)

    def alike(self, copy: Copy) -> list[Copy]:
        """The copies that have all that was written, and have what that one has, if it is known. A
        write asks, after which only those that it reached have all: so however many copies and
        writes there are, each copy is looked at once for each time that it was brought up to date.
        """
        has = copy.copies.way.has
        if has is None:
            return []
        found = (each() for each in list(self._fresh.values()))
        return [Copy(each, 0) for each in found if each is not None and each.way.has == has]

    def refreshed(self, copies: Copies) -> None:
        """One more of the copies of an op has what the memory has."""
        self._fresh[id(copies)] = weakref.ref(copies)
        if copies.are_fresh:
            self._stale.discard(id(copies))
        self._note()

    def outdate(self, told: Iterable[Copies]) -> None:
        """Something was written to the memory. Of the copies ``told`` those have it that had what
        was there before.
        """
        have = {id(copies) for copies in told}
        for number in [each for each in list(self._fresh) if each not in have]:
            # In this order: where the copies are forgotten meanwhile, they are in neither after.
            self._stale.add(number)
            known = self._fresh.pop(number, None)
            copies = None if known is None else known()
            if copies is None:
                self._stale.discard(number)
            else:
                copies.fresh.clear()
        self._note()

    def forget(self, copies: Copies) -> None:
        """The copies are about to be gone."""
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
        has: what the one result has of the tensor: results that have the same are equal. None: it
            is not known to be what another has.
    """

    @property
    def has(self) -> Any: ...

    def again(self, number: int, source: torch.Tensor) -> torch.Tensor:
        """One of the results, of what the local tensor ``source`` now has."""

    def back(self, number: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        """Write to ``source`` what one of the results has of it. All ranks together."""

    def check_back(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: what is written to a result cannot be taken back.
        """


class Copies:
    """What a view op has made in other memory of the local tensor of a DTensor: several, where it
    is a split, of which no two have a row in common. They belong to the memory in which they lie,
    and are gone with it; what they were moved from stays till then.

    Attributes:
        way: how they were made.
        source, spec: the local tensor that was moved, and its spec.
        of: these, and the other copies of its memory.
        fresh: the numbers of those that have all that DTensors wrote to the source.
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
        """Whether all that are still there have what the source has."""
        return all(number in self.fresh or self.moved(number) is None for number in self._lie)

    def moved(self, number: int) -> torch.Tensor | None:
        """The local tensor that is that copy, whole; None where it is gone."""
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
        """Have a copy be what the source now is. All ranks together."""
        moved = self.moved(number)
        if moved is not None:
            with torch.no_grad():
                moved.copy_(self.way.again(number, self.source))
            outdate(local_tensors.storage_of(moved))
        self._writes[number] = count_of_writes(self.source)
        self.fresh.add(number)
        self.of.refreshed(self)

    def take_back(self, number: int, moved: torch.Tensor) -> None:
        """Have the source be what a copy, which lies in ``moved``, now is. All ranks together."""
        before = count_of_writes(self.source)
        self.way.back(number, moved, self.source)
        now = count_of_writes(self.source)
        # Those that had all else still do: no row of theirs was written to.
        for each, then in self._writes.items():
            if then == before:
                self._writes[each] = now

    def check(self, number: int, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: what is written to a copy cannot be taken to the source.
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
    """One of the copies that an op has made, by its number."""

    copies: Copies
    number: int

    @property
    def is_stale(self) -> bool:
        """Whether a DTensor wrote to the source since, and could not tell this."""
        return self.number not in self.copies.fresh

    def moved(self) -> torch.Tensor | None:
        """The local tensor that it is, whole; None where it is gone."""
        return self.copies.moved(self.number)


def _lying(moved: torch.Tensor) -> Any:
    """Where a local tensor lies, by which it is found as long as there is the memory, and not kept:
    a tensor would keep that for ever. In a graph there is no memory, and the tensor is kept while
    that is traced.
    """
    if type(moved) is torch.Tensor:  # by far the most
        return [_place(-1, moved)]
    if local_tensors.is_functional(moved):
        dispatch_modes.keep_while_traced(moved)
        return weakref.ref(moved)
    return [_place(rank, part) for rank, part in local_tensors.parts_of(moved).items()]


def _place(rank: int, x: torch.Tensor) -> tuple[Any, ...]:
    memory = weakref.ref(x.untyped_storage())
    return rank, memory, x.dtype, x.storage_offset(), x.size(), x.stride()


class Redistributed:
    """The way of a view op whose operand ``local`` is redistributed first, from a spec to another:
    it makes one copy.
    """

    def __init__(self, local: torch.Tensor, spec: DTensorSpec, wanted: DTensorSpec) -> None:
        self._spec, self._wanted = spec, wanted
        # Now: what the source is viewed as in place may change.
        parts = local_tensors.parts_of(local).values()
        self._lies = [(x.storage_offset(), x.size(), x.stride()) for x in parts]

    @cached_property
    def has(self) -> Any:
        """The same elements moved to the same placements. Symbols stand as text: to compare them
        would be a guard.
        """
        sizes = local_tensors.leaves(self._lies, list(self._spec.shape))
        return [*map(symints.size_text, sizes), *map(repr, self._wanted.placements)]

    def again(self, number: int, source: torch.Tensor) -> torch.Tensor:
        return redistribute_local_tensor(source, self._spec, self._wanted, counted=False)

    def back(self, number: int, moved: torch.Tensor, source: torch.Tensor) -> None:
        source.copy_(redistribute_local_tensor(moved, self._wanted, self._spec, counted=False))

    def check_back(self, writer: str, tensor: Any) -> None:
        """There is always a way back."""


def note_copies(
    way: Way, local: torch.Tensor, spec: DTensorSpec, moved: Sequence[torch.Tensor]
) -> None:
    """Take note of a view op that has moved the local tensor ``local`` of that spec, on that way:
    of those that it has become, the ones in other memory are copies.
    """
    local = collective_ops.in_flight(local)
    memory = memory_of(local) if is_followed(local) else None
    if memory is None:
        return
    in_graph, lie, lie_in = local_tensors.is_functional(local), {}, []
    for number, result in enumerate(moved):
        if type(result) is not torch.Tensor:  # by far the most are
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
    """Take note of a view that moves data: the local tensor ``local`` has become ``moved``."""
    way = Redistributed(collective_ops.in_flight(local), spec, spec_of_moved)
    note_copies(way, local, spec, [moved])


def way_back(memory: Any) -> list[Copy]:
    """The copies on the way from that memory to the tensor that was moved first."""
    found = []
    while (copy := copy_in(memory)) is not None:
        found.append(copy)
        memory = local_tensors.storage_of(copy.copies.source)
    return found


def copy_in(memory: Any) -> Copy | None:
    """The copy that lies there, if one does."""
    found = getattr(memory, _COPY, None)
    return None if found is None else Copy(*found)


def may_be_told(local: torch.Tensor) -> bool:
    """Whether anything may be to be done when a local tensor is written to. Where there are copies
    of others, every write asks.
    """
    if type(local) is not torch.Tensor or local.layout is not torch.strided:
        return memory_of(local) is not None
    memory = local.untyped_storage()
    return hasattr(memory, _COPY) or hasattr(memory, _COPIES)


def outdate(memory: Any, by: Copy | None = None) -> None:
    """The copies of what lies there have not what was written to it, but for ``by``, and those that
    can be told what that one has.
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
    """Bring a local tensor that is about to be read up to date, where it lies in a stale copy.

    Args:
        alone: whether this rank may be the only one that reads.

    Returns:
        whether there may be stale copies still.

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
        return True  # by far the most reads, which this costs a fiftieth of the op
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
