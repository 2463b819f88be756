"""How a tensor gets from one spec to another, and what that takes of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cute_sharding.exchange import Item, Mesh
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.exchange.placed import most_local
from cute_sharding.exchange.plan import peak_of
from cute_sharding.models.tensor import PlacedTensor


class Load(NamedTuple):
    """What a rank holds of a tensor while it moves, in bytes.

    Attributes:
        before: until it has moved.
        finished: of what was pending, once that is done, and what it takes to do it.
        sent, received: in buffers.
        early: of the target's, where messages go straight into it.
        made: the target's, where it is not the source's own memory.
        after: once it has moved.
        moved: what is sent and received, in buffers or not.
    """

    before: int
    finished: int
    sent: int
    received: int
    early: int
    made: int
    after: int
    moved: int

    def plus(self, other: Load) -> Load:
        """Of two tensors."""
        return Load(*(a + b for a, b in zip(self, other)))


@dataclass(frozen=True)
class SpecWay:
    """From one spec to another.

    Attributes:
        source, target: how the tensor lies before and after.
        plan: what is finished first, and the exchange.

    >>> from cute_sharding.exchange.meshes import plan_exchange
    >>> source, target = (PlacedTensor.of((8, 4), (2,), f"S({d})", "float32") for d in (0, 1))
    >>> way = SpecWay(source, target, plan_exchange(source.placed, target.placed))
    >>> way.load(0)
    Load(before=64, finished=0, sent=32, received=32, early=0, made=64, after=64, moved=64)
    """

    source: PlacedTensor
    target: PlacedTensor
    plan: ExchangePlan

    @property
    def meshes(self) -> tuple[Mesh, Mesh]:
        """From which mesh to which."""
        return self.source.placed.mesh, self.target.placed.mesh

    @property
    def item(self) -> Item:
        """What goes into a bundle: elements travel in the smaller of the two dtypes, the source's
        if they are of one size.
        """
        before, after = self.source.itemsize, self.target.itemsize
        on_its_way = self.target.dtype if before > after else self.source.dtype
        as_they_are = self.source.dtype == on_its_way, self.target.dtype == on_its_way
        return Item(self.plan.exchange, min(before, after), as_they_are)

    @cached_property
    def _shares_memory(self) -> bool:
        """Whether each rank's target is what it has."""
        return self.source.dtype == self.target.dtype and self.plan.exchange.is_in_place

    @cached_property
    def _finishing(self) -> int:
        """What the steps before the exchange make, and hold meanwhile, in bytes."""
        if not self.plan.steps:
            return 0
        source = self.source.placed
        held = most_local(source.shape, source.chains, source.mesh.sizes)
        return (peak_of(self.plan.steps, held) - held) * self.source.itemsize

    def moved(self, rank: int) -> int:
        """What a rank sends and receives, in bytes."""
        mine = own_part(self.plan.exchange, rank)
        return (size_of(mine.sent) + size_of(mine.taken)) * self.item.itemsize

    def load(self, rank: int, long: int = 0) -> Load:
        """What it takes of a rank's memory, if messages of ``long`` bytes go by themselves."""
        before, after = self.source.bytes_on(rank), self.target.bytes_on(rank)
        mine, item = own_part(self.plan.exchange, rank), self.item
        sent, received = (size_of(side) * item.itemsize for side in (mine.sent, mine.taken))
        straight = [
            sum(single.size for single in side if single.start is not None) * item.itemsize
            for side in item.alone(rank, long)
        ]
        finished = self._finishing if before else 0
        made = after if not self._shares_memory or self.plan.steps else 0
        return Load(
            before,
            finished,
            sent - straight[0],
            received - straight[1],
            after if straight[1] else 0,
            made,
            after,
            sent + received,
        )
