"""Who sends what through a relation by pieces: of several operands and several results, between any
ranks.

What a rank needs of an operand is a relation, from the operand to the rank's results; so is what
ranks hold of it; and one after the other they are what the rank takes of those ranks
(:mod:`cute_sharding.relations`). Of that each element is sent once, however often it is needed: by
a cat of a tensor with itself, a repeat, or several results.

1. A rank keeps what it has itself.
2. Of ranks that hold the same, all send alike: what they are to send in all, receiver by receiver,
   is one row of elements, and each sends its share of it.

Both sides work out the same, from the relation and the shardings alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cute_sharding.exchange.copies import Copy
from cute_sharding.exchange.flow import Own
from cute_sharding.exchange.holders import (
    BUFFER,
    Holder,
    Holders,
    Line,
    copy_between,
    holders,
    line_of,
    numbered,
)
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.wants import Wanting, Wants
from cute_sharding.relations.elements import read_once
from cute_sharding.relations.piece import Piece, through
from cute_sharding.relations.relation import Relation
from cute_sharding.sharding.meeting import Run, count_rows, span


class Box(NamedTuple):
    """What ranks that need the same take of those that hold the same of an operand.

    Attributes:
        pieces: from places of the operand's local tensor to those of the results'.
        runs: these places, each once.
        size: how many they are.
    """

    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    size: int


class Share(NamedTuple):
    """What one rank sends another of one operand: of a box the elements from ``first`` on.

    Attributes:
        peer: the other rank.
        operand: its number.
        box, first, stop: the elements, by their number in the box.
        lines: as what elements of the sender's local tensor, or of the receiver's results, are
            counted.
    """

    peer: int
    operand: int
    box: Box
    first: int
    stop: int
    lines: tuple[Line, ...]

    @property
    def size(self) -> int:
        """In elements."""
        return self.stop - self.first

    @property
    def _numbered(self) -> list[Piece]:
        """From the sender's places to the elements, by number."""
        return numbered(span(self.box.runs, self.first, self.stop), 0)

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """As of any message."""
        pieces = [each._replace(y=each.y + at) for each in self._numbered]
        yield self.operand, [copy_between(each, self.lines[0], BUFFER) for each in pieces]

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """As of any message. An element may go to several places."""
        pieces = through([each.turned for each in self._numbered], self.box.pieces)
        for _, target, x, y, modes in pieces:
            copy = copy_between(Piece(0, 0, x + at, y, modes), BUFFER, self.lines[target])
            yield target, [copy]


@dataclass(frozen=True, eq=False)
class PieceFlow:
    """What flows from operands that lie as ``sources`` say to results that are to lie as
    ``targets`` say.

    Attributes:
        relation: of the results to the operands.
        sources, targets: each operand, and each result, on its mesh.
    """

    relation: Relation
    sources: tuple[Placed, ...]
    targets: tuple[Placed, ...]

    # -- who needs what ----------------------------------------------------------------------------

    @cached_property
    def _holders(self) -> tuple[Holders, ...]:
        return tuple(map(holders, self.sources))

    @cached_property
    def _wants(self) -> Wants:
        return Wants(self.relation, self.targets)

    @cached_property
    def _boxes(self) -> dict[tuple[int, Holder, Wanting], Box]:
        return {}

    def _box(self, operand: int, holder: Holder, wanting: Wanting) -> Box:
        """What ranks take of those that hold the same of an operand."""
        key = operand, holder, wanting
        if key not in self._boxes:
            wanted = self._wants.of(wanting, operand)
            has = [
                each._replace(target=operand)
                for each in (self._holders[operand].pieces(holder) if wanted else ())
            ]
            pieces = through(has, wanted)
            runs = tuple(read_once(pieces))
            self._boxes[key] = Box(pieces, runs, count_rows(runs))
        return self._boxes[key]

    # -- who sends what ----------------------------------------------------------------------------

    @cached_property
    def _shares(self) -> dict[tuple[bool, int], tuple[Share, ...]]:
        return {}

    def sent_by(self, rank: int) -> tuple[Share, ...]:
        """What a rank sends, operand by operand."""
        if (True, rank) not in self._shares:
            self._shares[True, rank] = tuple(self._sent(rank))
        return self._shares[True, rank]

    def sent_to(self, rank: int) -> tuple[Share, ...]:
        """What a rank receives, operand by operand."""
        if (False, rank) not in self._shares:
            self._shares[False, rank] = tuple(self._taken(rank))
        return self._shares[False, rank]

    def _sent(self, rank: int) -> Iterator[Share]:
        for k, source in enumerate(self._holders):
            holder = source.of_rank.get(rank)
            if holder is None:
                continue
            first, stop = self._share(k, holder, source.ranks[holder].index(rank))
            lines, at = (line_of(source.placed.local_shape(rank) or ()),), 0
            for wanting, takers in self._wants.takers.items():
                box = self._box(k, holder, wanting)
                for peer in takers if box.size else ():
                    if source.of_rank.get(peer) == holder:
                        continue
                    low, high = max(first - at, 0), min(stop - at, box.size)
                    if low < high:
                        yield Share(peer, k, box, low, high, lines)
                    at += box.size

    def _taken(self, rank: int) -> Iterator[Share]:
        wanting, lines = self._wants.wanting(rank), self._lines(rank)
        for k in self._operands(wanting):
            source = self._holders[k]
            for holder, senders in source.ranks.items():
                if source.of_rank.get(rank) == holder:
                    continue
                box = self._box(k, holder, wanting)
                if not box.size:
                    continue
                if len(senders) == 1:
                    yield Share(senders[0], k, box, 0, box.size, lines)
                    continue
                at = self._before(k, holder, rank)
                for i, sender in enumerate(senders):
                    first, stop = self._share(k, holder, i)
                    low, high = max(first - at, 0), min(stop - at, box.size)
                    if low < high:
                        yield Share(sender, k, box, low, high, lines)

    def _operands(self, wanting: Wanting) -> list[int]:
        """Those of which ranks need something."""
        return [k for k in self._wants.operands(wanting) if k >= 0]

    def _share(self, operand: int, holder: Holder, i: int) -> tuple[int, int]:
        """Of all that ranks which hold the same are to send, what the i-th of them sends."""
        many = len(self._holders[operand].ranks[holder])
        total = self._before(operand, holder, None)
        return i * total // many, (i + 1) * total // many

    def _before(self, operand: int, holder: Holder, rank: int | None) -> int:
        """How many elements are sent to those that come before a rank; None: to all."""
        of_rank = self._holders[operand].of_rank
        at = 0
        for wanting, takers in self._wants.takers.items():
            size = self._box(operand, holder, wanting).size
            for peer in takers if size else ():
                if peer == rank:
                    return at
                at += size * (of_rank.get(peer) != holder)
        return at

    def _lines(self, rank: int) -> tuple[Line, ...]:
        """As what the elements of a rank's results are counted."""
        return tuple([line_of(placed.local_shape(rank) or ()) for placed in self.targets])

    def own(self, rank: int) -> Iterator[Own]:
        """What a rank has itself of what it needs, operand by operand; constants are operands of
        one element behind the others.
        """
        wanting, lines = self._wants.wanting(rank), self._lines(rank)
        for k, pieces in self._kept(rank, wanting):
            shape = self.sources[k].local_shape(rank) if k >= 0 else (1,)
            onto: dict[int, list[Copy]] = {}
            for each in pieces:
                copy = copy_between(each, line_of(shape or ()), lines[each.target])
                onto.setdefault(each.target, []).append(copy)
            for target, copies in onto.items():
                yield k if k >= 0 else len(self.sources) - 1 - k, target, tuple(copies)

    def _kept(self, rank: int, wanting: Wanting) -> Iterator[tuple[int, Sequence[Piece]]]:
        """The same from places to places. The first constant is number -1."""
        for k in self._operands(wanting):
            holder = self._holders[k].of_rank.get(rank)
            if holder is not None and (box := self._box(k, holder, wanting)).size:
                yield k, box.pieces
        constants = [k for k in self._wants.operands(wanting) if k < 0]
        yield from ((k, self._wants.of(wanting, k)) for k in constants)

    # -- how much ----------------------------------------------------------------------------------

    def missed_by(self, rank: int) -> int:
        """How many elements a rank is to have and has not, each counted once."""
        wanting, missed = self._wants.wanting(rank), 0
        for k in self._operands(wanting):
            own = self._holders[k].of_rank.get(rank)
            others = [holder for holder in self._holders[k].ranks if holder != own]
            missed += sum(self._box(k, holder, wanting).size for holder in others)
        return missed

    def amount(self, sender: int, receiver: int) -> int:
        """How many elements a rank sends another; of one rank, how many it keeps."""
        if sender == receiver:
            return sum(
                self._box(k, holder, wanting).size
                for wanting in (self._wants.wanting(sender),)
                for k in self._operands(wanting)
                if (holder := self._holders[k].of_rank.get(sender)) is not None
            )
        return sum(share.size for share in self.sent_to(receiver) if share.peer == sender)
