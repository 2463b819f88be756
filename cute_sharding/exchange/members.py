"""Several exchanges as one: one rank's part in all of them, as strided copies and one buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.by_pieces import PieceExchange, Share
from cute_sharding.exchange.copies import Copy
from cute_sharding.exchange.holders import BUFFER, Line, copy_between, line_of
from cute_sharding.exchange.part import Part
from cute_sharding.relations.piece import Piece, joined


class Member(NamedTuple):
    """An exchange among others that run as one.

    Attributes:
        exchange: the exchange.
        operands: the numbers that its operands have among those of all, and behind these its
            constants.
        results: those of its results.

    >>> from cute_sharding.exchange import Placed
    >>> from cute_sharding.movement import of_move
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> half, fused = (Placed.of(Sharding((n, 6), (2,), (Shard(0),))) for n in (4, 8))
    >>> cat = of_move("torch.cat", [(4, 6), (4, 6)], 0)
    >>> part = part_of([Member.of(PieceExchange(cat, (half, half), (fused,)))], 1)
    >>> part.peers, part.sends, part.receives  # the first operand goes to 0, the second to 1
    ((0,), (12,), (12,))
    """

    exchange: PieceExchange
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, exchange: PieceExchange) -> Member:
        """An exchange by itself: constants are operands of one element behind the others."""
        operands = range(len(exchange.sources) + len(exchange.relation.constants))
        return cls(exchange, tuple(operands), tuple(range(len(exchange.targets))))

    def operand(self, k: int) -> int:
        """The number of an operand; of a constant, where it is below 0."""
        return self.operands[k if k >= 0 else len(self.exchange.sources) - 1 - k]


class _Messages:
    """The messages of several exchanges in one buffer: peer by peer, those of each exchange one
    after the other. Where each begins, and how many elements a peer gets.
    """

    def __init__(self, shares: Sequence[tuple[Member, Share]]) -> None:
        in_order = sorted(range(len(shares)), key=lambda i: shares[i][1].peer)  # stable
        self.shares = [shares[i] for i in in_order]
        self.sizes: dict[int, int] = defaultdict(int)
        self.starts: list[int] = []
        at = 0
        for _, share in self.shares:
            self.starts.append(at)
            self.sizes[share.peer] += share.stop - share.first
            at += share.stop - share.first


def part_of(members: Sequence[Member], rank: int, some: Collection[int] | None = None) -> Part:
    """One rank's part in several exchanges that run as one, of local tensors that are contiguous.
    ``some``: of these operands alone, as of those of one dtype.
    """

    def shares(function: Callable[[PieceExchange, int], Sequence[Share]]) -> _Messages:
        return _Messages(
            [
                (member, share)
                for member in members
                for share in function(member.exchange, rank)
                if some is None or member.operand(share.operand) in some
            ]
        )

    out, into = shares(PieceExchange.sent), shares(PieceExchange.taken)
    own = [
        entry
        for member in members
        for k, pieces in member.exchange.kept(rank)
        if some is None or member.operand(k) in some
        for entry in _own(rank, member, k, pieces)
    ]
    peers = tuple(sorted({*out.sizes, *into.sizes}))
    targets = {n: t for m in members for n, t in zip(m.results, m.exchange.targets)}
    shapes = tuple([targets[n].local_shape(rank) for n in sorted(targets)])
    unpacks = _unpacks(into, shapes)
    return Part(
        peers,
        tuple([out.sizes.get(peer, 0) for peer in peers]),
        tuple([into.sizes.get(peer, 0) for peer in peers]),
        _packs(rank, out, 1 + max([k for member in members for k in member.operands], default=-1)),
        tuple(own),
        unpacks,
        shapes,
        tuple([_is_filled(k, shape, unpacks[k], own) for k, shape in enumerate(shapes)]),
    )


def _packs(rank: int, out: _Messages, operands: int) -> tuple[tuple[Copy, ...], ...]:
    packs: list[list[Piece]] = [[] for _ in range(operands)]
    lines: dict[int, Line] = {}
    for (member, share), at in zip(out.shares, out.starts):
        number = member.operand(share.operand)
        shape = member.exchange.sources[share.operand].local_shape(rank)
        lines[number] = line_of(shape or ())
        pieces, _ = member.exchange.message(share)
        packs[number] += [Piece(0, 0, x, y + at, modes) for _, _, x, y, modes in pieces]
    return tuple(
        [
            tuple([copy_between(each, lines[k], BUFFER) for each in joined(pieces)])
            for k, pieces in enumerate(packs)
        ]
    )


def _unpacks(
    into: _Messages, shapes: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[Copy, ...], ...]:
    """From the receive buffer to the results: an element may go to several places."""
    pieces: list[list[Piece]] = [[] for _ in shapes]
    for (member, share), at in zip(into.shares, into.starts):
        for _, target, x, y, modes in member.exchange.message(share)[1]:
            number = member.results[target]
            pieces[number].append(Piece(0, 0, x + at, y, modes))
    return tuple(
        [
            tuple([copy_between(each, BUFFER, line_of(shape or ())) for each in joined(some)])
            for some, shape in zip(pieces, shapes)
        ]
    )


def _own(
    rank: int, member: Member, k: int, pieces: Sequence[Piece]
) -> Iterator[tuple[int, int, tuple[Copy, ...]]]:
    exchange = member.exchange
    line = line_of(exchange.sources[k].local_shape(rank) or ()) if k >= 0 else BUFFER
    by_result: dict[int, list[Copy]] = {}
    for each in pieces:
        onto = line_of(exchange.targets[each.target].local_shape(rank) or ())
        by_result.setdefault(each.target, []).append(copy_between(each, line, onto))
    for t, copies in by_result.items():
        yield member.operand(k), member.results[t], tuple(copies)


def _is_filled(
    k: int,
    shape: tuple[int, ...] | None,
    unpacks: Sequence[Copy],
    own: Sequence[tuple[int, int, tuple[Copy, ...]]],
) -> bool:
    if shape is None:
        return False
    copies = [*unpacks, *(copy for _, result, some in own if result == k for copy in some)]
    return sum(prod(copy.sizes) for copy in copies) < prod(shape)
