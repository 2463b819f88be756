"""One all-to-all that takes a tensor from one sharding to another: each missing element moves once,
and no other. An :class:`~cute_sharding.exchange.Exchange` of the identity relation says who sends
what to whom; this module makes it a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from cute_sharding.exchange.all_peers import messages_at_once
from cute_sharding.exchange.by_links import LinkMessage
from cute_sharding.exchange.collectives import of_blocks
from cute_sharding.exchange.copies import Copy
from cute_sharding.exchange.cost import most_local, received_by_digits
from cute_sharding.exchange.flow import in_turn
from cute_sharding.exchange.native import Along, along
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.part import (
    Buffer,
    Part,
    Shape,
    as_blocks,
    as_they_lie,
    one_by_one,
    part_of_one,
)
from cute_sharding.exchange.step import Step
from cute_sharding.sharding.chains import cutting

# In groups of up to so many, peers are listed one by one to find the most that a device holds; in
# larger ones their messages are taken to be alike.
PEERS = 256
# In larger groups the messages to all peers are computed at once, if a layout describes them.
MANY = 64


@dataclass(frozen=True)
class AllToAll(Step):
    """From the chains ``source`` to the chains ``target``, in one all-to-all or all-gather; or in
    ``rounds`` of them with smaller buffers, each for a share of every message.

    Attributes:
        rounds: 1 or more.
        padded: whether blocks that differ by about a row are padded to one size, for an all-gather.

    >>> gather = AllToAll((8, 8), (4,), source=(((0, 1),), ()), target=((), ()))
    >>> gather.kind, gather.received_elements
    ('all-gather', 48)
    """

    rounds: int = 1
    padded: bool = False

    # -- which mesh dims take part -----------------------------------------------------------------

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims over which messages go; none if every device already has what it needs."""
        return self.exchange.mesh_dims

    @cached_property
    def gathers(self) -> bool:
        """Whether every device sends its whole local tensor, of the same size, to all others of the
        group: an all-gather.
        """
        if self.exchange.spread or not self.mesh_dims:
            return False
        if cutting(self.target) != cutting(self.source) - {*self.mesh_dims}:
            return False
        return self._are_even(self.source)

    @cached_property
    def along(self) -> Along | None:
        return (
            along(self.shape, self.mesh, self.source, self.target, self.mesh_dims)
            if self.mesh_dims and self.rounds == 1
            else None
        )

    @property
    def kind(self) -> str:
        if not self.communicates:
            return "local slice"
        if self.padded:
            return "all-gather (padded)"
        if self.rounds > 1:
            return f"all-to-all in {self.rounds} rounds"
        return "all-gather" if self.gathers else "all-to-all"

    @property
    def collectives(self) -> int:
        """The number of collectives: one for each round."""
        return self.rounds if self.communicates else 0

    @property
    def most_rounds(self) -> int:
        """As many as the longest dim has rows: a round for each row."""
        return max(self.shape, default=1) if self.communicates else 1

    def in_rounds(self, rounds: int) -> AllToAll:
        return replace(self, rounds=rounds)

    # -- how much ----------------------------------------------------------------------------------

    @property
    def received_elements(self) -> int:
        """The elements that the busiest device receives: those that it needs and does not hold, and
        padding.
        """
        if self.block is not None:
            return of_blocks(self.parts, self.block)
        return self.exchange.received_elements

    @property
    def received_by_all(self) -> int:
        return (
            self.exchange.received_by_all
            if self.block is None
            else self._blocks_by_all(self.ends[0])
        )

    @property
    def peak_elements(self) -> int:
        parts = self.parts
        source, target = (
            most_local(self.shape, chains, self.mesh) for chains in (self.source, self.target)
        )
        if self.block is not None and self.along is not None:
            # Blocks of the first dim are already in order, one behind the other.
            copied = any(n != 1 for n in self.shape[: self.along.gathered])
            return source + parts * self.block + max(self.block, target * copied)
        if parts <= PEERS:
            return max(map(self._peak_on, self._specimens))
        owners, users = (
            prod(n for m, n in enumerate(self.mesh) if m not in cutting(chains))
            for chains in (self.source, self.target)
        )
        # All requested elements, sent in equal parts by the devices that hold them.
        sent = -(-source * users // owners)
        if self.rounds > 1:
            return source + target + -(-(sent + self.received_elements) // self.rounds)
        return source + self.received_elements + max(sent, target)

    def _peak_on(self, rank: int) -> int:
        group = self.group(rank)
        if self.rounds == 1:
            part = self.gathering if self.gathers else self.transfer
            return part(rank, group).peak_elements
        # The target exists in every round; the last share is never smaller than others.
        last = self.transfer(rank, group, self.rounds - 1)
        kept = prod(last.source_shape()) + prod(last.target_shape())
        return kept + sum(last.sends) + sum(last.receives)

    def seconds(self, network: Network) -> float:
        if not self.communicates:
            return 0.0
        dims = sorted(self.mesh_dims, key=lambda m: network.link(m).beta)
        # If elements take equal time on all mesh dims, it does not matter which ones they cross.
        alike = network.within is None and len({network.link(m).beta for m in dims}) == 1
        total, left = 0.0, self.received_elements
        for i, m in enumerate(dims):
            # The elements from beyond the mesh dims up to this one.
            last = alike or i + 1 == len(dims)
            beyond = 0 if last else self._received_beyond(frozenset(dims[: i + 1]))
            total += network.collective(
                m,
                self.mesh[m],
                left - beyond,
                together=self.gathers or self.padded,
                times=self.rounds,
            )
            left = beyond
        return total

    def _received_beyond(self, near: frozenset[int]) -> int:
        """The elements that the busiest device receives from devices that differ from it on mesh
        dims other than ``near``; if sizes do not divide, an estimate as if they did.
        """
        found = received_by_digits(self.shape, self.source, self.target, self.mesh, near)
        if found is not None:
            return found
        need = most_local(self.shape, self.target, self.mesh)
        far = prod(self.mesh[m] for m in self.mesh_dims if m not in near)
        return min(self.received_elements, need - need // far)

    @property
    def _specimens(self) -> Sequence[int]:
        """All ranks of a small mesh; of a larger one the first, the last and a middle one."""
        mesh = self.flow.source.mesh
        if len(mesh.ranks) <= 8:
            return mesh.ranks
        return 0, len(mesh.ranks) - 1, mesh.rank(tuple([n // 2 for n in mesh.sizes]))

    # -- on one rank -------------------------------------------------------------------------------

    def transfer(self, rank: int, peers: Sequence[int], turn: int = 0) -> Part:
        """The part of a rank in an all-to-all among ``peers``, in their order. It copies what it
        keeps in the first round.
        """
        shapes, own = self._shapes(rank), self.flow.kept_by(rank)
        pack_free = unpack_free = False
        if self.rounds == 1:
            whole = self._buffers(rank, peers, own, turn)
            pack_free, unpack_free = as_they_lie(whole, 0 if own is None else own.size, shapes)
        copies: tuple[Copy, ...] = ()
        if pack_free or unpack_free:
            sending, receiving = whole
        else:
            sending, receiving = self._buffers(rank, peers, None, turn)
            copies = self.kept_by(rank) if turn == 0 else ()
        return part_of_one(
            peers,
            (sending.sizes, None if pack_free else sending.copies[0]),
            (receiving.sizes, None if unpack_free else receiving.copies[0]),
            shapes,
            copies,
        )

    def _shapes(self, rank: int) -> tuple[Shape, Shape]:
        source, target = self.ends
        return source.shape_on(rank), target.shape_on(rank)

    def _buffers(
        self, rank: int, peers: Sequence[int], own: LinkMessage | None, turn: int
    ) -> tuple[Buffer, Buffer]:
        """The buffers that are sent and received in that round; with ``own``, what the rank keeps
        is among the messages.
        """
        sending, receiving = (
            self._at_once(rank, peers, own, into=into)
            or one_by_one(self._messages(rank, peers, own, turn, into=into), peers, 1, into=into)
            for into in (False, True)
        )
        return sending, receiving

    def _messages(
        self, rank: int, peers: Sequence[int], own: LinkMessage | None, turn: int, *, into: bool
    ) -> list[LinkMessage]:
        found = [] if own is None else [own]
        if len(peers) > 1:
            of_all = self.flow.sent_to(rank) if into else self.flow.sent_by(rank)
            found += in_turn(of_all, (turn, self.rounds))
        return found

    def _at_once(
        self, rank: int, peers: Sequence[int], own: LinkMessage | None, *, into: bool
    ) -> Buffer | None:
        """The messages to all of many peers as a few copies; None if no layout describes them."""
        if len(peers) <= MANY or self.exchange.spread or self.rounds > 1:
            return None
        if (own is None and len(self.mesh_dims) != 1) or [*peers] != self.group(rank):
            return None
        return messages_at_once(
            self.flow, self.place(rank), self.mesh_dims, into=into, with_own=own is not None
        )

    def gathering(self, rank: int, peers: Sequence[int]) -> Part:
        """The part of a rank in an all-gather among ``peers``."""
        shapes, own = self._shapes(rank), self.flow.kept_by(rank)
        by_peer = {each.peer: each for each in self._messages(rank, peers, own, 0, into=True)}
        # The send buffer is the whole source as it is, and each peer's is one block received.
        from_each = [by_peer[peer].copies if peer in by_peer else () for peer in peers]
        blocks = [([copy.flipped for copy in some], shapes[0]) for some in from_each]
        receives, copies = as_blocks(blocks, shapes[1])
        unpacks = None if copies is None else tuple([copy.flipped for copy in copies])
        return part_of_one(peers, (receives, None), (receives, unpacks), shapes)
