"""One exchange through any relation, between any ranks: of several operands and several results.

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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.holders import Holder, Holders, holders, numbered
from cute_sharding.exchange.placed import Mesh, Placed, standing_for_all
from cute_sharding.relations.elements import read_once
from cute_sharding.relations.piece import Piece, through
from cute_sharding.relations.relation import Relation
from cute_sharding.sharding.meeting import Run, count_rows, span

# The coordinates of a rank on each mesh that results are on, as far as they tell what it needs.
Wanting: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


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
        holder: what the sender holds of it.
        box, first, stop: the elements, by their number in the box.
    """

    peer: int
    operand: int
    holder: Holder
    box: Box
    first: int
    stop: int

    @property
    def runs(self) -> tuple[Run, ...]:
        """The places, in the operand's local tensor."""
        return span(self.box.runs, self.first, self.stop)


@dataclass(frozen=True, eq=False)
class PieceExchange:
    """From operands that lie as ``sources`` say to results that are to lie as ``targets`` say.

    Attributes:
        relation: of the results to the operands.
        sources, targets: each operand, and each result, on its mesh.

    >>> from cute_sharding.movement import of_move
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> halves = [Placed.of(Sharding((4, 6), (2,), (Shard(0),))) for _ in range(2)]
    >>> fused = Placed.of(Sharding((8, 6), (2,), (Shard(0),)), (1, 2))
    >>> cat = of_move("torch.cat", [(4, 6), (4, 6)], 0)
    >>> exchange = PieceExchange(cat, tuple(halves), (fused,))
    >>> exchange.received_by(1), exchange.received_by(2)  # 1 is to have all of the first operand
    (12, 24)
    """

    relation: Relation
    sources: tuple[Placed, ...]
    targets: tuple[Placed, ...]

    # -- who needs what ----------------------------------------------------------------------------

    @cached_property
    def _holders(self) -> tuple[Holders, ...]:
        return tuple(map(holders, self.sources))

    @cached_property
    def _results(self) -> tuple[Holders, ...]:
        return tuple(map(holders, self.targets))

    @cached_property
    def _cuts(self) -> dict[Mesh, list[int]]:
        """The mesh dims that cut some result, of each mesh that has results."""
        found: dict[Mesh, set[int]] = {}
        for target in self.targets:
            found.setdefault(target.mesh, set()).update(target.cut)
        return {mesh: sorted(dims) for mesh, dims in found.items()}

    def _wanting(self, rank: int) -> Wanting:
        """Ranks of which that is the same need the same."""
        found = []
        for target in dict.fromkeys(target.mesh for target in self.targets):
            device = target.coordinates(rank)
            dims = self._cuts[target]
            found.append(None if device is None else tuple([device[m] for m in dims]))
        return tuple(found)

    @cached_property
    def _takers(self) -> dict[Wanting, list[int]]:
        """Those that need the same, ascending."""
        found: dict[Wanting, list[int]] = {}
        for rank in sorted({rank for target in self.targets for rank in target.mesh.ranks}):
            found.setdefault(self._wanting(rank), []).append(rank)
        return found

    @cached_property
    def _wants(self) -> dict[Wanting, dict[int, list[Piece]]]:
        return {}

    def _wanted(self, wanting: Wanting) -> dict[int, list[Piece]]:
        """What ranks need of each operand: from its elements to places of their results."""
        if wanting not in self._wants:
            rank = self._takers[wanting][0]
            locals_ = [
                each.turned._replace(source=t, target=t)
                for t, some in enumerate(self._results)
                if rank in some.of_rank
                for each in some.pieces(some.of_rank[rank])
            ]
            found: dict[int, list[Piece]] = {}
            for each in through(self.relation.pieces, locals_):
                found.setdefault(each.source, []).append(each)
            self._wants[wanting] = found
        return self._wants[wanting]

    @cached_property
    def _boxes(self) -> dict[tuple[int, Holder, Wanting], Box]:
        return {}

    def _box(self, operand: int, holder: Holder, wanting: Wanting) -> Box:
        """What ranks take of those that hold the same of an operand."""
        key = operand, holder, wanting
        if key not in self._boxes:
            wanted = self._wanted(wanting).get(operand, ())
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

    def sent(self, rank: int) -> tuple[Share, ...]:
        """What a rank sends, operand by operand."""
        if (True, rank) not in self._shares:
            self._shares[True, rank] = tuple(self._sent(rank))
        return self._shares[True, rank]

    def taken(self, rank: int) -> tuple[Share, ...]:
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
            at = 0
            for wanting, takers in self._takers.items():
                box = self._box(k, holder, wanting)
                for peer in takers if box.size else ():
                    if source.of_rank.get(peer) == holder:
                        continue
                    low, high = max(first - at, 0), min(stop - at, box.size)
                    if low < high:
                        yield Share(peer, k, holder, box, low, high)
                    at += box.size

    def _taken(self, rank: int) -> Iterator[Share]:
        wanting = self._wanting(rank)
        for k in self._operands(wanting):
            source = self._holders[k]
            for holder, senders in source.ranks.items():
                if source.of_rank.get(rank) == holder:
                    continue
                box = self._box(k, holder, wanting)
                if not box.size:
                    continue
                if len(senders) == 1:
                    yield Share(senders[0], k, holder, box, 0, box.size)
                    continue
                at = self._before(k, holder, rank)
                for i, sender in enumerate(senders):
                    first, stop = self._share(k, holder, i)
                    low, high = max(first - at, 0), min(stop - at, box.size)
                    if low < high:
                        yield Share(sender, k, holder, box, low, high)

    def _operands(self, wanting: Wanting) -> list[int]:
        """Those of which ranks need something."""
        if wanting not in self._takers:
            return []
        return sorted(k for k in self._wanted(wanting) if k >= 0)

    def _share(self, operand: int, holder: Holder, i: int) -> tuple[int, int]:
        """Of all that ranks which hold the same are to send, what the i-th of them sends."""
        many = len(self._holders[operand].ranks[holder])
        total = self._before(operand, holder, None)
        return i * total // many, (i + 1) * total // many

    def _before(self, operand: int, holder: Holder, rank: int | None) -> int:
        """How many elements are sent to those that come before a rank; None: to all."""
        of_rank = self._holders[operand].of_rank
        at = 0
        for wanting, takers in self._takers.items():
            size = self._box(operand, holder, wanting).size
            for peer in takers if size else ():
                if peer == rank:
                    return at
                at += size * (of_rank.get(peer) != holder)
        return at

    def kept(self, rank: int) -> Iterator[tuple[int, tuple[Piece, ...]]]:
        """What a rank has itself of what it needs, operand by operand: from places to places. The
        first constant is number -1.
        """
        wanting = self._wanting(rank)
        for k in self._operands(wanting):
            holder = self._holders[k].of_rank.get(rank)
            if holder is not None and (box := self._box(k, holder, wanting)).size:
                yield k, box.pieces
        if wanting in self._takers:
            for k, some in self._wanted(wanting).items():
                if k < 0:
                    yield k, tuple(some)

    @cached_property
    def _messages(self) -> dict[tuple[int, int, int], tuple[tuple[Piece, ...], tuple[Piece, ...]]]:
        return {}

    def message(self, share: Share) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """A share as a message: from the sender's places to its elements, by number, and from these
        to places of the receiver's results, of which there may be several for one.
        """
        key = id(share.box), share.first, share.stop
        if key not in self._messages:
            into = tuple(numbered(share.runs, 0))
            out = through([each.turned for each in into], share.box.pieces)
            self._messages[key] = into, out
        return self._messages[key]

    # -- how much ----------------------------------------------------------------------------------

    def received_by(self, rank: int) -> int:
        """What one rank receives, in elements: what it needs and does not hold, each once."""
        return sum(elements for _, elements in self.received_of(rank))

    def received_of(self, rank: int) -> Iterator[tuple[int, int]]:
        """The same, of each operand by its number."""
        wanting = self._wanting(rank)
        for k in self._operands(wanting):
            own = self._holders[k].of_rank.get(rank)
            others = [holder for holder in self._holders[k].ranks if holder != own]
            yield k, sum(self._box(k, holder, wanting).size for holder in others)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all the meshes, ascending."""
        return tuple(sorted({r for mesh in self._meshes for r in mesh.ranks}))

    @property
    def _meshes(self) -> list[Mesh]:
        return [*dict.fromkeys(placed.mesh for placed in (*self.sources, *self.targets))]

    @cached_property
    def looked_at(self) -> tuple[int, ...]:
        """The ranks that stand for all."""
        return tuple(standing_for_all(self._meshes))

    @cached_property
    def received_elements(self) -> int:
        """What the busiest rank receives, of those looked at."""
        return max(map(self.received_by, self.looked_at), default=0)

    @cached_property
    def is_free(self) -> bool:
        """Whether no rank receives anything, and all were looked at."""
        is_known = len(self.looked_at) == len(self.ranks)
        return is_known and not any(map(self.received_by, self.looked_at))

    @cached_property
    def most_peers(self) -> int:
        """With how many others a rank exchanges messages, at the most, of those looked at."""
        return max(map(self._peers, self.looked_at), default=0)

    def _peers(self, rank: int) -> int:
        return len({share.peer for some in (self.sent, self.taken) for share in some(rank)})

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is on one of the meshes."""
        return any(mesh.coordinates(rank) is not None for mesh in self._meshes)
