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
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

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

    They are known by number: copies go whenever Python collects them, also in the middle of any of
    this, or in another thread.
    """

    def __init__(self) -> None:
        # Those that have all that was written to the memory, and those that have not.
        self._fresh: dict[int, weakref.ref[Copy]] = {}
        self._stale: set[int] = set()

    def __del__(self, forget: Callable[[int], None] = _STALE.discard) -> None:
        forget(id(self))

    def add(self, copy: Copy) -> None:
        """Know of a copy that was just made."""
        number = id(copy)
        LIVE.add(number)
        self._fresh[number] = weakref.ref(copy)

    def alike(self, copy: Copy) -> list[Copy]:
        """The copies that have all that was written, and have what that one has, if it is known. A
        write asks, after which only those that it reached have all: so however many copies and
        writes there are, each copy is looked at once for each time that it was brought up to date.
        """
        if copy.has is None:
            return []
        found = (each() for each in list(self._fresh.values()))
        return [each for each in found if each is not None and each.has == copy.has]

    def is_fresh(self, copy: Copy) -> bool:
        """Whether nothing was written to the memory that the copy has not got."""
        return id(copy) in self._fresh

    def refreshed(self, copy: Copy) -> None:
        """The copy has what the memory has."""
        self._fresh[id(copy)] = weakref.ref(copy)
        self._stale.discard(id(copy))
        self._note()

    def outdate(self, told: Iterable[Copy]) -> None:
        """Something was written to the memory. The copies ``told`` have it, if they had what was
        there before.
        """
        have = {id(copy) for copy in told}
        for number in [each for each in list(self._fresh) if each not in have]:
            # In this order: where the copy is forgotten meanwhile, it is in neither afterwards.
            self._stale.add(number)
            if self._fresh.pop(number, None) is None:
                self._stale.discard(number)
        self._note()

    def forget(self, copy: Copy) -> None:
        """The copy is about to be gone."""
        number = id(copy)
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


class Source(NamedTuple):
    """What views were moved from by one op, as it was then.

    Attributes:
        local, spec: the local tensor, and its spec.
        writes: how often it was written to (:func:`count_of_writes`).
        copies: those of its memory.
    """

    local: torch.Tensor
    spec: DTensorSpec
    writes: int | None
    copies: CopiesOfOne


class Copy:
    """What a view op was given instead of the local tensor of a DTensor. It belongs to the memory
    of what was moved, and is gone with it; what it was moved from stays till then.

    Attributes:
        source, spec: the local tensor that was moved, and its spec.
        has: what it has of the memory of the source: copies that have the same, and are up to date,
            are equal. None: it is not known to be what another has.
        of: it, and the other copies of that memory.
    """

    has: Any = None

    def __init__(self, source: Source, moved: torch.Tensor) -> None:
        self.source, self.spec, self._writes, self.of = source
        # Where it lies, but not the tensor itself, whose memory would then be for ever. In a graph
        # there is no memory, and the tensor is kept while that is traced.
        self._in_graph = weakref.ref(moved) if local_tensors.is_functional(moved) else None
        if self._in_graph is not None:
            dispatch_modes.keep_while_traced(moved)
        self._parts = [
            (
                rank,
                weakref.ref(part.untyped_storage()),
                part.dtype,
                part.storage_offset(),
                part.size(),
                part.stride(),
            )
            for rank, part in local_tensors.parts_of(moved).items()
        ]
        self.of.add(self)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending() and hasattr(self, "of"):
            self.of.forget(self)

    @property
    def is_stale(self) -> bool:
        """Whether a DTensor wrote to the source since, and could not tell this."""
        return not self.of.is_fresh(self)

    def moved(self) -> torch.Tensor | None:
        """The local tensor that it was moved to, whole; None where it is gone."""
        if self._in_graph is not None:
            return self._in_graph()
        found = {}
        for rank, memory, dtype, offset, size, stride in self._parts:
            storage = memory()
            if storage is None:
                return None
            with dispatch_modes.no_modes():
                found[rank] = torch.empty(0, dtype=dtype, device=storage.device).set_(
                    storage, offset, size, stride
                )
        return local_tensors.local_tensor(found)

    def moved_again(self) -> torch.Tensor:
        """What the source now has, moved as it was."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Have the copy be what the source now is. All ranks together."""
        moved = self.moved()
        if moved is not None:
            with torch.no_grad():
                moved.copy_(self.moved_again())
            outdate(local_tensors.storage_of(moved))
        self._writes = count_of_writes(self.source)
        self.of.refreshed(self)

    def take_back(self, moved: torch.Tensor) -> None:
        """Have the source be what the copy, which lies in ``moved``, now is. All ranks together."""
        raise NotImplementedError

    def has_taken_back(self) -> None:
        """The copy has what the source now has: what was written to it was just taken there."""
        self._writes = count_of_writes(self.source)

    def check(self, writer: str, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: what is written to the copy cannot be taken to the source.
        """
        spec = self.spec
        is_what = (
            f"{writer} writes to a view of shape {tuple(tensor.shape)} and "
            f"placements {text(tensor.placements)} that is a copy of its source, a DTensor "
            f"of shape {tuple(spec.shape)} and placements {text(spec.placements)}"
        )
        if self._writes != count_of_writes(self.source):
            raise RuntimeError(
                f"{is_what}, whose local tensor was written to after the view was taken: the view "
                "does not have that write. Take the view again, after it."
            )


class RedistributedCopy(Copy):
    """What a view op was given whose operand was redistributed first.

    Attributes:
        spec_of_moved: what it was moved to.
    """

    def __init__(
        self, spec_of_moved: DTensorSpec, output: int, source: Source, moved: torch.Tensor
    ) -> None:
        super().__init__(source, moved)
        self.spec_of_moved = spec_of_moved
        # Now: what the source is viewed as in place may change.
        parts = local_tensors.parts_of(source.local).values()
        self._lies = [(x.storage_offset(), x.size(), x.stride()) for x in parts]

    @cached_property
    def has(self) -> Any:
        """The same elements moved to the same placements. Symbols stand as text: to compare them
        would be a guard.
        """
        sizes = local_tensors.leaves(self._lies, list(self.spec.shape))
        return [*map(symints.size_text, sizes), *map(repr, self.spec_of_moved.placements)]

    def moved_again(self) -> torch.Tensor:
        return redistribute_local_tensor(self.source, self.spec, self.spec_of_moved, counted=False)

    def take_back(self, moved: torch.Tensor) -> None:
        self.source.copy_(
            redistribute_local_tensor(moved, self.spec_of_moved, self.spec, counted=False)
        )


def note_copies(
    local: torch.Tensor,
    spec: DTensorSpec,
    moved: Sequence[torch.Tensor],
    copy_of: Callable[[int, Source, torch.Tensor], Copy],
) -> None:
    """Take note of a view op that has moved the local tensor ``local`` of that spec: of those that
    it has become, the ones in other memory are copies, each ``copy_of(its number, source, it)``.
    """
    local = collective_ops.in_flight(local)
    memory = memory_of(local) if is_followed(local) else None
    if memory is None:
        return
    source = None
    for k, result in enumerate(moved):
        result = collective_ops.in_flight(result)
        lies_in = memory_of(result)
        if lies_in is None or lies_in is memory:
            continue
        if local_tensors.is_functional(local) and not local_tensors.is_functional(result):
            continue
        if source is None:
            copies: CopiesOfOne | None = getattr(memory, _COPIES, None)
            if copies is None:
                copies = CopiesOfOne()
                setattr(memory, _COPIES, copies)
            source = Source(local, spec, count_of_writes(local), copies)
        setattr(lies_in, _COPY, copy_of(k, source, result))


def note_copy(
    local: torch.Tensor, spec: DTensorSpec, spec_of_moved: DTensorSpec, moved: torch.Tensor
) -> None:
    """Take note of a view that moves data: the local tensor ``local`` has become ``moved``."""
    note_copies(local, spec, [moved], partial(RedistributedCopy, spec_of_moved))


def way_back(memory: Any) -> list[Copy]:
    """The copies on the way from that memory to the tensor that was moved first."""
    found = []
    while (copy := getattr(memory, _COPY, None)) is not None:
        found.append(copy)
        memory = local_tensors.storage_of(copy.source)
    return found


def copy_in(memory: Any) -> Copy | None:
    """The copy that lies there, if one does."""
    return getattr(memory, _COPY, None)


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
    told = [] if by is None else [by]
    for copy in () if by is None or has is None else copies.alike(by):
        moved = copy.moved()
        if has is not None and copy is not by and moved is not None:
            moved.copy_(has)
            told.append(copy)
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
            spec = copy.spec
            raise RuntimeError(
                "to_local() of a view that is a copy of its source, a DTensor of shape "
                f"{tuple(spec.shape)} with placements {text(spec.placements)} that was written to "
                "since: the written rows are on other devices, and to_local() does not "
                "communicate. Take the view again, after that write; or read it on all ranks, by "
                "full_tensor() or by any op, such as .clone()."
            )
        if copy.is_stale:
            copy.refresh()
    return bool(_STALE)


# -- memory ----------------------------------------------------------------------------------------


def count_of_writes(local: torch.Tensor) -> int | None:
    """How often a plain tensor was written to, or its views; None where torch does not count.
    (DTensor's own writes it does not count there.)
    """
    if type(local) is not torch.Tensor and (
        isinstance(local, local_tensors.LocalTensor) or local_tensors.is_functional(local)
    ):
        return None
    return None if local.is_inference() else local._version


def is_followed(local: torch.Tensor) -> bool:
    """Whether what is done with the local tensor is done now, or becomes part of a graph. (Before
    AOTAutograd does, dynamo traces a program, with tensors that have no data.)
    """
    return not dispatch_modes.is_tracing() or local_tensors.is_functional(local)


def memory_of(local: torch.Tensor) -> torch.UntypedStorage | None:
    """What the local tensor lies in as strides say; None on meta, sparse, or wrapped in another."""
    if type(local) is torch.Tensor:  # by far the most
        return None if local.is_meta or local.layout is not _STRIDED else local.untyped_storage()
    if (
        local_tensors.is_imagined(local)
        or local_tensors.is_wrapper(local)
        or local.layout is not _STRIDED
    ):
        return None
    return local_tensors.storage_of(local)


_STRIDED = torch.strided
