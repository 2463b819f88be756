"""A plan for many tensors: which go together, what it takes, and that nothing is left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cute_sharding.exchange import Bundle, BundlePart, Network
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.exchange.meshes import plan_exchange
from cute_sharding.exchange.network import DEVICES_PER_HOST, LINK_ITEMSIZE, messages
from cute_sharding.exchange.plan import collectives, received_by
from cute_sharding.models.buckets import SHARE, Bucket, buckets, peak
from cute_sharding.models.tensor import PlacedTensor
from cute_sharding.models.way import SpecWay


class Named(NamedTuple):
    """A tensor by its name, its way, and whether it stays as it is."""

    name: str
    way: SpecWay
    stays: bool


class Packed(NamedTuple):
    """Tensors that go in one exchange.

    Attributes:
        members: their numbers in the plan.
        bundle: what goes where, an item for each of them.
        follows_at_once: whether it is packed, and sent, before the one in front is unpacked.
    """

    members: tuple[int, ...]
    bundle: Bundle
    follows_at_once: bool


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
class ReshardPlan:
    """How many tensors get from some meshes to others.

    On more than 64 ranks the first, a middle and the last coordinates of each mesh dim stand for
    the others, in all that is said of the busiest rank.

    Attributes:
        tensors: each of them with its way.
        packed: which go together, in the order in which they run.
        memory_limit: the most bytes that a rank may hold, or None.
        network: the links: within hosts of eight ranks, numbered one behind the other, its inner
            one, and between hosts its slowest; timed for elements of two bytes.

    >>> one, other = (PlacedTensor.of((8, 6), (2,), f"S({d})", "bfloat16") for d in (0, 1))
    >>> plan = plan_models((f"layers.{i}", one, other) for i in range(9))
    >>> plan.collectives, plan.received_bytes, plan.lower_bound, plan.coverage.is_whole
    (1, 216, 216, True)
    """

    tensors: tuple[Named, ...]
    packed: tuple[Packed, ...]
    memory_limit: int | None = None
    network: Network | None = None

    @cached_property
    def ways(self) -> dict[SpecWay, list[str]]:
        """The different ways, and the names of the tensors that go them."""
        found: dict[SpecWay, list[str]] = {}
        for name, way, _ in self.tensors:
            found.setdefault(way, []).append(name)
        return found

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all meshes, ascending."""
        return tuple(sorted({r for way in self.ways for r in way.plan.exchange.ranks}))

    @cached_property
    def looked_at(self) -> tuple[int, ...]:
        """The ranks that stand for all."""
        return looked_at(self.ways)

    def parts(self, rank: int) -> tuple[BundlePart, ...]:
        """A rank's part in each bucket, for who would move the bytes by other means: bytes to and
        from each peer; and of each tensor (``packed`` says which of ``tensors`` are in a bucket)
        strided copies from its local tensor into a buffer, and out of one into what is to be, both
        contiguous. A tensor is in the buffers in the smaller of its two dtypes.

        Raises:
            ValueError: something is pending, which no copy finishes.

        >>> one, other = (PlacedTensor.of((4, 6), (2,), f"S({d})") for d in (0, 1))
        >>> (part,) = plan_models([("w", one, other)]).parts(0)
        >>> part.peers, part.sends, part.receives
        ((1,), (24,), (24,))
        >>> part.parts[0].packs[0][0]
        Copy(sizes=(2, 3), x=(0, 3), dx=((1, 0), (0, 1)), y=(0,), dy=((3,), (1,)))
        """
        for name, way, _ in self.tensors:
            if way.plan.steps:
                raise ValueError(
                    "plan.parts(rank) cannot describe the reduction of a Partial, but the source "
                    f"of {name} is {way.source}: first redistribute {name} to Shard or Replicate"
                )
        return tuple([_all_packed(each.bundle).part(rank) for each in self.packed])

    @property
    def collectives(self) -> int:
        """How many collectives it is, or batches of point-to-point messages; with those that finish
        what is pending, which is done tensor by tensor.
        """
        between = sum(not each.bundle.is_free for each in self.packed)
        return between + sum(collectives(way.plan.steps) for _, way, _ in self.tensors)

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
        return max(
            [
                sum(
                    way.plan.exchange.received_by(rank) * way.item.itemsize * len(names)
                    for way, names in self.ways.items()
                )
                for rank in self.looked_at
            ],
            default=0,
        )

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
        long = self.packed[0].bundle.long if self.packed else 0
        loads = {way: tuple([way.load(rank, long) for rank in self.looked_at]) for way in self.ways}
        found = [Bucket(each.members, each.follows_at_once) for each in self.packed]
        keeps = self.memory_limit is None
        return peak([loads[way] for _, way, _ in self.tensors], found, keeps=keeps)

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

    def _repr_html_(self) -> str:
        from cute_sharding._html import of_data

        return of_data(f"redistribution of {len(self.tensors)} tensors", self.to_dict())

    def __str__(self) -> str:
        many, kinds = _many(len(self.tensors), "tensor"), _many(len(self.ways), "kind")
        lines = [f"{many} of {kinds}, {_meshes_text(self.ways)}"]
        for way, names in self.ways.items():
            times = f"{len(names)} x " if len(names) > 1 else ""
            kind = "nothing" if way.source == way.target else way.plan.kind
            lines.append(f"  {times}{names[0]}: {way.source} -> {way.target}: {kind}")
        for k, each in enumerate(self.packed):
            at_once = ", while the one before is unpacked" if each.follows_at_once else ""
            many = _many(len(each.members), "tensor")
            lines.append(
                f"bucket {k}: {many}, {each.bundle.received_bytes:,} bytes received{at_once}"
            )
        near, far = self.received_by_link.values()
        needed, kept, received = self.coverage
        return "\n".join(
            [
                *lines,
                f"in all: {_many(self.collectives, 'collective')}, {self.received_bytes:,} bytes "
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
    return ReshardPlan(tuple(named), pack(named, memory_limit), memory_limit, network)


def pack(tensors: Sequence[Named], memory_limit: int | None) -> tuple[Packed, ...]:
    """Which tensors go together: those between the same two meshes, as many as the limit admits. A
    message goes by itself only if it is an eighth of what the busiest rank sends and receives: so
    there are few.

    Raises:
        ValueError: no plan keeps within the limit.
    """
    ways = dict.fromkeys(way for _, way, _ in tensors)
    ranks = looked_at(ways)
    moving = [way for _, way, stays in tensors if not stays]
    long = max([sum(way.moved(rank) for way in moving) for rank in ranks], default=0) // SHARE
    loads = {way: tuple([way.load(rank, long) for rank in ranks]) for way in ways}
    kinds = [None if stays else way.meshes for _, way, stays in tensors]
    found = buckets([loads[way] for _, way, _ in tensors], memory_limit, kinds)
    return tuple(
        [
            Packed(members, Bundle(tuple([tensors[i].way.item for i in members]), long), at_once)
            for members, at_once in found
        ]
    )


def _all_packed(bundle: Bundle) -> Bundle:
    """The same with nothing that goes by itself."""
    return Bundle(tuple([item._replace(as_they_are=(False, False)) for item in bundle.items]))


def looked_at(ways: Iterable[SpecWay]) -> tuple[int, ...]:
    """The ranks that stand for all."""
    return Bundle(tuple([way.item for way in ways])).looked_at


def _received_from(way: SpecWay, rank: int) -> tuple[int, int]:
    """How many elements a rank receives from its host, and from others."""
    found = [0, 0]
    for peer, several in own_part(way.plan.exchange, rank).taken.items():
        is_far = peer // DEVICES_PER_HOST != rank // DEVICES_PER_HOST
        found[is_far] += sum(message.size for message in several)
    return found[0], found[1]


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _meshes_text(ways: Iterable[SpecWay]) -> str:
    pairs = dict.fromkeys(way.meshes for way in ways)
    return "; ".join(f"{one} -> {other}" for one, other in pairs) or "on no mesh"
