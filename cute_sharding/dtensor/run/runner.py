"""Runs a plan of many tensors on this rank: bucket by bucket what it has is packed, sent and
unpacked; the next bucket is packed and sent before, where the plan says so.

A result is handed over when all of it is there, and what it was made of is let go then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NoReturn, TypeAlias

import torch

from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, Received, count_moves
from cute_sharding.dtensor.replaced import communication, dispatch_modes, observing
from cute_sharding.dtensor.run.across_meshes import on_which_group
from cute_sharding.dtensor.run.bundles import Shipment
from cute_sharding.dtensor.run.groups import on_each_rank
from cute_sharding.dtensor.run.packing import Letter, own_view, post_messages, write
from cute_sharding.dtensor.run.specs import dtype_of
from cute_sharding.exchange import Bundle, BundlePart
from cute_sharding.exchange.bundle import Single
from cute_sharding.models.plan import Member, PackedPlan

# Is handed a result, by its number in the plan, when all of it is there.
Arrived: TypeAlias = "Callable[[int, torch.Tensor], Any]"
# Waits for what this rank is sent of a bucket, and hands over what is whole with it.
Land: TypeAlias = "Callable[[Arrived], None]"


@dataclass(frozen=True, eq=False)
class PlanRunner:
    """A plan on ranks that have process groups. It keeps what each of them does: a plan that runs
    again does not plan again.

    Attributes:
        plan: the plan.
        meshes: of each of its members, the mesh from which and the mesh to which it goes (or what
            else says a kind of device).
        group: a process group on which all is exchanged, all of whose ranks take part; None: that
            of the ranks of a bucket's meshes, or messages from rank to rank.
        refuse: called for the number of a bucket if its messages are of another plan; None: they
            are not (:class:`~.bundles.Shipment`).
        shares: whether a result may be a view of what it is made of.
        keeps: whether memory for messages stays, on the CPU: what the C library frees of large
            pieces goes back to the system, which clears every page of the next ones as it is first
            written. That takes longer than to pack a message, or to send it within a machine.
            Accelerators' allocators keep what is freed by themselves.
    """

    plan: PackedPlan
    meshes: Sequence[tuple[Any, Any]]
    group: Any | None = None
    refuse: Callable[[int], NoReturn] | None = None
    shares: bool = False
    keeps: bool = False

    def move(
        self,
        give: Callable[[int], torch.Tensor],
        into: dict[int, torch.Tensor],
        arrived: Arrived,
    ) -> None:
        """Make all results that are packed.

        Args:
            give: what this rank sends of an operand, by its number; asked once in each bucket.
            into: results that are written to; others are made.
            arrived: is handed each result; without elements on a rank outside of its mesh.
        """
        made = dict(into)
        self.run(lambda number: Flight(self, number, give, made).land, arrived)

    def run(self, send: Callable[[int], Land], arrived: Arrived) -> None:
        """:meth:`move`, with buckets that are packed and sent by ``send``, by their numbers."""
        every = range(len(self.plan.packed))
        mine = [number for number in every if self._is_mine(number)]
        waiting: list[Land] = []

        def land() -> None:
            waiting.pop(0)(arrived)
            if self.plan.memory_limit is not None:
                _trim_memory()

        with torch.no_grad():
            for number in sorted({*every} - {*mine}):
                for k, member in enumerate(self.members(number)):
                    for result in self.finished_by(number, k, member):
                        arrived(result, self.made(result, self.device(number)))
            for number in mine:
                if waiting and not self.plan.packed[number].follows_at_once:
                    land()
                waiting.append(send(number))
                if len(waiting) > 1:
                    land()
            if waiting:
                land()
        if mine:
            count_moves(self._kind)

    def free(self) -> None:
        """Let go of the memory that is kept."""
        self._memory.clear()

    @cached_property
    def _kind(self) -> Kind:
        return Kind(partial(_moved_by, self.plan))

    # -- a bucket, by its number -------------------------------------------------------------------

    def members(self, number: int) -> list[Member]:
        """What goes together in it."""
        return [self.plan.members[i] for i in self.plan.packed[number].members]

    def bundle(self, number: int) -> Bundle:
        """What goes where."""
        return self.plan.packed[number].bundle

    def _is_mine(self, number: int) -> bool:
        """Whether this rank takes part in it."""
        return (
            self.group is not None
            or dispatch_modes.local_tensor_mode() is not None
            or communication.this_rank() in self.bundle(number)
        )

    def _ends(self, number: int) -> tuple[Any, Any]:
        return self.meshes[self.plan.packed[number].members[0]]

    def device(self, number: int) -> torch.device:
        """Where this rank has the tensors, and the buffers."""
        return device_of(self._ends(number)[1])

    def group_of(self, number: int) -> Any | None:
        """On which it is one collective; None: messages from rank to rank, or none at all. A group
        may have been made since the last run.
        """
        bundle = self.bundle(number)
        if self.group is not None or bundle.is_free:
            return self.group
        return on_which_group(bundle, *self._ends(number))

    @cached_property
    def shipments(self) -> list[Shipment]:
        """Each of them as it runs."""
        return [self._shipment(number) for number in range(len(self.plan.packed))]

    def _shipment(self, number: int) -> Shipment:
        bundle = self.bundle(number)
        dtypes = [dtype_of(member.dtype) for member in self.members(number)]
        refuse: Any = None if self.refuse is None else partial(self.refuse, number)
        return Shipment(lambda _: bundle, dtypes, refuse=refuse, number=number)

    def part(self, number: int) -> BundlePart:
        """What this rank does in it."""
        rank, group = communication.this_rank(), self.group_of(number)
        return self.shipments[number].part(rank, group)

    def finished_by(self, number: int, k: int, member: Member) -> list[int]:
        """The results that are whole once its k-th member has arrived."""
        return [result for result in member.results if self._last[result] == (number, k)]

    @cached_property
    def _last(self) -> dict[int, tuple[int, int]]:
        """Of each result the last that brings it something: bucket, and which member of it."""
        return {
            result: (number, k)
            for number in range(len(self.plan.packed))
            for k, member in enumerate(self.members(number))
            for result in member.results
        }

    # -- memory ------------------------------------------------------------------------------------

    def made(self, result: int, device: torch.device) -> torch.Tensor:
        """A result with nothing in it."""
        dtype = dtype_of(self.plan.targets[result].dtype)

        def empty(rank: int) -> torch.Tensor:
            shape = self._shape(result, rank)
            return torch.empty(0 if shape is None else shape, dtype=dtype, device=device)

        return on_each_rank(empty)

    @cached_property
    def _shape(self) -> Callable[[int, int], tuple[int, ...] | None]:
        """The local shape of a result on a rank."""
        return cache(lambda result, rank: self.plan.targets[result].placed.local_shape(rank))

    def kept_view(self, result: int, given: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """A result that is a part of a given operand on this rank, as a view; None: it is not."""
        number, k = self._last.get(result, (0, -1))
        if k < 0 or not self._is_mine(number):
            return None
        member = self.members(number)[k]
        if not {*member.operands} <= {*given}:  # this rank has nothing of one
            return None
        operands = [*(given[i] for i in member.operands), *map(constant, member.constants)]
        return own_view(self.part(number).parts[k], member.results.index(result), operands)

    def take_memory(self, number: int) -> torch.Tensor | None:
        """Memory for the messages of any bucket, which :meth:`put_back` returns; None: this one's
        are not kept.
        """
        if not self.keeps or self.device(number).type != "cpu":
            return None
        try:
            return self._memory.pop()
        except IndexError:
            return torch.empty(self._most, dtype=torch.uint8)

    def put_back(self, memory: torch.Tensor | None) -> None:
        """Memory that nothing is sent from, or received into, any more."""
        if memory is not None:
            self._memory.append(memory)

    @cached_property
    def _memory(self) -> list[torch.Tensor]:
        """What no bucket has now."""
        return []

    @cached_property
    def _most(self) -> int:
        """How many bytes the messages of a bucket take at the most, of contiguous tensors."""
        every = range(len(self.plan.packed))
        return max([self._bytes(number) for number in every if self._is_mine(number)])

    def _bytes(self, number: int) -> int:
        part, dtypes = self.part(number), self.shipments[number].dtypes
        singles = [
            single.size * dtypes[k].itemsize
            for is_run in (True, False)
            for k, _, single in part.singles(is_run=is_run)
            if single.start is None
        ]
        return sum(map(_aligned, [sum(part.sends), sum(part.receives), *singles]))


class Flight:
    """A bucket on its way: long messages of one tensor by themselves, straight from the memory of
    an operand or into that of a result where they lie there as one run; the rest packed, while
    those are on the wire.

    Args:
        give: as for :meth:`PlanRunner.move`.
        made: results that are there, in whole or in part.
    """

    def __init__(
        self,
        runner: PlanRunner,
        number: int,
        give: Callable[[int], torch.Tensor],
        made: dict[int, torch.Tensor],
    ) -> None:
        self._runner, self._number, self._made = runner, number, made
        self._members, self._device = runner.members(number), runner.device(number)
        self._given = [
            [*map(give, member.operands), *map(constant, member.constants)]
            for member in self._members
        ]
        self._shipment, self._group = runner.shipments[number], runner.group_of(number)
        self._part = self._shipment.part(communication.this_rank(), self._group)
        self._memory, self._taken = runner.take_memory(number), 0
        # Messages by themselves: memory that is kept until they are there, or copied from then.
        self._letters: list[Letter] = []
        self._arriving: list[tuple[Single, torch.Tensor, torch.Tensor]] = []
        with observing.exchange(lambda: runner.bundle(number).received_bytes):
            self._works = [*self._post(is_run=True), *self._post(is_run=False)]
            sizes = (
                [] if self._memory is None else [sum(self._part.sends), sum(self._part.receives)]
            )
            buffer, into = map(self._buffer, sizes) if sizes else (None, None)
            how: Any = {"buffer": buffer, "into": into}
            self._wait = self._shipment.start(self._given, self._group, **how)

    def _buffer(self, size: int) -> torch.Tensor:
        """So many bytes, with anything in them."""
        first, self._taken = self._taken, self._taken + _aligned(size)
        if self._memory is None or self._taken > self._memory.numel():
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory.narrow(0, first, size)

    def _post(self, *, is_run: bool) -> list[Any]:
        """Send and expect what goes by itself, and is a run where it comes from, or is none."""
        letters = []
        for k, is_sent, single in self._part.singles(is_run=is_run):
            local = self._given[k][0] if is_sent else self._result(self._members[k].results[0])
            if single.start is not None and local.is_contiguous():
                memory = local.view(-1).narrow(0, single.start, single.size)
            else:
                dtype = self._shipment.dtypes[k]
                memory = self._buffer(single.size * dtype.itemsize).view(dtype)
                if is_sent:
                    _write_all(single, local, memory)
                else:
                    self._arriving.append((single, memory, local))
            letters.append(Letter(memory.view(torch.uint8), single.peer, is_sent))
        self._letters += letters
        return post_messages(letters, self._group, self._number)

    def _result(self, result: int) -> torch.Tensor:
        """A result that is written to."""
        if result not in self._made:
            self._made[result] = self._runner.made(result, self._device)
        return self._made[result]

    def land(self, arrived: Arrived) -> None:
        """Wait for what this rank is sent, and hand over what is whole with it."""
        received = self._wait()
        for work in self._works:
            work.wait()
        for message in self._arriving:
            _write_all(*message)
        self._letters.clear()
        self._arriving.clear()
        for k, member in enumerate(self._members):
            self._write(k, received)
            for result in self._runner.finished_by(self._number, k, member):
                arrived(result, self._made.pop(result))
        del received
        self._runner.put_back(self._memory)

    def _write(self, k: int, received: torch.Tensor) -> None:
        """Write what the bucket brings the results of a member, and let go of its operands."""
        given, self._given[k] = self._given[k], []
        for output, result in enumerate(self._members[k].results):
            dtype = dtype_of(self._runner.plan.targets[result].dtype)
            may_share = self._runner.shares and given[0].dtype == dtype
            into = self._made.get(result) if may_share else self._result(result)
            self._made[result] = self._shipment.result(
                k, received, given, into, output=output, group=self._group, alias=True
            )


def _write_all(single: Single, x: torch.Tensor, y: torch.Tensor) -> None:
    for copy in single.copies:
        write(copy, x, y)


def constant(value: Any) -> torch.Tensor:
    """An operand of one element, in a dtype that has the number as it is."""
    widest = {complex: torch.complex128, float: torch.float64}.get(type(value), torch.int64)
    return torch.tensor([value], dtype=widest)


def _aligned(size: int) -> int:
    """How many bytes a piece of ``size`` bytes takes: pieces begin at multiples of 64."""
    return -(-size // 64) * 64


def device_of(mesh: Any) -> torch.device:
    """The device of this rank for tensors of a mesh."""
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _moved_by(plan: PackedPlan) -> Moved:
    """What a plan moves when it runs, for :func:`cute_sharding.stats`."""
    received = Received(plan.received_elements, plan.received_by_all)
    return Moved(plan=plan.redistributions, collectives=plan.collectives, received=received)


@cache
def _libc() -> Any | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # no C library that can be asked, as on Windows
        return None


def _trim_memory() -> None:
    """Have the C library give back what was freed. glibc keeps pieces of up to 32 MiB that lie
    between others, so that what was let go stays resident (malloc_trim(3)).
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)
