"""One exchange through a relation, between any ranks: every element that a rank needs and does not
hold reaches it once.

Operands lie on the ranks of one mesh and results on those of another, which may be the same ranks
under other coordinates, or share some or none with it. Ranks that differ on mesh dims which cut an
operand hold different rows of it, so these coordinates number the *classes* of ranks that hold the
same. What a rank needs of a class is a box: dim by dim the meeting of the rows that the class
holds, taken through the relation, with those that the rank is to hold.

1. A rank keeps what its own class has of what it needs.
2. The other classes each send it their box. Of a class with several ranks, all send alike: the
   receivers share the interval [0, 1) evenly, in the order of their coordinates, and so do the
   ranks of the class. Each sends to the receivers that its interval overlaps, and of a box as large
   a share as overlaps.

Both sides work out the same, from the two shardings alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import product
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.meetings import Met, met, of_every, of_one
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.takers import Takers, device_at, overlap
from cute_sharding.layout import coalesce
from cute_sharding.movement.exchange import copy_of
from cute_sharding.movement.moves import Link, Move
from cute_sharding.movement.rows import Rows, between, needed
from cute_sharding.redistribution.chains import Device
from cute_sharding.redistribution.copies import Copy, fills, folded, packed
from cute_sharding.redistribution.cost import coordinates
from cute_sharding.redistribution.step import layout_of
from cute_sharding.sharding.meeting import Runs, count_rows


class Message(NamedTuple):
    """What one rank sends another through one link: for each dim of the link, rows x of the sender
    and y of the receiver.
    """

    peer: int
    link: Link
    runs: tuple[Runs, ...]

    @property
    def size(self) -> int:
        """In elements."""
        return prod(map(count_rows, self.runs))

    @property
    def copies(self) -> list[Copy]:
        """One for each choice of one run of each dim."""
        return [copy_of(self.link, runs) for runs in product(*self.runs)]


class Part(NamedTuple):
    """One rank's part in an exchange.

    Attributes:
        peers: the ranks that it sends to or receives from, ascending.
        sends, receives: elements to and from each of them.
        packs: for each operand, copies into the send buffer, in which messages lie in the order of
            the peers.
        own: for each operand and result, copies from the one to the other.
        unpacks: for each result, copies out of the receive buffer.
        target_shapes: of each result what the rank is to hold; None where it is not on its mesh.
        filled: whether each result has rows that nothing is copied to.
    """

    peers: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    packs: tuple[tuple[Copy, ...], ...]
    own: tuple[tuple[int, int, tuple[Copy, ...]], ...]
    unpacks: tuple[tuple[Copy, ...], ...]
    target_shapes: tuple[tuple[int, ...] | None, ...]
    filled: tuple[bool, ...]


def identity(shape: Sequence[int]) -> Move:
    """The relation of a redistribution: every row is made of itself.

    >>> identity((4, 6)).outputs
    ((4, 6),)
    """
    pairs = tuple([(Rows(d), Rows(d)) for d in range(len(shape))])
    return Move((tuple(shape),), (tuple(shape),), (Link(0, 0, pairs),))


@dataclass(frozen=True)
class Exchange:
    """From operands that lie as ``sources`` say to results that are to lie as ``targets`` say.

    Attributes:
        move: the relation, on the global shapes; :func:`identity` redistributes.
        sources, targets: each operand, and each result, on its mesh.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))  # ranks 0 and 1
    >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (1, 2, 3))
    >>> part = Exchange(identity((8, 6)), (rows,), (columns,)).part(1)
    >>> part.peers, part.sends, part.receives
    ((0, 2, 3), (0, 8, 8), (8, 0, 0))
    """

    move: Move
    sources: tuple[Placed, ...]
    targets: tuple[Placed, ...]

    # -- how much ----------------------------------------------------------------------------------

    @cached_property
    def received_elements(self) -> int:
        """What the busiest rank receives: what it needs and does not hold.

        On meshes of more than 64 ranks the first, a middle and the last coordinates of each mesh
        dim stand for the others.
        """
        return max([self.received_by(rank) for rank in self._looked_at], default=0)

    @cached_property
    def received_by_all(self) -> int:
        """What all ranks receive together; on large meshes as if each received what the busiest
        does.
        """
        if not self._looks_at_all:
            return self.received_elements * len({*self._wanting})
        return sum(map(self.received_by, self._looked_at))

    @property
    def _wanting(self) -> list[int]:
        return [rank for target in self.targets for rank in target.mesh.ranks]

    @cached_property
    def is_free(self) -> bool:
        """Whether no rank is known to receive anything: all were looked at, or both shardings are
        the same layout of the same ranks, whatever the shapes of the meshes are.
        """
        return not self.received_elements and (self._looks_at_all or self._is_one_layout)

    @cached_property
    def _is_one_layout(self) -> bool:
        """Whether it redistributes, and the layouts ((ranks), (local)) -> flat index agree."""
        plain = [one.is_plain and other.is_plain for one, other in self.move.links[0].pairs]
        if len(self._all) != 2 or not all(plain):
            return False
        source, target = self._all
        layouts = [layout_of(each.shape, each.chains, each.mesh.sizes) for each in self._all]
        if source.shape != target.shape or None in layouts:
            return False
        one, other = ((coalesce(each[0]), coalesce(each[1])) for each in layouts if each)
        return one == other and [*source.mesh.ranks] == [*target.mesh.ranks]

    @cached_property
    def is_in_place(self) -> bool:
        """Whether each rank's results lie as its operands do, of those looked at."""
        parts = map(self.part, self._looked_at)
        return self.is_free and all(
            shape is None or 0 in shape or _is_whole(part, k, shape)
            for part in parts
            for k, shape in enumerate(part.target_shapes)
        )

    @cached_property
    def peak_elements(self) -> int:
        """The most elements that a rank holds at once: operands, results, and what is sent and
        received between.
        """
        most = 0
        for rank in self._looked_at:
            shapes = [placed.local_shape(rank) for placed in self._all]
            held = sum(prod(shape) for shape in shapes if shape is not None)
            most = max(most, held + sum(message.size for message in self._messages(rank)))
        return most

    @cached_property
    def most_peers(self) -> int:
        """With how many others a rank exchanges messages, at the most, of those looked at."""
        peers = ({message.peer for message in self._messages(rank)} for rank in self._looked_at)
        return max(map(len, peers), default=0)

    def _messages(self, rank: int) -> Iterator[Message]:
        """What a rank sends, and what it receives."""
        yield from self.sent(rank)
        yield from self.taken(rank)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all the meshes, ascending."""
        return tuple(sorted({r for placed in self._all for r in placed.mesh.ranks}))

    @cached_property
    def seal(self) -> bytes:
        """Eight bytes that are the same where all shardings are, in every process."""
        said = [(p.shape, p.mesh.sizes, [*p.mesh.ranks], p.chains) for p in self._all]
        return sha256(repr(said).encode()).digest()[:8]

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is on one of the meshes."""
        return any(placed.mesh.coordinates(rank) is not None for placed in self._all)

    @property
    def _all(self) -> tuple[Placed, ...]:
        return (*self.sources, *self.targets)

    @cached_property
    def _looked_at(self) -> list[int]:
        meshes = dict.fromkeys(placed.mesh for placed in self._all)
        return sorted(
            {
                mesh.rank(device)
                for mesh in meshes
                for device in product(*(coordinates(n, len(mesh.ranks)) for n in mesh.sizes))
            }
        )

    @property
    def _looks_at_all(self) -> bool:
        return len(self._looked_at) == len(self.ranks)

    def received_by(self, rank: int) -> int:
        """What one rank receives, in elements."""
        if self.move.adds:
            return sum(message.size for message in self.taken(rank))
        total = 0
        for link in self.move.links:
            wanted = self.targets[link.target].mesh.coordinates(rank)
            if wanted is None:
                continue
            source, target = self.sources[link.source], self.targets[link.target]
            need = prod(
                count_rows(
                    needed(one, of_every(source, one)[0], other, *of_one(target, other, wanted))
                )
                for one, other in link.pairs
            )
            own = self._kept(link, rank)
            total += need - (0 if own is None else own.size)
        return total

    # -- who sends what ----------------------------------------------------------------------------

    def _kept(self, link: Link, rank: int) -> Message | None:
        """What a rank has itself of what it needs."""
        had = self.sources[link.source].mesh.coordinates(rank)
        wanted = self.targets[link.target].mesh.coordinates(rank)
        if had is None or wanted is None:
            return None
        runs = self._box(link, had, wanted)
        return Message(rank, link, runs) if all(runs) else None

    def sent(self, rank: int) -> Iterator[Message]:
        """What a rank sends, receiver by receiver."""
        for link in self.move.links:
            source, target = self.sources[link.source], self.targets[link.target]
            device = source.mesh.coordinates(rank)
            takers = None if device is None else self._takers(link, device)
            if device is None or takers is None:
                continue
            k, owners = source.number_of_replica(device), source.replicas
            for i in range(k * takers.many // owners, -(-(k + 1) * takers.many // owners)):
                receiver, runs = takers.at(i)
                peer = target.mesh.rank(receiver)
                if not self._holds_it(source, peer, device):
                    some = overlap(runs, i, takers.many, k, owners)
                    if some is not None:
                        yield Message(peer, link, some)

    def taken(self, rank: int) -> Iterator[Message]:
        """What a rank receives, sender by sender."""
        for link in self.move.links:
            source, target = self.sources[link.source], self.targets[link.target]
            device = target.mesh.coordinates(rank)
            if device is None:
                continue
            every = [zip(found.places, found.runs) for found in self._givers(link, device)]
            for some in product(*every):
                runs = tuple([found for _, found in some])
                holder = device_at(source, [at for place, _ in some for at in place], 0)
                if self._holds_it(source, rank, holder):
                    continue
                if source.replicas == 1:
                    yield Message(source.mesh.rank(holder), link, runs)
                    continue
                yield from self._shares(link, holder, device, runs)

    def _shares(
        self, link: Link, holder: Device, receiver: Device, runs: tuple[Runs, ...]
    ) -> Iterator[Message]:
        """What each of those that hold the same sends of a box."""
        source = self.sources[link.source]
        takers = self._takers(link, holder)
        assert takers is not None, "the receiver is one"
        i, owners = takers.number(receiver), source.replicas
        place = [(m, holder[m]) for m in source.cut]
        for k in range(i * owners // takers.many, -(-(i + 1) * owners // takers.many)):
            part = overlap(runs, i, takers.many, k, owners)
            if part is not None:
                yield Message(source.mesh.rank(device_at(source, place, k)), link, part)

    def _holds_it(self, source: Placed, rank: int, holder: Device) -> bool:
        """Whether a rank holds the same as ``holder``."""
        device = source.mesh.coordinates(rank)
        return device is not None and all(device[m] == holder[m] for m in source.cut)

    def _takers(self, link: Link, holder: Device) -> Takers | None:
        """Those that need something of what a device holds; None: nobody."""
        source, target = self.sources[link.source], self.targets[link.target]
        mets = [
            met(one, *of_one(source, one, holder), other, *of_every(target, other), False)
            for one, other in link.pairs
        ]
        return Takers(target, tuple(mets)) if all(found.places for found in mets) else None

    def _givers(self, link: Link, wanted: Device) -> list[Met]:
        """Dim by dim, who has something of what a device needs."""
        source, target = self.sources[link.source], self.targets[link.target]
        return [
            met(other, *of_one(target, other, wanted), one, *of_every(source, one), True)
            for one, other in link.pairs
        ]

    def _box(self, link: Link, had: Device, wanted: Device) -> tuple[Runs, ...]:
        """What one device holds and another needs."""
        source, target = self.sources[link.source], self.targets[link.target]
        return tuple(
            [
                between(one, *of_one(source, one, had), other, *of_one(target, other, wanted))
                for one, other in link.pairs
            ]
        )

    def amount(self, sender: int, receiver: int) -> int:
        """How many elements a rank sends another, found out for these two alone; of one rank, how
        many it keeps.

        >>> from cute_sharding.sharding import Replicate, Shard, Sharding
        >>> copies = Placed.of(Sharding((8, 6), (2,), (Replicate(),)))
        >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)), (1, 2))
        >>> exchange = Exchange(identity((8, 6)), (copies,), (rows,))
        >>> exchange.amount(1, 1), exchange.amount(1, 2), exchange.amount(2, 1)
        (24, 24, 0)
        """
        return sum(self._amount(link, sender, receiver) for link in self.move.links)

    def _amount(self, link: Link, sender: int, receiver: int) -> int:
        source = self.sources[link.source]
        had = source.mesh.coordinates(sender)
        wanted = self.targets[link.target].mesh.coordinates(receiver)
        if had is None or wanted is None:
            return 0
        is_sent = sender != receiver
        if is_sent and self._holds_it(source, receiver, had):
            return 0
        runs: tuple[Runs, ...] | None = self._box(link, had, wanted)
        if runs and not all(runs):
            return 0
        if is_sent and runs is not None and source.replicas > 1:
            takers = self._takers(link, had)
            assert takers is not None, "the receiver is one"
            i, k = takers.number(wanted), source.number_of_replica(had)
            runs = overlap(runs, i, takers.many, k, source.replicas)
        return 0 if runs is None else prod(map(count_rows, runs))

    # -- on one rank -------------------------------------------------------------------------------

    def part(self, rank: int, room: int = 0) -> Part:
        """The part of a rank, of one of the meshes, both or neither. In front of each message there
        is ``room`` for so many elements more.
        """
        out, into = (
            sorted(messages, key=lambda message: message.peer)
            for messages in (self.sent(rank), self.taken(rank))
        )
        packs: list[list[Copy]] = [[] for _ in self.sources]
        unpacks: list[list[list[Copy]]] = [[] for _ in self.targets]
        sends: dict[int, int] = defaultdict(int)
        receives: dict[int, int] = defaultdict(int)
        at = 0
        for message in out:
            at += room
            for copy in message.copies:
                packs[message.link.source].append(packed(copy, at))
                at += prod(copy.sizes)
            sends[message.peer] += message.size + room
        at = 0
        for message in into:
            some = []
            at += room
            for copy in message.copies:
                some.append(packed(copy.flipped, at).flipped)
                at += prod(copy.sizes)
            unpacks[message.link.target].append(some)
            receives[message.peer] += message.size + room
        kept = [found for link in self.move.links if (found := self._kept(link, rank))]
        own = [(m.link.source, m.link.target, tuple(folded(m.copies))) for m in kept]
        peers = tuple(sorted({*sends, *receives}))
        shapes = tuple([target.local_shape(rank) for target in self.targets])
        return Part(
            peers,
            tuple([sends[peer] for peer in peers]),
            tuple([receives[peer] for peer in peers]),
            tuple([tuple(folded(some)) for some in packs]),
            tuple(own),
            tuple([tuple(self._unpacked(some)) for some in unpacks]),
            shapes,
            tuple([self._is_filled(k, shape, unpacks[k], own) for k, shape in enumerate(shapes)]),
        )

    def _unpacked(self, by_message: Sequence[Sequence[Copy]]) -> list[Copy]:
        """Of a sum, those of each message by themselves: they reach the same rows."""
        if self.move.adds:
            return [copy for some in by_message for copy in folded(some)]
        return folded([copy for some in by_message for copy in some])

    def _is_filled(
        self,
        k: int,
        shape: tuple[int, ...] | None,
        unpacks: Sequence[Sequence[Copy]],
        own: Sequence[tuple[int, int, tuple[Copy, ...]]],
    ) -> bool:
        if shape is None:
            return False
        copies = [copy for some in unpacks for copy in some]
        copies += [copy for _, result, some in own if result == k for copy in some]
        return self.move.adds or sum(prod(copy.sizes) for copy in copies) < prod(shape)


def _is_whole(part: Part, k: int, shape: tuple[int, ...]) -> bool:
    """Whether a result is one operand as it lies."""
    own = [copy for _, onto, copies in part.own if onto == k for copy in copies]
    return fills(tuple(own), shape) and fills((own[0].flipped,), shape)
