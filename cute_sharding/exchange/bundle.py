"""The exchanges of many tensors in one: all that a rank sends another is one message.

In a message the tensors' parts follow one another as bytes: the widest elements first, so each
part starts at a multiple of its element size, without gaps. The message is padded to a multiple of
the widest element. Sender and receiver compute this order from the exchanges alone.

A tensor's message is sent by itself, before the packed one, if it is long and is one run of memory
in the source or in the target, so that it need not be copied there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

from cute_sharding._memory import remembered
from cute_sharding.exchange.exchange import Exchange
from cute_sharding.exchange.flow import ALL, Copy, Message, Turn, fold, in_turn, run_of
from cute_sharding.exchange.part import Part, copies_of
from cute_sharding.exchange.placed import standing_for_all
from cute_sharding.layout.layout import row_major

_Own = TypeVar("_Own", bound="Part | BundlePart")
ByPeer: TypeAlias = "Mapping[int, list[Message]]"

# The least bytes of a long message: to copy more takes longer than another message does.
LONG = 2 << 20


class Single(NamedTuple):
    """A message of one tensor that is sent by itself, as one of its two ranks sees it.

    Attributes:
        peer: the other rank.
        size: in elements.
        start: the start of its run in this rank's contiguous tensor; None: it is no run there.
        copies: between the tensor and a buffer of the message's own.
        is_run: whether it is a run in the sender's tensor. Those that are go first.
    """

    peer: int
    size: int
    start: int | None
    copies: tuple[Copy, ...]
    is_run: bool


class Alone(NamedTuple):
    """The messages of one tensor that a rank sends and receives by themselves."""

    sent: tuple[Single, ...] = ()
    taken: tuple[Single, ...] = ()


class Item(NamedTuple):
    """One tensor of a bundle (or operands and results of one relation).

    Attributes:
        exchange: who sends what to whom.
        itemsize: the bytes of an element while it travels.
        as_they_are: whether elements travel as they are in the source, and as they are in the
            target; otherwise they are cast there, or must not be sent by themselves.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows, columns = (Placed.of(Sharding((4, 6), (2,), (Shard(d),))) for d in (0, 1))
    >>> Item(Exchange(identity((4, 6)), (rows,), (columns,)), itemsize=2).alone(0)
    Alone(sent=(), taken=())
    """

    exchange: Exchange
    itemsize: int
    as_they_are: tuple[bool, bool] = (False, False)

    def alone(self, rank: int, long: int = 0) -> Alone:
        """The messages of this item that a rank sends and receives by themselves: those of at least
        ``long`` bytes.
        """
        least = max(-(-max(long, LONG) // self.itemsize), 1)
        return _alone(self.exchange, rank, least, self.as_they_are)

    def moved(self, rank: int) -> tuple[int, int]:
        """The bytes that a rank sends, and that it receives."""
        mine = own_part(self.exchange, rank)
        return size_of(mine.sent) * self.itemsize, size_of(mine.taken) * self.itemsize


@dataclass(frozen=True)
class BundlePart:
    """One rank's part in a bundle.

    Attributes:
        peers: the ranks that it sends to or receives from, ascending.
        sends, receives: bytes to and from each of them. In the buffers, messages are in the order
            of the peers.
        parts: its part in each exchange. Copies, ``sends`` and ``receives`` of a part count in
            elements of that exchange.
        alone: for each exchange the messages that are sent by themselves, not in the buffers.

    >>> BundlePart(peers=(1,), sends=(32,), receives=(8,), parts=()).singles(is_run=True)
    []
    """

    peers: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    parts: tuple[Part, ...]
    alone: tuple[Alone, ...] = ()

    def singles(self, *, is_run: bool) -> list[tuple[int, bool, Single]]:
        """Messages that are sent by themselves, in their order: (number of the exchange, whether
        this rank sends it, message).
        """
        return [
            (i, is_sent, single)
            for i, alone in enumerate(self.alone)
            for is_sent, some in ((True, alone.sent), (False, alone.taken))
            for single in some
            if single.is_run == is_run
        ]


def part_among(part: _Own, ranks: Sequence[int]) -> _Own:
    """The part with all of ``ranks`` as its peers, also those without messages. They must contain
    its own peers in the same order.

    >>> part = part_among(BundlePart((1, 3), (32, 8), (32, 0), ()), (0, 1, 2, 3))
    >>> part.peers, part.sends, part.receives
    ((0, 1, 2, 3), (0, 32, 0, 8), (0, 32, 0, 0))
    """
    sends, receives = (dict(zip(part.peers, n)) for n in (part.sends, part.receives))
    return replace(
        part,
        peers=tuple(ranks),
        sends=tuple([sends.get(peer, 0) for peer in ranks]),
        receives=tuple([receives.get(peer, 0) for peer in ranks]),
    )


@dataclass(frozen=True)
class Bundle:
    """Exchanges that run as one.

    Attributes:
        items: one for each tensor.
        long: the least bytes of a message that may be sent by itself; at least 2 MiB in any case.

    >>> from cute_sharding.exchange import Placed, identity
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> def rows_to_columns(shape):
    ...     one, two = (Placed.of(Sharding(shape, (2,), (Shard(d),))) for d in (0, 1))
    ...     return Exchange(identity(shape), (one,), (two,))
    >>> bundle = Bundle((Item(rows_to_columns((4, 6)), 4), Item(rows_to_columns((2, 2)), 8)))
    >>> part = bundle.part(0)
    >>> part.peers, part.sends, part.receives
    ((1,), (32,), (32,))
    >>> [p.packs[0][0].y for p in part.parts]  # in floats of four bytes, and of eight
    [(2,), (0,)]
    """

    items: tuple[Item, ...]
    long: int = 0

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The different exchanges: layers of a model have equal ones."""
        return tuple(dict.fromkeys(item.exchange for item in self.items))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all meshes, ascending."""
        return tuple(sorted({rank for each in self.exchanges for rank in each.ranks}))

    @cached_property
    def is_free(self) -> bool:
        """Whether no rank receives anything."""
        return all(each.is_free for each in self.exchanges)

    @cached_property
    def most_peers(self) -> int:
        """The most peers that a rank has, among the ranks looked at."""
        return max([len(self._peers(rank)) for rank in self.looked_at], default=0)

    def _peers(self, rank: int) -> set[int]:
        every = [own_part(each, rank) for each in self.exchanges]
        return {peer for own in every for side in (own.sent, own.taken) for peer in side}

    @cached_property
    def looked_at(self) -> tuple[int, ...]:
        """The ranks that stand for all ranks, on large meshes."""
        meshes = [p.mesh for each in self.exchanges for p in (*each.sources, *each.targets)]
        return tuple(standing_for_all(meshes))

    @cached_property
    def reaches_out(self) -> bool:
        """Whether a rank that is on no mesh of its sources is to have some of a result."""
        return any(
            not {r for p in each.targets for r in p.mesh.ranks}
            <= {r for p in each.sources for r in p.mesh.ranks}
            for each in self.exchanges
        )

    @cached_property
    def seal(self) -> bytes:
        """Eight bytes that are equal in all processes that have the same exchanges."""
        said = [(item.exchange.seal, item.itemsize) for item in self.items]
        return sha256(repr((said, self.long)).encode()).digest()[:8]

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is on one of the meshes."""
        return any(rank in each for each in self.exchanges)

    def received_by(self, rank: int) -> int:
        """The bytes that a rank receives."""
        received = {each: each.received_by(rank) for each in self.exchanges}
        return sum(received[item.exchange] * item.itemsize for item in self.items)

    @property
    def received_bytes(self) -> int:
        """The bytes that the busiest rank receives, of those looked at."""
        return max(map(self.received_by, self.looked_at), default=0)

    def amount(self, sender: int, receiver: int) -> int:
        """The bytes that a rank sends another; for one rank, the bytes that it keeps."""
        amounts = {each: each.amount(sender, receiver) for each in self.exchanges}
        return sum(amounts[item.exchange] * item.itemsize for item in self.items)

    def part(self, rank: int, room: int = 0, turn: Turn = ALL) -> BundlePart:
        """The part of a rank, which may be on none of the meshes.

        Args:
            room: the bytes that are left free in front of each message.
            turn: (number of the share of each message, number of shares). What the rank keeps is
                in the first.
        """
        mine = {each: own_part(each, rank, turn) for each in self.exchanges}
        alone = tuple([item.alone(rank, self.long) for item in self.items])
        sent = self._placed(
            [mine[i.exchange].sent for i in self.items], [a.sent for a in alone], room
        )
        taken = self._placed(
            [mine[i.exchange].taken for i in self.items], [a.taken for a in alone], room
        )
        peers = tuple(sorted({*sent.sizes, *taken.sizes}))
        return BundlePart(
            peers,
            tuple([sent.sizes.get(peer, 0) for peer in peers]),
            tuple([taken.sizes.get(peer, 0) for peer in peers]),
            tuple(
                [
                    _lay(item.exchange, mine[item.exchange], out, into)
                    for item, out, into in zip(self.items, sent.starts, taken.starts)
                ]
            ),
            alone,
        )

    def _placed(self, every: list[ByPeer], alone: list[tuple[Single, ...]], room: int) -> _Buffer:
        """The places of each item's packed messages in a buffer. With ``room``, a peer whose
        messages are all sent by themselves still gets an empty packed one.
        """
        of_items = [_without(some, singles) for some, singles in zip(every, alone)]
        widest = max([item.itemsize for item in self.items], default=1)
        order = sorted(range(len(self.items)), key=lambda i: -self.items[i].itemsize)
        starts: list[dict[int, int]] = [{} for _ in self.items]
        sizes, at = {}, 0
        for peer in sorted({peer for some in (every if room else of_items) for peer in some}):
            first = at
            at = _round_up(at + room, widest)
            for i in order:
                messages, width = of_items[i].get(peer, ()), self.items[i].itemsize
                if messages:
                    starts[i][peer] = at // width
                    at += width * sum(message.size for message in messages)
            at = _round_up(at, widest)
            sizes[peer] = at - first
        return _Buffer(sizes, starts)


class _Buffer(NamedTuple):
    """The bytes of each message, and for each item the starts of its parts, in its elements."""

    sizes: dict[int, int]
    starts: list[dict[int, int]]


class OwnPart(NamedTuple):
    """One rank's part in a single exchange, and its messages by peer, ascending."""

    part: Part
    sent: ByPeer
    taken: ByPeer

    @property
    def kept(self) -> int:
        """The number of elements that the rank copies from its own operands."""
        return sum(prod(copy.sizes) for _, _, copies in self.part.own for copy in copies)

    @property
    def needed(self) -> int:
        """The number of elements of the rank's results."""
        return sum(prod(shape) for shape in self.part.target_shapes if shape is not None)


def own_part(exchange: Exchange, rank: int, turn: Turn = ALL) -> OwnPart:
    """A rank's part in an exchange, or in a turn of it, and its messages."""
    return _own_part(exchange, rank, turn)


@remembered
def _own_part(exchange: Exchange, rank: int, turn: Turn) -> OwnPart:
    messages = [*in_turn(exchange.sent_by(rank), turn)], [*in_turn(exchange.sent_to(rank), turn)]
    part = exchange.part_of(rank, messages)
    mine = part if turn[0] == 0 else replace(part, own=())
    return OwnPart(mine, *map(_by_peer, messages))


def size_of(messages: ByPeer) -> int:
    """The number of elements of all messages."""
    return sum(message.size for some in messages.values() for message in some)


def _by_peer(messages: Iterable[Message]) -> ByPeer:
    found: dict[int, list[Message]] = {}
    for message in messages:
        found.setdefault(message.peer, []).append(message)
    return dict(sorted(found.items()))


def _lay(exchange: Exchange, mine: OwnPart, out: dict[int, int], into: dict[int, int]) -> Part:
    """The part, with messages at these starts of the buffers."""
    sent, taken = (_one_by_one(*side) for side in ((mine.sent, out), (mine.taken, into)))
    return replace(
        mine.part,
        packs=copies_of(sent, len(exchange.sources), into=False),
        unpacks=copies_of(taken, len(exchange.targets), into=True, adds=exchange.adds),
    )


def _one_by_one(by_peer: ByPeer, starts: dict[int, int]) -> Iterable[tuple[Message, int]]:
    """Each packed message, and its start in the buffer."""
    for peer, at in starts.items():
        for message in by_peer[peer]:
            yield message, at
            at += message.size


def _without(by_peer: ByPeer, singles: Iterable[Single]) -> ByPeer:
    """The messages that are packed."""
    apart = {single.peer for single in singles}
    return {peer: some for peer, some in by_peer.items() if peer not in apart}


@remembered
def _alone(exchange: Exchange, rank: int, least: int, as_they_are: tuple[bool, bool]) -> Alone:
    """The messages that a rank sends and receives by themselves: of those of at least so many
    elements, the ones that are a run where elements travel as they are.
    """
    if not any(as_they_are):
        return Alone()
    mine = own_part(exchange, rank)
    sent, taken = (
        [
            _single(exchange, rank, peer, messages, as_they_are, is_sent=is_sent)
            for peer, messages in by_peer.items()
            if sum(message.size for message in messages) >= least
        ]
        for by_peer, is_sent in ((mine.sent, True), (mine.taken, False))
    )
    return Alone(*(tuple([one for one in side if one is not None]) for side in (sent, taken)))


def _single(
    exchange: Exchange,
    rank: int,
    peer: int,
    messages: Sequence[Message],
    as_they_are: tuple[bool, bool],
    *,
    is_sent: bool,
) -> Single | None:
    sender, receiver = (rank, peer) if is_sent else (peer, rank)
    into, out_of = (in_a_row(messages, is_sent=side) for side in (True, False))
    starts = (
        _start_in(exchange.sources[0].local_shape(sender), into) if as_they_are[0] else None,
        _start_in(exchange.targets[0].local_shape(receiver), [c.flipped for c in out_of])
        if as_they_are[1]
        else None,
    )
    if starts == (None, None):
        return None
    size, copies = sum(message.size for message in messages), into if is_sent else out_of
    return Single(peer, size, starts[not is_sent], tuple(fold(copies)), starts[0] is not None)


def _start_in(shape: tuple[int, ...] | None, copies: Sequence[Copy]) -> int | None:
    """The start of the copied elements, if they are a run of a contiguous tensor of that shape."""
    return None if shape is None else run_of(copies, row_major(shape))


def in_a_row(messages: Iterable[Message], *, is_sent: bool) -> list[Copy]:
    """The copies of messages, one behind the other, into a buffer or out of it."""
    copies: list[Copy] = []
    at = 0
    for message in messages:
        for _, some in message.into(at) if is_sent else message.out_of(at):
            copies += some
        at += message.size
    return copies


def _round_up(at: int, width: int) -> int:
    return -(-at // width) * width
