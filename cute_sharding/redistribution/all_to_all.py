"""One all-to-all that takes a tensor from one sharding to another: every missing element moves
once, and no other. Who sends what to whom is an :class:`~cute_sharding.exchange.Exchange` of the
relation that changes nothing; what is here is how it is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cute_sharding.exchange import Exchange, Mesh, Part, identity
from cute_sharding.exchange.all_peers import at_once
from cute_sharding.exchange.collectives import of_blocks
from cute_sharding.exchange.copies import Copy, folded, in_place
from cute_sharding.exchange.cost import most_local, received_by_digits
from cute_sharding.exchange.flow import Flow, LinkMessage
from cute_sharding.exchange.part import Buffer, as_they_lie, one_by_one
from cute_sharding.layout.layout import row_major
from cute_sharding.redistribution.native import Along, along
from cute_sharding.redistribution.network import Network
from cute_sharding.redistribution.step import Step
from cute_sharding.sharding.chains import Device, cutting
from cute_sharding.sharding.meeting import count_rows, part

# Peers listed one by one to find the most that a device holds; in larger groups their messages are
# taken to be alike.
PEERS = 256
# In larger groups the messages to all peers are worked out at once, where a layout says them.
MANY = 64


@dataclass(frozen=True)
class AllToAll(Step):
    """From the chains ``source`` to the chains ``target``, in one all-to-all or all-gather, or as
    many as ``rounds`` says: smaller buffers, each for a share of every message.

    Attributes:
        rounds: 1 or more.
        padded: blocks of rows that differ by a row or so are made equal, for an all-gather.

    >>> gather = AllToAll((8, 8), (4,), source=(((0, 1),), ()), target=((), ()))
    >>> gather.kind, gather.received_elements
    ('all-gather', 48)
    """

    rounds: int = 1
    padded: bool = False

    # -- which mesh dims take part -----------------------------------------------------------------

    @cached_property
    def exchange(self) -> Exchange:
        """Who sends what to whom."""
        chains = (self.source,), (self.target,)
        return Exchange.on_mesh(identity(self.shape), self.mesh, *chains)

    @property
    def dims(self) -> tuple[int, ...]:
        """The mesh dims over which messages go; none where every device has what it needs."""
        return self.exchange.mesh_dims

    @cached_property
    def gathers(self) -> bool:
        """Whether every device sends all it has, the same amount, to all others of the group: an
        all-gather.
        """
        if self.exchange.spread or not self.dims:
            return False
        if cutting(self.target) != cutting(self.source) - {*self.dims}:
            return False
        return self._are_even(self.source)

    @cached_property
    def along(self) -> Along | None:
        return (
            along(self.shape, self.mesh, self.source, self.target, self.dims)
            if self.dims and self.rounds == 1
            else None
        )

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        return self.dims

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
        """How many collectives it is: one a round."""
        return self.rounds if self.communicates else 0

    # -- how much ----------------------------------------------------------------------------------

    @property
    def received_elements(self) -> int:
        """What the busiest device receives: the elements that it needs and does not hold; and
        padding.
        """
        if self.block is not None:
            return of_blocks(prod(self.mesh[m] for m in self.dims), self.block)
        return self.exchange.received_elements

    @property
    def received_by_all(self) -> int:
        return (
            self.exchange.received_by_all
            if self.block is None
            else self._blocks_by_all(self.source)
        )

    @property
    def peak_elements(self) -> int:
        parts = prod(self.mesh[m] for m in self.dims)
        source, target = (
            most_local(self.shape, chains, self.mesh) for chains in (self.source, self.target)
        )
        if self.block is not None and self.along is not None:
            # Blocks of the first dim lie one after the other.
            copied = any(n != 1 for n in self.shape[: self.along.gathered])
            return source + parts * self.block + max(self.block, target * copied)
        if parts <= PEERS:
            return max(map(self._peak_on, self._specimens))
        owners, users = (
            prod(n for m, n in enumerate(self.mesh) if m not in cutting(chains))
            for chains in (self.source, self.target)
        )
        # All that is asked for, evenly among those that have it.
        sent = -(-source * users // owners)
        if self.rounds > 1:
            return source + target + -(-(sent + self.received_elements) // self.rounds)
        return source + self.received_elements + max(sent, target)

    def _peak_on(self, device: Device) -> int:
        group = self.group(device)
        if self.rounds == 1:
            part = self.gathering if self.gathers else self.transfer
            return part(device, group).peak_elements
        # The target is there all the while; the last share is never the smaller.
        last = self.transfer(device, group, self.rounds - 1)
        kept = prod(last.source_shape()) + prod(last.target_shape())
        return kept + sum(last.sends) + sum(last.receives)

    def seconds(self, network: Network) -> float:
        if not self.communicates:
            return 0.0
        dims = sorted(self.dims, key=lambda m: network.link(m).beta)
        # Where an element takes as long on all of them, which one it crosses need not be known.
        alike = network.within is None and len({network.link(m).beta for m in dims}) == 1
        total, left = 0.0, self.received_elements
        for i, m in enumerate(dims):
            # What comes from beyond the dims up to this one.
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
        """What the busiest device receives from devices that differ from it on other mesh dims than
        ``near``; where sizes do not divide, as if they did.
        """
        found = received_by_digits(self.shape, self.source, self.target, self.mesh, near)
        if found is not None:
            return found
        need = most_local(self.shape, self.target, self.mesh)
        far = prod(self.mesh[m] for m in self.dims if m not in near)
        return min(self.received_elements, need - need // far)

    @property
    def _specimens(self) -> list[Device]:
        """All devices of a small mesh; of a larger one some from its corners."""
        if prod(self.mesh) <= 8:
            return self.slice_of((0,) * len(self.mesh), range(len(self.mesh)))
        return [
            (0,) * len(self.mesh),
            tuple([n - 1 for n in self.mesh]),
            tuple([n // 2 for n in self.mesh]),
        ]

    # -- on one device -----------------------------------------------------------------------------

    @cached_property
    def _flow(self) -> Flow:
        (flow,) = self.exchange.flows
        assert isinstance(flow, Flow)
        return flow

    def _own(self, device: Device) -> LinkMessage | None:
        return self._flow.kept_by(self.number(device))

    def kept_by(self, device: Device) -> tuple[Copy, ...]:
        own = self._own(device)
        return () if own is None else tuple(folded(own.copies))

    def transfer(self, device: Device, peers: Sequence[Device], turn: int = 0) -> Part:
        """The part of ``device`` in an all-to-all among ``peers``, in their order. It keeps its own
        in the first round.
        """
        shapes = self.local_shape(self.source, device), self.local_shape(self.target, device)
        number, own = Mesh.numbered(self.mesh).rank, self._own(device)
        numbers, kept = [number(peer) for peer in peers], 0 if own is None else own.size
        pack_free = unpack_free = False
        if self.rounds == 1:
            whole = self._buffers(device, numbers, own, turn)
            pack_free, unpack_free = as_they_lie(whole, kept, shapes)
        copies: tuple[Copy, ...] = ()
        if pack_free or unpack_free:
            sending, receiving = whole
        else:
            sending, receiving = self._buffers(device, numbers, None, turn)
            copies = self.kept_by(device) if turn == 0 else ()
        return Part(
            tuple(numbers),
            sending.sizes,
            receiving.sizes,
            (None if pack_free else tuple(folded(sending.all_of(0))),),
            ((0, 0, copies),),
            (None if unpack_free else tuple(folded(receiving.all_of(0))),),
            shapes[1:],
            (False,),
            shapes[:1],
        )

    def _buffers(
        self, device: Device, peers: Sequence[int], own: LinkMessage | None, turn: int
    ) -> tuple[Buffer, Buffer]:
        """What is sent in that round and what is received; with what ``device`` keeps among it, if
        that is given.
        """
        sending, receiving = (
            self._at_once(device, peers, own, into=into)
            or one_by_one(self._messages(device, peers, own, turn, into=into), peers, 1, into=into)
            for into in (False, True)
        )
        return sending, receiving

    def _messages(
        self,
        device: Device,
        peers: Sequence[int],
        own: LinkMessage | None,
        turn: int,
        *,
        into: bool,
    ) -> list[LinkMessage]:
        number = self.number(device)
        found = [] if own is None else [own]
        if len(peers) > 1:
            of_all = self._flow.sent_to(number) if into else self._flow.sent_by(number)
            found += [some for each in of_all if (some := self._in_turn(each, turn)) is not None]
        return found

    def _in_turn(self, message: LinkMessage, turn: int) -> LinkMessage | None:
        """What of a message goes in that round: a share of the dim that divides best."""
        if self.rounds == 1:
            return message
        runs = [*message.runs]
        sizes = [count_rows(found) for found in runs]
        if not runs:
            return message if turn == 0 else None
        d = max(range(len(runs)), key=lambda d: (sizes[d] % self.rounds == 0, sizes[d]))
        runs[d] = part(runs[d], turn, self.rounds)
        return message._replace(runs=tuple(runs)) if runs[d] else None

    def _at_once(
        self, device: Device, peers: Sequence[int], own: LinkMessage | None, *, into: bool
    ) -> Buffer | None:
        """The messages to all of many peers as a few copies; None where no layout says them."""
        if len(peers) <= MANY or self.exchange.spread or self.rounds > 1:
            return None
        if [*peers] != Mesh.numbered(self.mesh).slice_of(device, self.dims):
            return None
        return at_once(self._flow, device, self.dims, into=into, with_own=own is not None)

    def gathering(self, device: Device, peers: Sequence[Device]) -> Part:
        """The part of ``device`` in an all-gather among ``peers``."""
        shapes = self.local_shape(self.source, device), self.local_shape(self.target, device)
        number, own = Mesh.numbered(self.mesh).rank, self._own(device)
        numbers = [number(peer) for peer in peers]
        found = self._messages(device, numbers, own, 0, into=True)
        by_peer = {message.peer: message for message in found}
        # The send buffer is the whole source, as it lies.
        unpacks, at = [], 0
        strides = row_major(shapes[0])
        for peer in numbers:
            for copy in by_peer[peer].copies if peer in by_peer else ():
                start = at + sum(p * s for p, s in zip(copy.x, strides))
                steps = tuple([(sum(p * s for p, s in zip(step, strides)),) for step in copy.dx])
                unpacks.append(Copy(copy.sizes, copy.y, copy.dy, (start,), steps))
            at += prod(shapes[0])
        free = in_place(unpacks, row_major(shapes[1]))
        sizes = (prod(shapes[0]),) * len(peers)
        return Part(
            tuple(numbers),
            sizes,
            sizes,
            (None,),
            (),
            (None if free else tuple([copy.flipped for copy in folded(unpacks)]),),
            shapes[1:],
            (False,),
            shapes[:1],
        )
