"""Runs the exchange of a bundle: what a rank sends is packed into one buffer of bytes, and what it
receives is unpacked from one.

An exchange may run in several rounds, each with a share of every message, so that buffers are
small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any, NoReturn

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.groups import on_each_rank, ranks_beside, slice_with
from cute_sharding.dtensor.run.packing import (
    Seal,
    as_bytes,
    in_group,
    own_view,
    pack,
    start_exchange,
    unpack,
    write,
)
from cute_sharding.exchange import Bundle, BundlePart, Exchange, Item, Mesh, identity
from cute_sharding.exchange.bundle import part_among
from cute_sharding.exchange.flow import ALL, Turn
from cute_sharding.exchange.step import AllToAll, Step

# The bytes of a seal.
SEAL = 8


@dataclass(frozen=True, eq=False)
class Shipment:
    """A bundle that runs. It keeps each rank's part.

    Attributes:
        bundle: of a rank: ranks of other slices of a mesh have their own.
        dtypes: of each item's elements on their way.
        beside: a mesh and mesh dims, if each rank's process group has the ranks beside it; None:
            all ranks have one group.
        refuse: raises an error; called if messages are of another bundle. None: they are not. They
            may be, for all that is known, where a rank receives something of a tensor on whose mesh
            it is not: torch does not always tell such ranks the placements that an op's result has.
            So there each message begins with a mark of what it is of.
        number: tells the messages of shipments apart that are on their way at once.
    """

    bundle: Callable[[int], Bundle]
    dtypes: Sequence[torch.dtype]
    beside: tuple[Any, tuple[int, ...]] | None = None
    refuse: Callable[[], NoReturn] | None = None
    number: int = 0

    def part(self, rank: int, group: Any | None, turn: Turn = ALL) -> BundlePart:
        """A rank's part in a round, with messages in the order of the process group; for None,
        point to point.
        """
        return self._parts(rank, group, turn)

    @cached_property
    def _parts(self) -> Callable[..., BundlePart]:
        return cache(self._part)

    def _part(self, rank: int, group: Any | None, turn: Turn) -> BundlePart:
        bundle = self.bundle(rank)
        is_sealed = self.refuse is not None and bundle.reaches_out
        part = bundle.part(rank, SEAL if is_sealed else 0, turn)
        if group is None or self.beside is None:
            return in_group(part, group)
        mesh, dims = self.beside
        return part_among(part, ranks_beside(mesh, rank, dims))

    @property
    def seal(self) -> Seal | None:
        """What messages begin with."""
        if self.refuse is None:
            return None
        bundle = self.bundle(communication.this_rank())
        return Seal(bundle.seal, self.refuse) if bundle.reaches_out else None

    def run(
        self, given: Sequence[torch.Tensor], group: Any | None, rounds: int = 1, **how: bool
    ) -> list[torch.Tensor]:
        """The result of each item, which has one operand. ``how``: as in :meth:`result`."""
        made: list[Any] = [None] * len(given)
        for turn in ((k, rounds) for k in range(rounds)):
            received = self.start([[x] for x in given], group, turn, async_op=False)()
            for k, x in enumerate(given):
                made[k] = self.result(k, received, [x], made[k], group=group, turn=turn, **how)
            del received
        return made

    def start(
        self,
        operands: Sequence[Sequence[torch.Tensor]],
        group: Any | None,
        turn: Turn = ALL,
        *,
        buffer: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        async_op: bool = True,
    ) -> Callable[[], torch.Tensor]:
        """Send what a rank has of each item, and return a function that waits for what it receives,
        in bytes.

        Args:
            operands: of each item; without elements where this rank has none of it.
            group: has all ranks that call this; None: point to point.
            buffer, into: memory for what is sent, and for what is received.
            async_op: whether a collective may go on when this returns.
        """
        flat = [x for some in operands for x in some]

        def packed(rank: int, *flat: torch.Tensor) -> torch.Tensor:
            remaining = iter(flat)
            each = [[*islice(remaining, len(some))] for some in operands]
            return _packed(self.part(rank, group, turn), each, self.dtypes, buffer)

        if self.bundle(communication.this_rank()).is_free:
            nothing = on_each_rank(lambda _, x: x.new_empty(0, dtype=torch.uint8), flat[0])
            return lambda: nothing
        sent = on_each_rank(packed, *flat)
        return start_exchange(
            lambda rank: self.part(rank, group, turn),
            sent,
            group,
            self.number,
            self.seal,
            into,
            async_op=async_op,
        )

    def result(
        self,
        k: int,
        received: torch.Tensor,
        operands: Sequence[torch.Tensor],
        into: torch.Tensor | None = None,
        *,
        output: int = 0,
        group: Any | None = None,
        turn: Turn = ALL,
        alias: bool = False,
    ) -> torch.Tensor:
        """A result of an item, from what a rank received and has; empty on a rank outside of its
        mesh.

        Args:
            into: what is written to.
            alias: whether a part of an operand is a view of that.
        """

        def made(rank: int, got: torch.Tensor, *some: Any) -> torch.Tensor:
            given, onto = some[: len(operands)], some[-1] if into is not None else None
            part = self.part(rank, group, turn).parts[k]
            if part.target_shapes[output] is None:
                return given[0].new_empty(0) if onto is None else onto
            own = own_view(part, output, given) if alias and onto is None else None
            if own is not None:
                return own
            return unpack(part, output, got.view(self.dtypes[k]), given, into=onto)

        some: list[Any] = [*operands, *(() if into is None else (into,))]
        return on_each_rank(made, received, *some)


def _packed(
    part: BundlePart,
    operands: Sequence[Sequence[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    """The send buffer, in bytes, filled from the operands of each item."""
    size, first = sum(part.sends), operands[0]
    if buffer is None and len(operands) == 1 and {x.dtype for x in first} == {*dtypes}:
        (mine,) = part.parts
        if sum(mine.sends) * dtypes[0].itemsize == size:  # nothing beside its messages
            return as_bytes(pack(mine, first))
    if buffer is None:
        buffer = torch.empty(size, dtype=torch.uint8, device=first[0].device)
    for some, dtype, mine in zip(operands, dtypes, part.parts):
        for x, copies in zip(some, mine.packs):
            if copies:
                flat = buffer.view(dtype)
                for copy in copies:
                    write(copy, x, flat)
    return buffer


# -- steps of plans --------------------------------------------------------------------------------


def dims_of(steps: Sequence[Step]) -> tuple[int, ...]:
    """The largest set of mesh dims of a step."""
    return max([step.mesh_dims for step in steps], key=len, default=())


@remembered
def shipment_of(
    steps: tuple[AllToAll, ...], dtypes: tuple[torch.dtype, ...], mesh: Any
) -> Shipment:
    """Steps of the plans of several tensors on one mesh, as one exchange."""

    def bundle(rank: int) -> Bundle:
        on = slice_with(mesh, rank)
        items = [Item(_exchange_of(step, on), dtype.itemsize) for step, dtype in zip(steps, dtypes)]
        return Bundle(tuple(items))

    return Shipment(cache(bundle), dtypes, (mesh, dims_of(steps)))


@remembered
def _exchange_of(step: AllToAll, mesh: Mesh) -> Exchange:
    source, target = (replace(placed, mesh=mesh) for placed in step.ends)
    return Exchange(identity(step.shape), (source,), (target,))
