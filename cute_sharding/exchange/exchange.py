"""One exchange through a relation, between any ranks: every element that a rank needs and does not
hold reaches it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from cute_sharding._memory import remembered
from cute_sharding.exchange.flow import Flow, LinkFlow, Message, Own, in_turn, side_of
from cute_sharding.exchange.part import Part, Shape, one_by_one, part_of
from cute_sharding.exchange.placed import Mesh, Placed, coordinates, received, standing_for_all
from cute_sharding.layout import coalesce
from cute_sharding.relations.moves import Link, Move, Rows, common_rows, held_rows
from cute_sharding.relations.relation import Relation
from cute_sharding.sharding.digits import chosen_by
from cute_sharding.sharding.rows import Chains, Device, Run, count_rows, rows_held

# -- exchange --------------------------------------------------------------------------------------
# One exchange through a relation, between any ranks: every element that a rank needs and does not
# hold reaches it once.
#
# Operands are on one mesh and results on another, which may be the same, have the same ranks at
# other coordinates, or share some ranks or none. Ranks that differ on mesh dims which cut an
# operand hold different rows of it. So their coordinates number the *classes* of ranks that hold
# the same. What a rank needs of a class is a box: dim by dim the intersection of the rows that the
# class holds, mapped through the relation, with the rows that the rank needs.
#
# 1. A rank keeps what its own class holds of what it needs.
# 2. The other classes each send it their box. Several ranks of a class share equally in sending all
#    that ranks outside the class need of it (``flow``).
# 3. On one mesh a rank receives only from ranks with its own coordinates on the mesh dims that
#    replicate an operand: these are all asked for the same amount, and only ranks that differ on
#    other mesh dims communicate. Exception: they would be asked unequally (``Exchange.spread``).
#
# Sender and receiver compute the same, from the two shardings alone: for a move dim by dim
# (``flow``); for a relation by pieces (``cute_sharding.relations.Relation``), which may map one
# element of several operands to several results, piece by piece (``by_pieces``).


@remembered
def identity(shape: tuple[int, ...]) -> Move:
    """The relation of a redistribution: every row is made of itself.

    >>> identity((4, 6)).outputs
    ((4, 6),)
    """
    pairs = tuple([(Rows(d), Rows(d)) for d in range(len(shape))])
    return Move((shape,), (shape,), (Link(0, 0, pairs),))


@dataclass(frozen=True)
class Exchange:
    """An exchange from operands placed as ``sources`` to results placed as ``targets``.

    Attributes:
        relation: on the global shapes: dim by dim, as a move (:func:`identity` redistributes), or
            by pieces.
        sources, targets: each operand, and each result, on its mesh.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)))  # ranks 0 and 1
    >>> columns = Placed.of(Sharding((8, 6), (3,), (Shard(1),)), (1, 2, 3))
    >>> part = Exchange(identity((8, 6)), (rows,), (columns,)).part(1)
    >>> part.peers, part.sends, part.receives
    ((0, 2, 3), (0, 8, 8), (8, 0, 0))
    """

    relation: Move | Relation
    sources: tuple[Placed, ...]
    targets: tuple[Placed, ...]

    @cached_property
    def move(self) -> Move:
        """The relation of an exchange that goes dim by dim."""
        assert isinstance(self.relation, Move), "asked of what movement and redistribution plan"
        return self.relation

    @cached_property
    def adds(self) -> bool:
        """Whether elements that reach the same row are added up."""
        return isinstance(self.relation, Move) and self.relation.adds

    @classmethod
    def on_mesh(
        cls,
        move: Move,
        sizes: tuple[int, ...],
        sources: Sequence[Chains],
        targets: Sequence[Chains],
    ) -> Exchange:
        """An exchange on one mesh with numbered ranks, from the chains of operands and results.

        >>> from cute_sharding.relations.table import BY_OP
        >>> cut = (((0, 1),),)  # dim 0, by mesh dim 0
        >>> halo = Exchange.on_mesh(BY_OP["torch.roll"].move((8,), 1, 0), (4,), (cut,), (cut,))
        >>> halo.received_elements, halo.mesh_dims
        (1, (0,))
        """
        mesh = Mesh.numbered(sizes)
        return cls(
            move,
            tuple([Placed(x, mesh, c) for x, c in zip(move.inputs, sources, strict=True)]),
            tuple([Placed(x, mesh, c) for x, c in zip(move.outputs, targets, strict=True)]),
        )

    def of_result(self, k: int) -> Exchange:
        """The exchange to a single result."""
        return Exchange(self.move.of_result(k), self.sources, self.targets[k : k + 1])

    def turned(self, *, adds: bool = False) -> Exchange:
        """The exchange from the single result to the single operand. With ``adds``, rows that
        stand for one are added up.
        """
        return Exchange(self.move.turned()._replace(adds=adds), self.targets, self.sources)

    # -- how much ----------------------------------------------------------------------------------

    @cached_property
    def received_elements(self) -> int:
        """The elements that the busiest rank receives: those that it needs and does not hold, each
        once; for a sum, one contribution of each other rank that has some.

        On meshes of more than 64 ranks the first, a middle and the last coordinates of each mesh
        dim stand for the others, except for a redistribution on one mesh if sizes divide.
        """
        if self._redistributes and self.mesh is not None:
            source, target = self._all
            return received(source.shape, source.chains, target.chains, self.mesh.sizes)
        return max([self.received_by(rank) for rank in self._looked_at], default=0)

    @cached_property
    def received_by_all(self) -> int:
        """The elements that all ranks receive together; on large meshes as if each received what
        the busiest does.
        """
        ranks = {rank for target in self.targets for rank in target.mesh.ranks}
        if not self._looks_at_all:
            return self.received_elements * len(ranks)
        total = sum(map(self.received_by, self._looked_at))
        # On one mesh, only one of the ranks that differ on mesh dims without cuts is looked at.
        return total if self.mesh is None else total * len(ranks) // len(self._looked_at)

    @property
    def looks_free(self) -> bool:
        """Whether no rank looked at receives anything; stops at the first that does."""
        return not any(map(self.received_by, self._looked_at))

    @cached_property
    def is_free(self) -> bool:
        """Whether it is known that no rank receives anything: all ranks were examined, or both
        shardings are the same layout on the same ranks, possibly under meshes of other shapes.
        """
        return not self.received_elements and (self._looks_at_all or self._is_one_layout)

    @cached_property
    def _is_one_layout(self) -> bool:
        """Whether it redistributes, and the layouts ((ranks), (local)) -> flat index agree."""
        if not self._redistributes:
            return False
        source, target = self._all
        if source.layout is None or target.layout is None:
            return False
        one, other = ([*map(coalesce, each)] for each in (source.layout, target.layout))
        return one == other and [*source.mesh.ranks] == [*target.mesh.ranks]

    @cached_property
    def is_in_place(self) -> bool:
        """Whether the results of each rank looked at are its operands, unchanged."""
        parts = map(self.part, self._looked_at)
        return self.is_free and all(is_whole for part in parts for is_whole in part.are_whole)

    def peak_in(self, rounds: int) -> int:
        """The most elements that a rank holds at once: operands, results, and what is sent and
        received between in one of ``rounds`` rounds.
        """
        most = 0
        for rank in self._looked_at:
            shapes = [placed.local_shape(rank) for placed in self._all]
            kept = sum(prod(shape) for shape in shapes if shape is not None)
            last = in_turn(self._messages(rank), (rounds - 1, rounds))  # never the smaller
            most = max(most, kept + sum(message.size for message in last))
        return most

    @cached_property
    def most_peers(self) -> int:
        """The most peers that a rank has, among the ranks looked at."""
        peers = ({message.peer for message in self._messages(rank)} for rank in self._looked_at)
        return max(map(len, peers), default=0)

    def _messages(self, rank: int) -> Iterator[Message]:
        """The messages that a rank sends, and those that it receives."""
        return chain(self.sent_by(rank), self.sent_to(rank))

    def received_by(self, rank: int) -> int:
        """The number of elements that a rank receives."""
        if self.adds:
            return sum(message.size for message in self.sent_to(rank))
        return sum([flow.missed_by(rank) for flow in self.flows])

    # -- among which ranks -------------------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh | None:
        """The one mesh of all operands and results; None: there are several."""
        first = self._all[0].mesh
        return first if all(placed.mesh == first for placed in self._all[1:]) else None

    @cached_property
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims of the one mesh over which messages go; none if all ranks hold what they
        need.
        """
        if not self.received_elements and self._looks_at_all:
            return ()
        return tuple(sorted({*self._moving, *self.spread}))

    @cached_property
    def spread(self) -> tuple[int, ...]:
        """Mesh dims that replicate the source of a redistribution on one mesh, while the target
        cuts with them a tensor dim that the source cuts too: there the rows that the target gives a
        rank also choose the ranks that send.
        """
        if not self._redistributes or self.mesh is None:
            return ()
        source, target = self._all
        wanted = [
            m
            for before, after in zip(source.chains, target.chains)
            if before
            for m, _ in after
            if m in source.replicated
        ]
        return tuple(sorted(wanted)) if wanted and self._moving else ()

    @cached_property
    def _redistributes(self) -> bool:
        inputs = self.relation.inputs
        return len(inputs) == 1 and self.relation == identity(inputs[0])

    @cached_property
    def _moving(self) -> frozenset[int]:
        """Mesh dims that cut an operand, and on which some element may change its coordinate; for a
        relation by pieces all of its mesh, since replicas share the sending.
        """
        if isinstance(self.relation, Relation):
            return frozenset(m for m, n in enumerate(self.sources[0].mesh.sizes) if n > 1)
        return frozenset(
            [
                m
                for link in self.move.links
                for m in self.sources[link.source].cut
                if not self._is_stationary(link, m)
            ]
        )

    @property
    def communicates(self) -> bool:
        """Whether ranks, all on one mesh, send one another anything."""
        return bool(self.mesh_dims)

    def _is_stationary(self, link: Link, m: int) -> bool:
        """Whether no element changes its coordinate on that mesh dim."""
        source, target = self.sources[link.source], self.targets[link.target]
        for one, other in link.pairs:
            if one.dim is None or m not in dict(source.chains[one.dim]):
                continue
            if not (one.is_plain and other.is_plain) or other.dim is None:
                return False
            n, sizes = source.shape[one.dim], source.mesh.sizes
            before, after = source.chains[one.dim], target.chains[other.dim]
            return chosen_by(m, n, before, sizes) == chosen_by(m, n, after, sizes)
        return False

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all the meshes, ascending."""
        return tuple(sorted({r for placed in self._all for r in placed.mesh.ranks}))

    @cached_property
    def seal(self) -> bytes:
        """Eight bytes that are equal in all processes whose shardings are."""
        said = [(p.shape, p.mesh.sizes, [*p.mesh.ranks], p.chains) for p in self._all]
        if isinstance(self.relation, Relation):
            return sha256(repr((said, self.relation.pieces)).encode()).digest()[:8]
        return sha256(repr(said).encode()).digest()[:8]

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is on one of the meshes."""
        return any(placed.mesh.coordinates(rank) is not None for placed in self._all)

    @property
    def _all(self) -> tuple[Placed, ...]:
        return (*self.sources, *self.targets)

    @cached_property
    def _looked_at(self) -> list[int]:
        """The ranks to look at. On one mesh, if replicas are asked equally: one of the ranks that
        differ on mesh dims without cuts.
        """
        alike = self.mesh is not None and isinstance(self.relation, Move)
        used = {m for placed in self._all for m in placed.cut} if alike else None
        return standing_for_all((placed.mesh for placed in self._all), used)

    @cached_property
    def _looks_at_all(self) -> bool:
        return all(
            len(coordinates(n, len(placed.mesh.ranks))) == n
            for placed in self._all
            for n in placed.mesh.sizes
        )

    # -- who sends what ----------------------------------------------------------------------------

    @cached_property
    def flows(self) -> tuple[Flow[Any], ...]:
        """From each operand to each linked result; for a relation by pieces from each operand to
        all results, and from each constant, an operand of one element that all ranks hold.
        """
        if isinstance(self.relation, Relation):
            # Ops on one mesh go dim by dim: their programs do not import this.
            from cute_sharding.exchange.by_pieces import flows_of

            return flows_of(self.relation, self.sources, self.targets, self.ranks)
        found = []
        for link in self.relation.links:
            source = self.sources[link.source]
            alike = () if self.mesh is None else source.replicated
            aligned = tuple([m for m in alike if m not in self.spread])
            found.append(LinkFlow(link, source, self.targets[link.target], aligned))
        return tuple(found)

    def kept_by(self, rank: int) -> list[Own]:
        """The copies of what a rank needs and holds itself."""
        return [own for flow in self.flows for own in flow.own(rank)]

    def sent_by(self, rank: int) -> Iterator[Message]:
        """The messages that a rank sends, receiver by receiver."""
        return chain.from_iterable(flow.sent_by(rank) for flow in self.flows)

    def sent_to(self, rank: int) -> Iterator[Message]:
        """The messages that a rank receives, sender by sender."""
        return chain.from_iterable(flow.sent_to(rank) for flow in self.flows)

    def amount(self, sender: int, receiver: int) -> int:
        """The elements that a rank sends another, computed for these two alone; for one rank, the
        elements that it keeps.

        >>> from cute_sharding.sharding import Replicate, Shard, Sharding
        >>> copies = Placed.of(Sharding((8, 6), (2,), (Replicate(),)))
        >>> rows = Placed.of(Sharding((8, 6), (2,), (Shard(0),)), (1, 2))
        >>> exchange = Exchange(identity((8, 6)), (copies,), (rows,))
        >>> exchange.amount(1, 1), exchange.amount(1, 2), exchange.amount(2, 1)
        (24, 12, 0)
        """
        return sum(flow.amount(sender, receiver) for flow in self.flows)

    # -- on one rank -------------------------------------------------------------------------------

    def part(self, rank: int, peers: Sequence[int] | None = None) -> Part:
        """The part of a rank, of one of the meshes, both or neither.

        Args:
            peers: the order of the messages: all ranks with which it exchanges any, and maybe more.
                By default those ranks, ascending.
        """
        return self.part_of(rank, ([*self.sent_by(rank)], [*self.sent_to(rank)]), peers)

    def part_of(
        self,
        rank: int,
        messages: tuple[Sequence[Message], Sequence[Message]],
        peers: Sequence[int] | None = None,
    ) -> Part:
        """The part of a rank that sends and receives these messages."""
        sent, received = messages
        if peers is None:
            peers = sorted({message.peer for message in (*sent, *received)})
        buffers = (
            one_by_one(sent, peers, len(self.sources), into=False),
            one_by_one(received, peers, len(self.targets), into=True, adds=self.adds),
        )
        return part_of(self.kept_by(rank), buffers, self.shapes_on(rank), peers, adds=self.adds)

    def shapes_on(self, rank: int) -> tuple[list[Shape | None], list[Shape | None]]:
        """The local shapes of each operand and of each result, as the exchange numbers their rows:
        for windows the rows that they are made of, in place of two dims. None: the rank is not on
        the mesh.
        """
        before, after = (
            [placed.mesh.coordinates(rank) for placed in side]
            for side in (self.sources, self.targets)
        )
        return (
            [None if at is None else self.shape_on(i, at, False) for i, at in enumerate(before)],
            [None if at is None else self.shape_on(k, at) for k, at in enumerate(after)],
        )

    def shape_on(self, k: int, device: Device, of_result: bool = True) -> Shape:
        """The local shape of a result, or of an operand, on a device."""
        placed = (self.targets if of_result else self.sources)[k]
        links = self.relation.links if isinstance(self.relation, Move) else ()
        formed = {
            rows.dim: rows
            for link in links
            for pair in link.pairs
            if (rows := pair[of_result]).form is not None and link[of_result] == k
        }
        gone = {d for rows in formed.values() for d in rows.dims[1:]}
        every = [formed.get(d, Rows(d)) for d in range(len(placed.shape))]
        return tuple(
            [
                count_rows(held_rows(rows, *side_of(placed, rows, device)))
                for d, rows in enumerate(every)
                if d not in gone
            ]
        )


# -- slices ----------------------------------------------------------------------------------------
# Results of a movement op that are slices of each device's local operand, so that local tensors are
# views if the global ones are.


class Slice(NamedTuple):
    """Local rows of an operand's dim; if the dim is not kept, the single row."""

    first: int
    rows: int
    step: int
    is_kept: bool = True


def is_view(exchange: Exchange) -> bool:
    """Whether each device's part of every result is a view of its local operand: a slice with one
    step in each dim, windows one step apart, or a diagonal of consecutive rows.
    """
    mesh = exchange.mesh
    if mesh is None or exchange.communicates or exchange.move.adds or len(exchange.sources) != 1:
        return False
    some = [mesh.coordinates(rank) for rank in standing_for_all([mesh])]
    return all(
        slices(exchange, link.target, device) is not None and _are_views(exchange, link, device)
        for link in exchange.move.links
        for device in some
        if device is not None
    )


def _are_views(exchange: Exchange, link: Link, device: Device) -> bool:
    sides = exchange.sources[link.source], exchange.targets[link.target]
    return all(
        rows.form is None or rows.form.is_view(*map(rows_held, *side_of(placed, rows, device)))
        for pair in link.pairs
        for rows, placed in zip(pair, sides)
    )


def slices(exchange: Exchange, output: int, device: Device) -> list[Slice] | None:
    """For each dim of the operand, the local rows that the result has; None if they are not evenly
    spaced, or some come from other devices.
    """
    links = [link for link in exchange.move.links if link.target == output]
    if len(links) != 1 or any(source.dim is None for source, _ in links[0].pairs):
        return None
    (link,), result = links, []
    operand, onto = exchange.sources[link.source], exchange.targets[output]
    lacks = 0 in (exchange.shape_on(output, device))
    for source, target in link.pairs:
        had, wanted = side_of(operand, source, device), side_of(onto, target, device)
        found = common_rows(source, *had, target, *wanted)
        there = count_rows(held_rows(Rows(source.dim), *had))
        if len(found) > 1 or (not found and target.dim is None and not (lacks and there)):
            return None
        first, count, step, _ = _evenly(found[0]) if found else Slice(0, 0, 1)
        is_kept = target.dim is not None
        if count < 0 or (is_kept and count != count_rows(held_rows(target, *wanted))):
            return None
        result.append(Slice(first, count, step, is_kept))
    return result


def keeps(exchange: Exchange, link: Link, d: int) -> bool:
    """Whether a dim of a link stays the same on each device, whatever its size."""
    one, other = link.pairs[d]
    return (
        one.is_plain
        and other.is_plain
        and one.dim is not None
        and other.dim is not None
        and exchange.sources[link.source].chains[one.dim]
        == exchange.targets[link.target].chains[other.dim]
    )


def ends_otherwise(exchange: Exchange, output: int) -> set[int]:
    """The dims of a result view with every n-th row of a whole operand dim, if some device does not
    hold n operand rows for each result row: its next outer row is not one step after the last one.
    """
    (link,) = [link for link in exchange.move.links if link.target == output]
    operand, onto = exchange.sources[link.source], exchange.targets[output]
    mesh, found = onto.mesh, set()
    for device in [mesh.coordinates(rank) for rank in standing_for_all([mesh])]:
        assert device is not None, "a rank of the mesh"
        held = operand.shape_of(device)
        for (source, target), rows in zip(link.pairs, slices(exchange, output, device) or ()):
            if source.dim is None or target.dim is None or rows.step == 1:
                continue
            is_all = onto.shape[target.dim] * rows.step == operand.shape[source.dim]
            if is_all and rows.rows * rows.step != held[source.dim]:
                found.add(target.dim)
    return found


def _evenly(run: Run) -> Slice:
    """The rows x of a run; with a count of -1 if they are not evenly spaced."""
    if not run.loops:
        return Slice(run.x, run.length, 1)
    if len(run.loops) == 1 and run.length == 1:
        (count, step, at), *_ = run.loops
        return Slice(run.x, count if at == 1 else -1, step)
    return Slice(0, -1, 1)
