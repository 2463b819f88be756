"""A plan for many tensors: which go together, what it takes, and that nothing is left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cute_sharding._words import counted
from cute_sharding.exchange import Bundle, BundlePart, Exchange, Item, Mesh, Network
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.network import DEVICES_PER_HOST, LINK_ITEMSIZE, messages
from cute_sharding.exchange.plan import collectives, peak_of, received_by
from cute_sharding.models.buckets import SHARE, Bucket, Load, buckets, peak
from cute_sharding.models.tensor import PlacedTensor, itemsize_of, wire_of


class Member(NamedTuple):
    """The least that goes by itself: results, and all that they are made of, in one exchange.

    Attributes:
        exchange: what goes where.
        dtype: of elements on their way.
        operands, results: the numbers of these in the plan.
        constants: operands of one element behind the others, which no rank sends: their values.
        as_they_are: as an :class:`~cute_sharding.exchange.Item` has it.
    """

    exchange: Exchange
    dtype: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    constants: tuple[Any, ...] = ()
    as_they_are: tuple[bool, bool] = (False, False)

    @property
    def item(self) -> Item:
        """What goes into a bundle."""
        return Item(self.exchange, itemsize_of(self.dtype), self.as_they_are)


class PackedPlan(ABC):
    """Results made of operands, many of each, in few exchanges.

    On more than 64 ranks the first, a middle and the last coordinates of each mesh dim stand for
    the others, in all that is said of the busiest rank.

    Attributes:
        memory_limit: the most bytes that a rank may hold, or None.
    """

    memory_limit: int | None

    @property
    @abstractmethod
    def members(self) -> tuple[Member, ...]:
        """What is exchanged."""

    @property
    @abstractmethod
    def packed(self) -> tuple[Bucket, ...]:
        """Which members go together, in the order in which they run."""

    @property
    @abstractmethod
    def targets(self) -> tuple[PlacedTensor, ...]:
        """How the results lie."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in bytes, times in seconds."""

    @cached_property
    def bundle(self) -> Bundle:
        """All that is sent."""
        return Bundle(tuple([member.item for member in self.members]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all meshes, ascending."""
        return self.bundle.ranks

    @property
    def looked_at(self) -> tuple[int, ...]:
        """The ranks that stand for all."""
        return self.bundle.looked_at

    @property
    def collectives(self) -> int:
        """The number of collectives, or batches of point-to-point messages."""
        return sum(not each.bundle.is_free for each in self.packed)

    @property
    def redistributions(self) -> int:
        """As how many redistributions it counts."""
        return 1

    def received_by(self, rank: int) -> int:
        """What a rank receives, in bytes: what it needs and does not hold, each element once."""
        return self.bundle.received_by(rank)

    def elements_received_by(self, rank: int) -> int:
        """How many elements a rank receives, of all dtypes."""
        received = {each: each.received_by(rank) for each in self.bundle.exchanges}
        return sum(received[member.exchange] for member in self.members)

    @cached_property
    def received_elements(self) -> int:
        """How many elements the busiest rank receives."""
        return max(map(self.elements_received_by, self.looked_at), default=0)

    @cached_property
    def received_by_all(self) -> int:
        """How many elements all ranks receive together."""
        return sum(member.exchange.received_by_all for member in self.members)

    def parts(self, rank: int) -> tuple[BundlePart, ...]:
        """A rank's part in each bucket, for who would move the bytes by other means: bytes to and
        from each peer; and of each member (``packed`` says which of ``members`` are in a bucket,
        and these between which tensors, in which dtype) strided copies from the operands into a
        buffer, and out of one into the results, all contiguous. Steps below 0 go backward.
        Constants are operands of one element behind the others.

        >>> one, other = (PlacedTensor.of((4, 6), (2,), f"S({d})") for d in (0, 1))
        >>> (part,) = plan_models([("w", one, other)]).parts(0)
        >>> part.peers, part.sends, part.receives
        ((1,), (24,), (24,))
        >>> part.parts[0].packs[0][0]
        Copy(sizes=(2, 3), x=(0, 3), dx=((1, 0), (0, 1)), y=(0,), dy=((3,), (1,)))
        """
        packed = [
            Bundle(tuple([item._replace(as_they_are=(False, False)) for item in each.bundle.items]))
            for each in self.packed
        ]
        return tuple([bundle.part(rank) for bundle in packed])

    def _bundled(self, found: Sequence[Bucket], long: int = 0) -> tuple[Bucket, ...]:
        """The buckets, with what goes where."""
        items = self.bundle.items
        return tuple(
            [
                each._replace(bundle=Bundle(tuple([items[i] for i in each.members]), long))
                for each in found
            ]
        )

    def _repr_html_(self) -> str:
        from cute_sharding._html import of_data

        return of_data(str(self).partition("\n")[0], self.to_dict())


@dataclass(frozen=True)
class SpecWay:
    """How a tensor gets from one spec to another.

    Attributes:
        source, target: how it lies before and after.
        plan: what is finished first, and the exchange.

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

    def member(self, number: int) -> Member:
        """The tensor as a plan moves it, in which it has that number."""
        before, after = self.source.dtype, self.target.dtype
        wire = wire_of(before, [after])
        as_they_are = before == wire, after == wire
        return Member(self.plan.exchange, wire, (number,), (number,), (), as_they_are)

    @cached_property
    def item(self) -> Item:
        """What goes into a bundle."""
        return self.member(0).item

    @cached_property
    def _shares_memory(self) -> bool:
        """Whether each rank's target is what it has."""
        return self.source.dtype == self.target.dtype and self.plan.exchange.is_in_place

    @cached_property
    def _finishing(self) -> int:
        """What the steps before the exchange make, and hold meanwhile, in bytes."""
        if not self.plan.steps:
            return 0
        held = self.source.placed.most
        return (peak_of(self.plan.steps, held) - held) * self.source.itemsize

    def load(self, rank: int, long: int = 0) -> Load:
        """What it takes of a rank's memory, if messages of ``long`` bytes go by themselves."""
        before, after = self.source.bytes_on(rank), self.target.bytes_on(rank)
        sent, received = self.item.moved(rank)
        straight_out, straight_in = (
            sum(single.size for single in side if single.start is not None) * self.item.itemsize
            for side in self.item.alone(rank, long)
        )
        return Load(
            before,
            finished=self._finishing if before else 0,
            sent=sent - straight_out,
            received=received - straight_in,
            early=after if straight_in else 0,
            made=after if not self._shares_memory or self.plan.steps else 0,
            after=after,
            moved=sent + received,
        )


class Named(NamedTuple):
    """A tensor by its name, its way, and whether it stays as it is."""

    name: str
    way: SpecWay
    stays: bool


class Coverage(NamedTuple):
    """Of the targets on the ranks that were looked at, in bytes: what is needed, what a rank has
    itself, what it is sent; by the messages, not by how they were found.
    """

    needed: int
    kept: int
    received: int

    @property
    def is_whole(self) -> bool:
        """Whether all that is needed is there."""
        return self.needed == self.kept + self.received


@dataclass(frozen=True)
class ReshardPlan(PackedPlan):
    """How many tensors get from some meshes to others.

    Attributes:
        tensors: each of them with its way; their numbers are those of ``members``.
        memory_limit: the most bytes that a rank may hold, or None.
        network: the links: within hosts of eight ranks, numbered one behind the other, its inner
            one, and between hosts its slowest; timed for elements of two bytes.

    Raises:
        MemoryLimitError: no plan keeps within the limit.

    >>> one, other = (PlacedTensor.of((8, 6), (2,), f"S({d})", "bfloat16") for d in (0, 1))
    >>> plan = plan_models((f"layers.{i}", one, other) for i in range(9))
    >>> plan.collectives, plan.received_bytes, plan.lower_bound, plan.coverage.is_whole
    (1, 216, 216, True)
    """

    tensors: tuple[Named, ...]
    memory_limit: int | None = None
    network: Network | None = None

    def __post_init__(self) -> None:
        _ = self.packed  # or there is none

    @cached_property
    def ways(self) -> dict[SpecWay, list[str]]:
        """The different ways, and the names of the tensors that go them."""
        found: dict[SpecWay, list[str]] = {}
        for name, way, _ in self.tensors:
            found.setdefault(way, []).append(name)
        return found

    @cached_property
    def members(self) -> tuple[Member, ...]:
        return tuple([way.member(i) for i, (_, way, _) in enumerate(self.tensors)])

    @property
    def redistributions(self) -> int:
        return sum(len(each.members) for each in self.packed)

    @cached_property
    def targets(self) -> tuple[PlacedTensor, ...]:
        return tuple([way.target for _, way, _ in self.tensors])

    @cached_property
    def long(self) -> int:
        """The least bytes of a message that goes by itself: an eighth of what the busiest rank
        sends and receives. So there are few.
        """
        moving = Counter(way for _, way, stays in self.tensors if not stays)
        most = [
            sum(many * sum(way.item.moved(rank)) for way, many in moving.items())
            for rank in self.looked_at
        ]
        return max(most, default=0) // SHARE

    @cached_property
    def _loads(self) -> list[tuple[Load, ...]]:
        known = {way: tuple([way.load(r, self.long) for r in self.looked_at]) for way in self.ways}
        return [known[way] for _, way, _ in self.tensors]

    @cached_property
    def packed(self) -> tuple[Bucket, ...]:
        """Which tensors go together: those between the same two meshes, as many as the limit
        admits.
        """
        kinds = [None if stays else way.meshes for _, way, stays in self.tensors]
        found = buckets(self._loads, self.memory_limit, kinds)
        return self._bundled(found, self.long)

    def parts(self, rank: int) -> tuple[BundlePart, ...]:
        """As any plan's parts.

        Raises:
            ValueError: something is pending, which no copy finishes.
        """
        for name, way, _ in self.tensors:
            if way.plan.steps:
                raise ValueError(
                    "plan.parts(rank) cannot describe the reduction of a Partial, but the source "
                    f"of {name} is {way.source}: first redistribute {name} to Shard or Replicate"
                )
        return super().parts(rank)

    @property
    def collectives(self) -> int:
        """How many collectives it is, or batches of point-to-point messages; with those that finish
        what is pending, which is done tensor by tensor.
        """
        return super().collectives + sum(collectives(way.plan.steps) for _, way, _ in self.tensors)

    @cached_property
    def received_bytes(self) -> int:
        """What the busiest rank receives, message by message."""
        before = sum(
            received_by(way.plan.steps) * way.source.itemsize * len(names)
            for way, names in self.ways.items()
        )
        return before + max([sum(self._received(rank)) for rank in self.looked_at], default=0)

    @cached_property
    def lower_bound(self) -> int | None:
        """What the busiest rank must receive: what it needs and does not hold. None where something
        is pending.
        """
        if any(way.plan.steps for way in self.ways):
            return None
        return self.bundle.received_bytes

    @cached_property
    def received_by_link(self) -> dict[str, int]:
        """What the busiest of each receives, in bytes, from its host and from others."""
        every = [self._received(rank) for rank in self.looked_at]
        return {
            "in a host": max([near for near, _ in every], default=0),
            "between hosts": max([far for _, far in every], default=0),
        }

    def _received(self, rank: int) -> tuple[int, int]:
        """What a rank receives from its host and from others, in bytes."""
        each = [
            (_received_from(way, rank), way.item.itemsize * len(names))
            for way, names in self.ways.items()
        ]
        near, far = (sum(found[side] * width for found, width in each) for side in (0, 1))
        return near, far

    @cached_property
    def peak_bytes(self) -> int:
        """The most that a rank holds at once: sources, targets and buffers. Without a limit the
        buffers stay for the buckets that follow.
        """
        return peak(self._loads, self.packed, keeps=self.memory_limit is None)

    @cached_property
    def coverage(self) -> Coverage:
        """That nothing is left out."""
        needed = kept = received = 0
        for way, names in self.ways.items():
            for rank in self.looked_at:
                times = way.target.itemsize * len(names)
                mine = own_part(way.plan.exchange, rank)
                needed += way.target.bytes_on(rank) * len(names)
                kept += mine.kept * times
                received += size_of(mine.taken) * times
        return Coverage(needed, kept, received)

    @cached_property
    def seconds(self) -> float:
        """What the exchanges take by the network, one behind the other, with what finishes pending
        sums before.
        """
        network = self.network or Network.default((DEVICES_PER_HOST, DEVICES_PER_HOST))
        slowest = max(network.links, key=lambda link: (link.beta, link.alpha))
        before = sum(
            step.seconds(way.plan.network) for _, way, _ in self.tensors for step in way.plan.steps
        )
        latency = sum(
            messages(each.bundle.most_peers + 1, together=False) * slowest.alpha
            for each in self.packed
            if not each.bundle.is_free
        )
        carrying = max(
            [
                near * network.inner.beta + far * slowest.beta
                for near, far in map(self._received, self.looked_at)
            ],
            default=0.0,
        )
        return before + latency + carrying / LINK_ITEMSIZE

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in bytes, times in seconds."""
        return {
            "tensors": [
                {
                    "name": name,
                    "shape": list(way.source.placed.shape),
                    "source": str(way.source),
                    "target": str(way.target),
                    "kind": "nothing" if stays else way.plan.kind,
                }
                for name, way, stays in self.tensors
            ],
            "buckets": [
                {
                    "tensors": [self.tensors[i].name for i in each.members],
                    "received_bytes": each.bundle.received_bytes,
                    "follows_at_once": each.follows_at_once,
                }
                for each in self.packed
            ],
            "ranks": len(self.ranks),
            "ranks_looked_at": len(self.looked_at),
            "collectives": self.collectives,
            "received_bytes": self.received_bytes,
            "received_by_link": self.received_by_link,
            "lower_bound": self.lower_bound,
            "peak_bytes": self.peak_bytes,
            "memory_limit": self.memory_limit,
            "coverage": self.coverage._asdict(),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        many, kinds = counted(len(self.tensors), "tensor"), counted(len(self.ways), "kind")
        lines = [f"{many} of {kinds}, {_meshes_text(self.ways)}"]
        for way, names in self.ways.items():
            times = f"{len(names)} x " if len(names) > 1 else ""
            kind = "nothing" if way.source == way.target else way.plan.kind
            lines.append(f"  {times}{names[0]}: {way.source} -> {way.target}: {kind}")
        for k, each in enumerate(self.packed):
            at_once = ", while the one before is unpacked" if each.follows_at_once else ""
            many = counted(len(each.members), "tensor")
            lines.append(
                f"bucket {k}: {many}, {each.bundle.received_bytes:,} bytes received{at_once}"
            )
        near, far = self.received_by_link.values()
        needed, kept, received = self.coverage
        return "\n".join(
            [
                *lines,
                f"in all: {counted(self.collectives, 'collective')}, {self.received_bytes:,} bytes "
                f"received by the busiest rank, at most {near:,} from its host and {far:,} from "
                f"others; at most {self.peak_bytes:,} held, {self.seconds:.4g} s",
                f"covered: of {needed:,} bytes on {len(self.looked_at)} of {len(self.ranks)} ranks "
                f"{kept:,} are there and {received:,} are received",
            ]
        )


def plan_models(
    tensors: Iterable[tuple[str, PlacedTensor, PlacedTensor]],
    memory_limit: int | None = None,
    network: Network | None = None,
    relabelled: Collection[str] = (),
) -> ReshardPlan:
    """The plan for tensors of those names, from the one spec to the other.

    Args:
        memory_limit: the most bytes that a rank may hold: sources, targets and buffers.
        network: the links, by which it is timed.
        relabelled: names of tensors that get another mesh or other placements even where both say
            the same.

    Raises:
        ValueError: a target has another shape or is pending; or no plan keeps within the limit.

    >>> one, other = PlacedTensor.of((8,), (2,), "S(0)"), PlacedTensor.of((8,), (2,), "R")
    >>> plan = plan_models([("a", one, other), ("b", other, one), ("c", one, one)], 200)
    >>> [[plan.tensors[i].name for i in each.members] for each in plan.packed]
    [['b', 'a']]
    """
    return ReshardPlan(named_ways(tensors, relabelled), memory_limit, network)


def named_ways(
    tensors: Iterable[tuple[str, PlacedTensor, PlacedTensor]], relabelled: Collection[str] = ()
) -> tuple[Named, ...]:
    """Each tensor with its way; the arguments are those of :func:`plan_models`.

    Raises:
        ValueError: a target has another shape or is pending.
    """
    found: dict[tuple[PlacedTensor, PlacedTensor], SpecWay] = {}
    named = []
    for name, source, target in tensors:
        if source.placed.shape != target.placed.shape or target.pending:
            raise ValueError(
                f"cannot move {name} from {source} to {target}: the target must have the same "
                "shape, and must not have a Partial"
            )
        if (source, target) not in found:
            plan = plan_exchange(source.placed, target.placed)
            found[source, target] = SpecWay(source, target, plan)
        stays = source == target and name not in relabelled
        named.append(Named(name, found[source, target], stays))
    return tuple(named)


def _received_from(way: SpecWay, rank: int) -> tuple[int, int]:
    """How many elements a rank receives from its host, and from others."""
    found = [0, 0]
    for peer, several in own_part(way.plan.exchange, rank).taken.items():
        is_far = peer // DEVICES_PER_HOST != rank // DEVICES_PER_HOST
        found[is_far] += sum(message.size for message in several)
    return found[0], found[1]


def _meshes_text(ways: Iterable[SpecWay]) -> str:
    pairs = dict.fromkeys(way.meshes for way in ways)
    return "; ".join(f"{one} -> {other}" for one, other in pairs) or "on no mesh"
