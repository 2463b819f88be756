"""Buckets of tensors on their way: each packed, sent and unpacked; the next one packed and sent
before, where the plan says so.

A tensor is handed over when all of it is there, and what it was made of is let go then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch

from cute_sharding._words import counted
from cute_sharding.dtensor.models.buffers import Buffers, KeptMemory, room_for
from cute_sharding.dtensor.models.straight import Straight
from cute_sharding.dtensor.replaced import communication, observing
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.across_meshes import by_elements
from cute_sharding.dtensor.run.bundles import Shipment
from cute_sharding.dtensor.run.executor import run
from cute_sharding.dtensor.run.groups import means
from cute_sharding.dtensor.run.packing import lay_out, own_view
from cute_sharding.dtensor.run.several_meshes import on_which_group
from cute_sharding.exchange import BundlePart, Network
from cute_sharding.exchange.alone import in_a_row
from cute_sharding.exchange.bundle import own_part
from cute_sharding.exchange.flow import Copy
from cute_sharding.exchange.meshes import plan_exchange
from cute_sharding.models.plan import Packed
from cute_sharding.models.way import SpecWay


class Specs(NamedTuple):
    """How a tensor lies before and after, in torch's words."""

    current: DTensorSpec
    target: DTensorSpec


class End(NamedTuple):
    """What becomes of a tensor on this rank.

    Attributes:
        shape, dtype: of what the rank is to have; None: it is not on the mesh.
        on_the_way: the dtype of what is sent, the smaller of the two.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    on_the_way: torch.dtype

    def make(self, device: torch.device) -> torch.Tensor:
        """The target, with nothing in it."""
        shape = 0 if self.shape is None else self.shape
        return torch.empty(shape, dtype=self.dtype, device=device)


class SentPiece(NamedTuple):
    """What one rank sends another of one tensor: its number in the bucket, how many elements, and
    the copies into a buffer, or out of it, in which they lie one behind the other.
    """

    number: int
    size: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class LocalBucket:
    """Tensors that go together, on this rank.

    Attributes:
        packed: what goes where.
        ways, specs: of each of the tensors.
        number: which bucket it is.
    """

    packed: Packed
    ways: tuple[SpecWay, ...]
    specs: tuple[Specs, ...]
    number: int

    @cached_property
    def is_mine(self) -> bool:
        """Whether this rank is on one of the meshes."""
        return communication.this_rank() in self.packed.bundle

    @cached_property
    def is_told(self) -> bool:
        """Whether messages say what they are of. Ranks outside of a tensor's mesh may take it to
        lie otherwise (run/across_meshes.py).
        """
        source, target = self.ways[0].meshes
        return not {*target.ranks} <= {*source.ranks}

    @cached_property
    def shipment(self) -> Shipment:
        """It as it runs. Kept, so that a plan that runs again does not plan again."""
        dtypes = [end.on_the_way for end in self.ends]
        refuse = self._refuse_others if self.is_told else None
        return Shipment(lambda _: self.packed.bundle, dtypes, refuse=refuse, number=self.number)

    @property
    def part(self) -> BundlePart:
        """What this rank does."""
        return self.shipment.part(communication.this_rank(), self.group)

    @cached_property
    def ends(self) -> tuple[End, ...]:
        """What becomes of each of the tensors here."""
        rank = communication.this_rank()
        return tuple(
            [
                End(way.target.placed.local_shape(rank), _dtype(way.target.dtype), _on_the_way(way))
                for way in self.ways
            ]
        )

    @property
    def device(self) -> torch.device:
        """Where this rank has the tensors, and the buffers."""
        return device_of(self.specs[0].target.mesh)

    @cached_property
    def pieces(self) -> tuple[dict[int, list[SentPiece]], dict[int, list[SentPiece]]]:
        """What this rank sends each peer, and what it is sent, tensor by tensor."""
        sent: dict[int, list[SentPiece]] = {}
        taken: dict[int, list[SentPiece]] = {}
        for k, item in enumerate(self.packed.bundle.items):
            mine = own_part(item.exchange, communication.this_rank())
            for side, found in ((mine.sent, sent), (mine.taken, taken)):
                for peer, messages in side.items():
                    copies = in_a_row(messages, is_sent=found is sent)
                    size = sum(message.size for message in messages)
                    found.setdefault(peer, []).append(SentPiece(k, size, tuple(copies)))
        return dict(sorted(sent.items())), dict(sorted(taken.items()))

    @cached_property
    def group(self) -> Any | None:
        """On which it is one collective; None: messages from rank to rank, or none at all."""
        if self.packed.bundle.is_free:
            return None
        first = self.specs[0]
        return on_which_group(self.packed.bundle, first.current.mesh, first.target.mesh)

    def finished(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What this rank has of the tensors, with nothing pending."""
        return [
            None if x is None else _finished(x, way, spec.current)
            for x, way, spec in zip(given, self.ways, self.specs)
        ]

    @cached_property
    def buffer_bytes(self) -> int:
        """How much memory messages take here, of contiguous tensors."""
        singles = [
            (single.size * self.ends[k].on_the_way.itemsize)
            for is_run in (True, False)
            for k, _, single in self.part.singles(is_run=is_run)
            if single.start is None
        ]
        return sum(map(room_for, [sum(self.part.sends), sum(self.part.receives), *singles]))

    def send(
        self,
        given: Sequence[torch.Tensor | None],
        into: Mapping[int, torch.Tensor],
        kept: KeptMemory | None,
    ) -> Flight:
        """Send what this rank has of the tensors: long messages straight from their memory, where
        they lie so, and the rest packed, while those are on the wire. ``into``: what is written to,
        by the number of the tensor in the plan; else targets are made. ``kept``: memory for
        messages.
        """
        finished = self.finished(given)
        there = {k: into[i] for k, i in enumerate(self.packed.members) if i in into}
        buffers = Buffers(kept)
        part, device, to = self.part, self.device, self.shipment
        straight = Straight(part, to.dtypes, finished, there, self._made, buffers.take)
        with observing.exchange(lambda: self.packed.bundle.received_bytes):
            straight.post(self.group, self.number, is_run=True)
            straight.post(self.group, self.number, is_run=False)
            buffer = buffers.take(sum(part.sends), device)
            received = None if kept is None else buffers.take(sum(part.receives), device)
            operands = [[x] for x in finished]
            wait = to.start(operands, self.group, buffer=buffer, into=received)
        return Flight(self, finished, into, straight, wait, buffers)

    def _made(self, k: int) -> torch.Tensor:
        """The target of a tensor, with nothing in it."""
        return self.ends[k].make(self.device)

    def pass_by(self, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Hand over what a rank of none of the meshes has: tensors without elements."""
        device = self.device
        for member, end in zip(self.packed.members, self.ends):
            arrived(member, end.make(device))

    def _refuse_others(self) -> NoReturn:
        """Raises:
        RuntimeError: messages are of other tensors.
        """
        raise RuntimeError(
            f"the sender on mesh {self.specs[0].current.mesh} and this rank have different plans "
            f"for {counted(len(self.ways), 'tensor')}: the shapes, dtypes, placements or "
            "memory_limit differ. Pass the same tensors, placements and memory_limit on all "
            "ranks, and first redistribute results of ops to explicit placements"
        )


class Flight(NamedTuple):
    """A bucket on its way.

    Attributes:
        bucket: what is on its way.
        given: what this rank has of each of the tensors.
        into: what is written to, by the number of the tensor in the plan.
        straight: what goes by itself.
        wait: for what is packed.
        buffers: in which messages are.
    """

    bucket: LocalBucket
    given: list[torch.Tensor | None]
    into: Mapping[int, torch.Tensor]
    straight: Straight
    wait: Callable[[], torch.Tensor]
    buffers: Buffers

    def land(self, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Wait for what this rank is sent, and hand over what it has of each tensor then, by the
        tensor's number in the plan; on a rank that is not on its mesh, one without elements.
        """
        bucket, received = self.bucket, self.wait()
        self.straight.land()
        for k, member in enumerate(bucket.packed.members):
            local, self.given[k] = self.given[k], None
            made, end, result = self.straight.made.pop(k, None), bucket.ends[k], None
            if made is None and local is not None and local.dtype == end.dtype:
                result = own_view(bucket.part.parts[k], 0, [local])
            if result is None:
                made = end.make(bucket.device) if made is None else made
                result = bucket.shipment.result(k, received, [local], made, group=bucket.group)
            del local, made
            if member not in self.into:
                result = lay_out(result, bucket.specs[k].target.tensor_meta)
            arrived(member, result)
        del received
        self.buffers.put_back()


def device_of(mesh: Any) -> torch.device:
    """The device of this rank for tensors of a mesh."""
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _finished(local: torch.Tensor, way: SpecWay, spec: DTensorSpec) -> torch.Tensor | None:
    """What a rank has, with nothing pending."""
    if not spec.mesh._is_current_rank_part_of_mesh():
        return None
    local = communication.wait_for(local)
    local, _ = by_elements(local, spec)
    if way.source.pending:
        by = means(spec.mesh)
        network = Network.of_programs(tuple(spec.mesh.shape), by.network)
        ends = way.source.placed, way.target.placed
        plan = plan_exchange(*ends, network, groups=by.groups, native=by.native)
        local = run(plan.steps, local, spec.mesh)
    return local.resolve_conj().resolve_neg()


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _on_the_way(way: SpecWay) -> torch.dtype:
    """The smaller of the two dtypes."""
    is_wider = way.source.itemsize > way.target.itemsize
    return _dtype(way.target.dtype if is_wider else way.source.dtype)
