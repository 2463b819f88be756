"""One rank's part in a refit: from local tensors to local tensors, in few exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, Received, count_moves
from cute_sharding.dtensor.replaced import communication, dispatch_modes, observing
from cute_sharding.dtensor.run.bundles import Shipment
from cute_sharding.dtensor.run.groups import on_each_rank
from cute_sharding.dtensor.run.packing import in_flight, in_shape, own_view
from cute_sharding.dtensor.run.several_meshes import on_which_group
from cute_sharding.models.refit import Member, Refit


class Running:
    """A refit on meshes that have process groups; of each rank the parts are kept.

    Attributes:
        refit: what is moved.
        meshes: the DeviceMeshes of operands and results; or what else says a kind of device.
        dtypes: of the results.
        group: a process group on which it runs, all of whose ranks take part; by default that of
            the ranks of the meshes.
    """

    def __init__(
        self,
        refit: Refit,
        meshes: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        group: Any | None = None,
    ) -> None:
        self.refit, self.group = refit, group
        self.meshes = sorted(dict.fromkeys(meshes), key=lambda mesh: -mesh.size())
        self.dtypes = tuple(dtypes)

    @cached_property
    def _shipments(self) -> list[Shipment]:
        """Of each bucket."""
        return [*map(self._shipment, range(len(self.refit.packed)))]

    def _shipment(self, number: int) -> Shipment:
        bundle, dtypes = self.refit.packed[number].bundle, [*map(_dtype, self._members(number))]
        return Shipment(lambda _: bundle, dtypes, number=number)

    def _group_of(self, number: int) -> Any | None:
        """On which a bucket is one collective; None: messages from rank to rank, or none at all. It
        may have been made since the last run.
        """
        bundle = self.refit.packed[number].bundle
        if self.group is not None or bundle.is_free:
            return self.group
        return on_which_group(bundle, self.meshes[0], self.meshes[-1])

    def given(self, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The local tensors of the operands as they are sent.

        Raises:
            OtherShape: one is not of the shape that its placements give.
        """
        return [
            on_each_rank(lambda rank, x, k=k: self._checked(k, x, rank), communication.wait_for(x))
            for k, x in enumerate(locals_)
        ]

    def run(
        self,
        given: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor | None],
        written: Callable[[int], Any] = lambda number: None,
    ) -> list[torch.Tensor]:
        """The local tensors of the results, from those of the operands; without elements on ranks
        outside of a result's mesh.

        Args:
            given: as :meth:`given` gives them.
            into: what is written to, of each result.
            written: is told the number of each bucket whose results are.
        """
        results = [
            on_each_rank(lambda rank, x, k=k: self._made(k, x, rank), given[0])
            if x is None or not x.is_contiguous()
            else x
            for k, x in enumerate(into)
        ]
        buckets = [number for number in range(len(self.refit.packed)) if self._is_mine(number)]

        def land(number: int, wait: Callable[[], torch.Tensor]) -> None:
            self._write(number, wait(), given, results)
            written(number)

        in_flight(
            buckets,
            lambda number: self._sent(number, given),
            land,
            lambda number: self.refit.packed[number].follows_at_once,
        )
        if buckets:
            count_moves(self._kind)
        return [
            made if x is None or x is made else on_each_rank(lambda rank, x, y: x.copy_(y), x, made)
            for x, made in zip(into, results)
        ]

    def _is_mine(self, number: int) -> bool:
        """Whether this rank has to do with a bucket."""
        return (
            self.group is not None
            or dispatch_modes.local_tensor_mode() is not None
            or communication.this_rank() in self.refit.packed[number].bundle
        )

    @cached_property
    def _kind(self) -> Kind:
        """Of none that torch has a way to do."""
        return Kind(self._moved)

    def _moved(self) -> Moved:
        by_all = sum(map(self.refit.elements_received_by, self.refit.bundle.looked_at))
        received = Received(self.refit.received_elements, by_all)
        return Moved(plan=1, collectives=self.refit.collectives, received=received)

    def _checked(self, k: int, local: torch.Tensor, rank: int) -> torch.Tensor:
        operand = self.refit.operands[k]
        shape = operand.placed.local_shape(rank)
        if shape is None:
            return local.new_empty(0)
        local = in_shape(local, shape, operand.name)
        return local.detach().resolve_conj().resolve_neg().contiguous()

    def _made(self, k: int, local: torch.Tensor, rank: int) -> torch.Tensor:
        shape = self.refit.results[k].placed.local_shape(rank)
        return local.new_empty((0,) if shape is None else shape, dtype=self.dtypes[k])

    def kept_view(self, result: int, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A result that is a part of an operand on this rank, as a view; None: it is not."""
        for number in range(len(self.refit.packed)):
            for i, member in enumerate(self._members(number)):
                if result in member.results and self._is_mine(number):
                    this, group = communication.this_rank(), self._group_of(number)
                    part = self._shipments[number].part(this, group).parts[i]
                    operands = self._operands(member, given)
                    return own_view(part, member.results.index(result), operands)
        return None

    # -- one bucket --------------------------------------------------------------------------------

    def _sent(self, number: int, given: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Send what a rank has of a bucket; what is returned waits for what it gets, in bytes."""
        bundle = self.refit.packed[number].bundle
        operands = [self._operands(member, given) for member in self._members(number)]
        with observing.exchange(lambda: bundle.received_bytes):
            return self._shipments[number].start(operands, self._group_of(number))

    def _operands(self, member: Member, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands of an exchange, and its constants."""
        constants = [self.refit.relation.constants[c] for c in member.constants]
        values = [torch.tensor([v], dtype=_widest(v)) for v in constants]
        return [*(given[k] for k in member.operands), *values]

    def _members(self, number: int) -> list[Member]:
        return [self.refit.members[i] for i in self.refit.packed[number].members]

    def _write(
        self,
        number: int,
        received: torch.Tensor,
        given: Sequence[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        """Set the results of a bucket to what it brings them."""
        shipment, group = self._shipments[number], self._group_of(number)
        for i, member in enumerate(self._members(number)):
            operands = self._operands(member, given)
            for k, result in enumerate(member.results):
                results[result] = shipment.result(
                    i, received, operands, results[result], output=k, group=group
                )


def _dtype(member: Member) -> torch.dtype:
    """In which the elements of an exchange are sent."""
    found: torch.dtype = getattr(torch, member.dtype)
    return found


def _widest(value: Any) -> torch.dtype:
    """A dtype that has the number as it is."""
    if isinstance(value, complex):
        return torch.complex128
    return torch.float64 if isinstance(value, float) else torch.int64
