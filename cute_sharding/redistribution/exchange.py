"""One all-to-all that takes a tensor from one sharding to another: every missing element moves
once, and no other.

Each device keeps of its own what it needs. The rest it asks of those that have it:

1. where the source is partitioned, there is one for each element;
2. where it is replicated on some mesh dims, the device with its own coordinate on them;
3. where that would have some of the replicas asked more than others, all of them, each for an even
   share (:attr:`Exchange.spread`).

The message from one device to another is, dim by dim, the
rows that the one holds and the other needs (sharding/meeting.py): the pieces of the layout
``composition(right_inverse(target), source)`` that belong to the two, sizes dividing or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from cute_sharding.exchange.all_peers import buffer_of, dims_among
from cute_sharding.exchange.copies import Copy, folded, in_place
from cute_sharding.exchange.cost import DEVICES, most_local, received
from cute_sharding.exchange.messages import Buffer, Message, as_they_lie, one_by_one
from cute_sharding.exchange.native import Along, along, padded_elements, room_for
from cute_sharding.layout.layout import row_major
from cute_sharding.redistribution.step import Step, Transfer
from cute_sharding.sharding.chains import Device, cutting, up_to
from cute_sharding.sharding.digits import Digits, digits
from cute_sharding.sharding.meeting import Runs, count_rows, meet, near, part, rows_held

# Peers listed one by one to find the most that a device holds; in larger groups their messages are
# taken to be alike.
PEERS = 256
# In larger groups the messages to all peers are worked out at once, where a layout says them, and
# else those to peers that may have rows in common.
MANY = 64


@dataclass(frozen=True)
class Exchange(Step):
    """From the chains ``source`` to the chains ``target``, in one all-to-all or all-gather, or as
    many as ``rounds`` says: smaller buffers, each for a share of every message.

    Attributes:
        rounds: 1 or more.
        padded: blocks of rows that differ by a row or so are made equal, for an all-gather.

    >>> gather = Exchange((8, 8), (4,), source=(((0, 1),), ()), target=((), ()))
    >>> gather.kind, gather.received_elements
    ('all-gather', 48)
    """

    rounds: int = 1
    padded: bool = False

    # -- which mesh dims take part -----------------------------------------------------------------

    @cached_property
    def spread(self) -> tuple[int, ...]:
        """Mesh dims on which the source is replicated, and the target takes from a tensor dim that
        the source cuts: there the target's choice of rows is a choice of senders as well.
        """
        wanted = [
            m
            for d, chain in enumerate(self.target)
            if self.source[d]
            for m, _ in chain
            if m not in self._cutting
        ]
        return tuple(sorted(wanted)) if wanted and self._moving else ()

    @cached_property
    def _moving(self) -> tuple[int, ...]:
        """Mesh dims that cut the source, and on which some element has to change its coordinate."""
        return tuple(
            sorted(
                m
                for d, chain in enumerate(self.source)
                for m, _ in chain
                if not self._stationary(d, m)
            )
        )

    def _stationary(self, dim: int, m: int) -> bool:
        """Whether every row of ``dim`` has the same coordinate on mesh dim ``m`` before
        and after.
        """
        before, after = (up_to(chains[dim], m) for chains in (self.source, self.target))
        if before == after:
            return True
        one, other = self._digits(dim)
        return one is not None and other is not None and one.devices[m] == other.devices.get(m)

    def _digits(self, dim: int) -> tuple[Digits | None, Digits | None]:
        return digits(self.shape[dim], self.source[dim], self.mesh), digits(
            self.shape[dim], self.target[dim], self.mesh
        )

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The mesh dims over which messages go; none where every device has what it needs."""
        if prod(self.mesh) <= DEVICES and not self._received:
            return ()
        return tuple(sorted({*self._moving, *self.spread}))

    @cached_property
    def gathers(self) -> bool:
        """Whether every device sends all it has, the same amount, to all others of the group: an
        all-gather.
        """
        if self.spread or not self.dims:
            return False
        if cutting(self.target) != self._cutting - {*self.dims}:
            return False
        return all(
            digits(n, chain, self.mesh) is not None
            for n, chain in zip(self.shape, self.source)
            if any(m in self.dims for m, _ in chain)
        )

    @cached_property
    def along(self) -> Along | None:
        """The step as a collective of whole tensor dims, if it is one."""
        return (
            along(self.shape, self.mesh, self.source, self.target, self.dims)
            if self.dims and self.rounds == 1
            else None
        )

    def natively(self) -> Exchange:
        """The step for a backend that gathers better than it exchanges: also where blocks differ by
        a little.
        """
        found = self.along
        if found is None or found.even or found.scattered is not None or found.gathered is None:
            return self
        return (
            replace(self, padded=True)
            if self.shape[found.gathered] >= room_for(self.mesh, found, found.gathered)
            else self
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

    @cached_property
    def _received(self) -> int:
        return received(self.shape, self.source, self.target, self.mesh)

    @property
    def received_elements(self) -> int:
        """What the busiest device receives: the elements that it needs and does not hold; and
        padding.
        """
        if self.padded and self.along is not None:
            return (prod(self.mesh[m] for m in self.dims) - 1) * padded_elements(
                self.shape, self.mesh, self.along
            )
        return self._received

    def own(self, device: Device) -> Message:
        """What the device keeps: x in its source, y in its target."""
        return Message(
            tuple(
                [
                    meet(n, self.chain(self.source, d, device), self.chain(self.target, d, device))
                    for d, n in enumerate(self.shape)
                ]
            )
        )

    def kept_by(self, device: Device) -> tuple[Copy, ...]:
        return tuple(folded(self.own(device).boxes))

    def meet(self, sender: Device, receiver: Device) -> bool:
        """Whether ``receiver`` gets from ``sender`` what it lacks of its rows, if there are any: it
        has not the same itself, and of those that have it ``sender`` is the one to give.
        """
        has_it_itself = True
        for m, (a, b) in enumerate(zip(sender, receiver)):
            if m in self._cutting:
                has_it_itself &= a == b
            elif a != b and m not in self.spread:
                return False
        return not has_it_itself

    def message(self, sender: Device, receiver: Device, turn: int = 0) -> Message | None:
        """What ``sender`` sends to ``receiver`` in that round, or None."""
        if not self.meet(sender, receiver):
            return None
        runs = []
        for d, n in enumerate(self.shape):
            found = meet(
                n, self.chain(self.source, d, sender), self.chain(self.target, d, receiver)
            )
            if not found:
                return None
            runs.append(found)
        return self._share(runs, sender, turn)

    def _share(self, runs: list[Runs], sender: Device, turn: int) -> Message | None:
        """Of what ``sender`` and others have alike, what it is to send in that round: each replica
        gives a share, and each round another, of the dim that divides best.
        """
        shares = [(sender[m], self.mesh[m]) for m in self.spread] + (
            [(turn, self.rounds)] if self.rounds > 1 else []
        )
        for k, parts in shares:
            sizes = [count_rows(found) for found in runs]
            d = max(range(len(runs)), key=lambda d: (sizes[d] % parts == 0, sizes[d]))
            runs[d] = part(runs[d], k, parts)
            if not runs[d]:
                return None
        return Message(tuple(runs))

    @cached_property
    def _cutting(self) -> frozenset[int]:
        return cutting(self.source)

    @property
    def peak_elements(self) -> int:
        if not self.communicates:
            return max(self.transfer(device, (device,)).peak_elements for device in self._specimens)
        if self.padded and self.along is not None:
            parts = prod(self.mesh[m] for m in self.dims)
            copied = any(
                n != 1 for n in self.shape[: self.along.gathered]
            )  # blocks of the first dim lie one after the other
            source, target = (
                most_local(self.shape, self.source, self.mesh),
                most_local(self.shape, self.target, self.mesh),
            )
            return (
                source
                + parts * padded_elements(self.shape, self.mesh, self.along)
                + max(padded_elements(self.shape, self.mesh, self.along), target * copied)
            )
        if prod(self.mesh[m] for m in self.dims) > PEERS:
            source, target = (
                most_local(self.shape, self.source, self.mesh),
                most_local(self.shape, self.target, self.mesh),
            )
            owners, users = (
                prod(n for m, n in enumerate(self.mesh) if m not in cutting(chains))
                for chains in (self.source, self.target)
            )
            sent = -(
                -source * users // owners
            )  # all that is asked for, evenly among those that have it
            if self.rounds > 1:
                return source + target + -(-(sent + self.received_elements) // self.rounds)
            return source + self.received_elements + max(sent, target)
        if (
            self.rounds > 1
        ):  # the target is there all the while; the last share is never the smaller
            last = [
                self.transfer(device, self.group(device), self.rounds - 1)
                for device in self._specimens
            ]
            return max(
                prod(t.source_shape) + prod(t.target_shape) + sum(t.sends) + sum(t.receives)
                for t in last
            )
        if self.gathers:
            return max(
                self.gathering(device, self.group(device)).peak_elements
                for device in self._specimens
            )
        return max(
            self.transfer(device, self.group(device)).peak_elements for device in self._specimens
        )

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

    def group(self, device: Device) -> list[Device]:
        """The devices among which ``device`` exchanges, row-major."""
        return self.slice_of(device, self.dims)

    def transfer(self, device: Device, peers: Sequence[Device | None], turn: int = 0) -> Transfer:
        """The part of ``device`` in an all-to-all among ``peers``, in their order; None stands for
        a peer of another group. It keeps its own in the first round.
        """
        source_shape, target_shape = (
            self.local_shape(self.source, device),
            self.local_shape(self.target, device),
        )

        own = self.own(device)
        sides = [Side(self, device, peers, turn, into=into) for into in (False, True)]
        whole = [side.buffer(own) for side in sides]
        pack_free, unpack_free = as_they_lie(
            whole, own, source_shape, target_shape, at_once=self.rounds == 1
        )
        own_copies: list[Copy] = []
        sending, receiving = whole
        if not (pack_free or unpack_free):
            own_copies = own.boxes if turn == 0 else []
            sending, receiving = [side.buffer(None) for side in sides]
        return Transfer(
            source_shape,
            target_shape,
            sending.sizes,
            receiving.sizes,
            None if pack_free else tuple(folded(sending.copies)),
            tuple(folded(own_copies)),
            None if unpack_free else tuple([c.flipped for c in folded(receiving.copies)]),
        )

    def near(self, device: Device, *, into: bool) -> dict[int, set[int]]:
        """Of mesh dims that alone cut a dim, the coordinates on which there may be rows that the
        device has, or ``into`` it, needs.
        """
        mine, theirs = (self.target, self.source) if into else (self.source, self.target)
        found = {}
        for d, n in enumerate(self.shape):
            if len(theirs[d]) == 1 and mine[d]:
                ((m, factor),) = theirs[d]
                rows = rows_held(n, self.chain(mine, d, device))
                found[m] = near(n, factor, self.mesh[m], rows)
        return found

    def gathering(self, device: Device, peers: Sequence[Device]) -> Transfer:
        """The part of ``device`` in an all-gather among ``peers``."""
        source_shape, target_shape = (
            self.local_shape(self.source, device),
            self.local_shape(self.target, device),
        )
        messages = [
            self.own(peer) if peer == device else self.message(peer, device) for peer in peers
        ]
        # The send buffer is the whole source, as it lies.
        unpacks, at = [], 0
        strides = row_major(source_shape)
        for message in messages:
            for copy in message.boxes if message is not None else []:
                start = at + sum(p * s for p, s in zip(copy.x, strides))
                steps = tuple([(sum(p * s for p, s in zip(step, strides)),) for step in copy.dx])
                unpacks.append(Copy(copy.sizes, copy.y, copy.dy, (start,), steps))
            at += prod(source_shape)
        free = in_place(unpacks, row_major(target_shape))
        sizes = (prod(source_shape),) * len(peers)
        return Transfer(
            source_shape,
            target_shape,
            sizes,
            sizes,
            None,
            (),
            None if free else tuple([copy.flipped for copy in folded(unpacks)]),
        )


class Side:
    """What a device sends its peers, or what it gets ``into`` it from them."""

    def __init__(
        self,
        step: Exchange,
        device: Device,
        peers: Sequence[Device | None],
        turn: int,
        *,
        into: bool,
    ) -> None:
        self.step, self.device, self.peers = step, device, peers
        self.turn, self.into = turn, into

    def buffer(self, own: Message | None) -> Buffer:
        """The messages one after the other, ``own`` for that to itself."""
        found = self._at_once(own) if len(self.peers) > MANY else None
        if found is not None:
            return found
        at = list(self.peers).index(self.device)
        messages = [*self._messages[:at], own, *self._messages[at + 1 :]]
        return one_by_one(messages, into=self.into)

    @cached_property
    def _messages(self) -> list[Message | None]:
        messages: list[Message | None] = [None] * len(self.peers)
        some = [(k, peer) for k, peer in enumerate(self.peers) if peer is not None]
        if len(self.peers) > MANY:
            for m, places in self.step.near(self.device, into=self.into).items():
                some = [(k, peer) for k, peer in some if peer[m] in places]
        for k, peer in some:
            if peer != self.device:
                pair = (peer, self.device) if self.into else (self.device, peer)
                messages[k] = self.step.message(*pair, self.turn)
        return messages

    def _at_once(self, own: Message | None) -> Buffer | None:
        """The same as few copies; None where no layout says it."""
        step, device = self.step, self.device
        if step.spread or step.rounds > 1 or (own is None and len(step.dims) != 1):
            return None
        if list(self.peers) != step.group(device):
            return None
        mine, theirs = step.source, step.target
        if self.into:
            mine, theirs = theirs, mine

        def alike(d: int) -> Runs:
            chains = (step.chain(each, d, device) for each in (step.source, step.target))
            runs = meet(step.shape[d], *chains)
            return tuple([run.flipped() for run in runs]) if self.into else runs

        dims = dims_among(step.shape, step.mesh, mine, theirs, step.dims, alike)
        parts = [(m, step.mesh[m]) for m in step.dims]
        without = device[step.dims[0]] if own is None else None
        return None if dims is None else buffer_of(dims, parts, without)
