"""The steps of a redistribution on one mesh: an all-to-all, which is an exchange of the identity,
or a reduction of what is pending; and those that a library has as one collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.flow import Copy, LinkFlow, LinkMessage, fold, in_turn
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.part import (
    Buffer,
    Part,
    Shape,
    as_blocks,
    as_they_lie,
    messages_at_once,
    one_by_one,
    part_of_one,
)
from cute_sharding.exchange.placed import DEVICES, Placed, most_local, received_by_digits
from cute_sharding.layout import Layout
from cute_sharding.sharding.digits import digits
from cute_sharding.sharding.rows import Chains, Device

# -- native ----------------------------------------------------------------------------------------
# Steps that are one collective of a whole tensor dim, as every library has it: it joins blocks of
# rows (all-gather), hands them out (reduce-scatter), or both (all-to-all).


_Chain: TypeAlias = "tuple[tuple[int, int], ...]"  # the cuts of one tensor dim


class Along(NamedTuple):
    """A collective among the devices of ``mesh_dims``, in the order in which they cut: it joins
    blocks of rows of the tensor dim ``gathered``, and hands out blocks of rows of ``scattered``;
    None: it does not.

    ``base``: the other cuts, which come first: they say what the devices hold together. ``even``:
    all blocks are equally long.
    """

    mesh_dims: tuple[int, ...]
    gathered: int | None
    scattered: int | None
    base: Chains
    even: bool

    @property
    def dim_of_blocks(self) -> int | None:
        """The one tensor dim whose blocks are joined or handed out; None: there are two."""
        dims = [dim for dim in (self.gathered, self.scattered) if dim is not None]
        return dims[0] if len(dims) == 1 else None


def along(source: Placed, target: Placed, dims: tuple[int, ...]) -> Along | None:
    """The step between two shardings as a collective of whole tensor dims; None if it is none.

    The mesh dims that change must cut last, in plain blocks. Several of them count as one only if
    sizes divide.
    """
    (before, gathered), (after, scattered) = (_last(x.chains, dims) for x in (source, target))
    if (
        before is None
        or after is None
        or before[0] != after[0]
        or (gathered is None and scattered is None)
    ):
        return None
    orders = {order for order in (before[1], after[1]) if order}
    if len(orders) != 1:
        return None
    base, order = before[0], next(iter(orders))
    even = all(
        digits(x.shape[d], x.chains[d], x.mesh.sizes) is not None
        for d, x in ((gathered, source), (scattered, target))
        if d is not None
    )
    if len(order) > 1 and not even:
        return None
    return Along(order, gathered, scattered, base, even)


def _last(
    chains: Chains, dims: tuple[int, ...]
) -> tuple[tuple[Chains, tuple[int, ...]] | None, int | None]:
    """((the chains without ``dims``, these in their order), the tensor dim that they cut), if they
    are the last cuts of one dim, in plain blocks, or cut nothing.
    """
    cut = [d for d, chain in enumerate(chains) if any(m in dims for m, _ in chain)]
    if not cut:
        return (chains, ()), None
    if len(cut) > 1:
        return None, None
    chain = chains[cut[0]]
    last = chain[len(chain) - len(dims) :]
    if {m for m, _ in last} != {*dims} or any(factor != 1 for _, factor in last):
        return None, None
    base = tuple(
        [
            chain[: len(chain) - len(dims)] if d == cut[0] else other
            for d, other in enumerate(chains)
        ]
    )
    return (base, tuple([m for m, _ in last])), cut[0]


def with_a_dim_for_each_cut(source: Placed, target: Placed) -> tuple[Placed, Placed] | None:
    """The same tensor, viewed with more dims, so that every cut takes plain blocks of a dim; None
    if sizes do not divide, or a cut of one takes part of a cut of the other.

    The local tensors are views too: rows are cut in the same order, and only their numbers gain
    digits.

    >>> rows = Placed.numbered((16,), (2, 4), (((0, 1), (1, 2)),))  # two pieces of each block
    >>> [(x.shape, x.chains) for x in with_a_dim_for_each_cut(rows, rows.cut_as((((0, 1),),)))]
    [((4, 4), (((0, 1),), ((1, 1),))), ((4, 4), (((0, 1),), ()))]
    """
    shape: list[int] = []
    chains: tuple[list[_Chain], list[_Chain]] = ([], [])
    for n, *cuts in zip(source.shape, source.chains, target.chains):
        both = [_modes(n, chain, source.mesh.sizes) for chain in cuts]
        bounds = {n, 1}
        for modes in both:
            if modes is None:
                return None
            # A dim begins where a device's digit lies below one of local rows.
            bounds |= {size * stride for size, stride, _ in modes} - {low for _, low, _ in modes}
        for high, low in pairwise(sorted(bounds, reverse=True) if n > 1 else (n, 1)):
            if high % low:
                return None
            shape.append(high // low)
            for modes, found in zip(both, chains):
                inside = [mode for mode in modes or () if low <= mode[1] < high]
                if any(stride % low or high % (size * stride) for size, stride, _ in inside):
                    return None
                found.append(tuple([(m, 1) for *_, m in inside]))
    if any(len(some) > len({*some}) for some in map(_cutting, chains)):
        return None  # a mesh dim has digits in several dims
    before, after = (
        replace(each, shape=tuple(shape), chains=tuple(found))
        for each, found in zip((source, target), chains)
    )
    return before, after


def _modes(n: int, chain: _Chain, mesh: tuple[int, ...]) -> list[tuple[int, int, int]] | None:
    """The digits that devices fix, from the outermost in: (size, stride in rows, mesh dim)."""
    found = digits(n, chain, mesh)
    if found is None:
        return None
    modes = [(*mode, m) for m, some in found.devices.items() for mode in some]
    return sorted(modes, key=lambda mode: -mode[1])


def _cutting(chains: Sequence[_Chain]) -> list[int]:
    return [m for chain in chains for m, _ in chain]


def room_for(mesh: tuple[int, ...], step: Along, dim: int) -> int:
    """The rows that ``dim`` needs so that padding to equal blocks adds at most half: fewer than one
    row is added for each device.
    """
    return (
        2 * (prod(mesh[m] for m in step.mesh_dims) - 1) * prod(mesh[m] for m, _ in step.base[dim])
    )


def padded_elements(shape: tuple[int, ...], mesh: tuple[int, ...], step: Along) -> int:
    """The elements of one padded block, on the device with the most."""
    dim = step.dim_of_blocks
    parts = prod(mesh[m] for m in step.mesh_dims)
    whole = 1
    for d, n in enumerate(shape):
        rows = most_local((n,), (step.base[d],), mesh)
        whole *= -(-rows // parts) if d == dim else rows
    return whole


# -- step ------------------------------------------------------------------------------------------
# The base of all steps of a redistribution, and one device's part in them.


class Stage(ABC):
    """A stage of a plan: a :class:`Step` on one mesh, or an exchange from one mesh to another."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Its name as a collective."""

    @property
    @abstractmethod
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims of the one mesh on which it communicates."""

    @property
    @abstractmethod
    def received_elements(self) -> int:
        """The elements that the busiest device receives."""

    @property
    @abstractmethod
    def peak_elements(self) -> int:
        """The most elements that a device holds at once, with buffers and the source, which stays
        until the end.
        """

    @property
    @abstractmethod
    def received_by_all(self) -> int:
        """The elements that all devices receive together, with padding; on meshes of more than 64
        devices as if each received what the busiest does.
        """

    @abstractmethod
    def seconds(self, network: Network) -> float:
        """The time that it takes on a network."""

    def latency(self, network: Network) -> float:
        """The part of the time that does not depend on how much is sent."""
        return self.seconds(network) - self.seconds(network.without_latency)

    @property
    @abstractmethod
    def ends(self) -> tuple[Placed, Placed]:
        """The tensor before and after."""

    @property
    def communicates(self) -> bool:
        """Whether devices send one another anything."""
        return bool(self.mesh_dims)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return int(self.communicates)

    @property
    def most_rounds(self) -> int:
        """The most rounds in which it can run."""
        return 1

    def in_rounds(self, rounds: int) -> Stage:
        """The same in ``rounds`` rounds, up to :attr:`most_rounds`."""
        return self

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """The layouts ((devices), (local)) -> flat index before and after it; None: sizes do not
        divide.
        """
        source, target = self.ends
        return source.layout, target.layout

    def to_dict(self, network: Network, name: Callable[[int], int | str]) -> dict[str, Any]:
        """As plain data; ``name`` gives the name of a mesh dim."""
        before, after = (None if layout is None else str(layout) for layout in self.layouts)
        return {
            "kind": self.kind,
            "mesh_dims": [name(m) for m in self.mesh_dims],
            "communicates": self.communicates,
            "received_elements": self.received_elements,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds(network),
            "source_layout": before,
            "target_layout": after,
        }


@dataclass(frozen=True)
class Step(Stage):
    """A step of a tensor on one mesh: an :class:`AllToAll` or a :class:`Reduction`.

    Attributes:
        source, target: how the tensor lies before and after. What stays pending is in neither.

    >>> rows = Placed.numbered((8, 8), (4,), (((0, 1),), ()))
    >>> step: Step = AllToAll(rows, rows.cut_as(((), ((0, 1),))))
    >>> step.kind, step.mesh_dims, step.received_elements, step.layouts[1]
    ('all-to-all', (0,), 12, ((4,),(8,2)):((2,),(8,1)))
    """

    source: Placed
    target: Placed

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, in elements."""
        return self.source.shape

    @property
    def mesh(self) -> tuple[int, ...]:
        """The number of devices of each mesh dim."""
        return self.source.mesh.sizes

    def of_shape(self, shape: tuple[int, ...]) -> Step:
        """The step of a tensor of another shape."""
        ends: Any = {"source": replace(self.source, shape=shape)}
        return replace(self, **ends, target=replace(self.target, shape=shape))

    @property
    @abstractmethod
    def padded(self) -> bool:
        """Whether blocks of rows that differ by about a row are padded to one size."""

    @property
    @abstractmethod
    def along(self) -> Along | None:
        """The step as a collective of whole tensor dims, if it is one."""

    @cached_property
    def by_whole_dims(self) -> Step:
        """The step of the same tensor viewed with more dims, if it is a collective of whole dims of
        that view alone; else the step itself.
        """
        if self.along is None and self.communicates:
            ends = with_a_dim_for_each_cut(self.source, self.target)
            if ends is not None and along(*ends, self.mesh_dims) is not None:
                return replace(self, source=ends[0], target=ends[1])
        return self

    @property
    def parts(self) -> int:
        """The number of devices that communicate together."""
        return prod(self.mesh[m] for m in self.mesh_dims)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange from the source to the target, without reductions."""
        return Exchange(identity(self.shape), (self.source,), (self.target,))

    @cached_property
    def flow(self) -> LinkFlow:
        """The flow of that exchange: which rank holds what another one needs."""
        (flow,) = self.exchange.flows
        assert isinstance(flow, LinkFlow)
        return flow

    @property
    def ends(self) -> tuple[Placed, Placed]:
        return self.source, self.target

    @abstractmethod
    def transfer(self, rank: int, peers: Sequence[int]) -> Part:
        """The part of a rank among ``peers``, in their order. Ranks are numbered by their places on
        the mesh.
        """

    def kept_by(self, rank: int) -> tuple[Copy, ...]:
        """The copies of what the rank keeps, from its source (x) to its target (y)."""
        own = self.flow.kept_by(rank)
        return () if own is None else tuple(fold(own.copies))

    def shapes_on(self, rank: int) -> tuple[Shape, Shape]:
        """The rank's local shapes before and after."""
        return self.source.shape_on(rank), self.target.shape_on(rank)

    def group(self, rank: int) -> list[int]:
        """The ranks with which a rank communicates, in the order of their places."""
        return self.source.mesh.slice_of(self.place(rank), self.mesh_dims)

    def place(self, rank: int) -> Device:
        """The coordinates of a rank."""
        return self.source.mesh.device(rank)

    def natively(self) -> Step:
        """The step for a backend that gathers and reduce-scatters better than it exchanges: as such
        a collective, also if blocks of rows differ a little.
        """
        found = self.along
        dim = None if found is None or found.even else found.dim_of_blocks
        if found is None or dim is None or self.shape[dim] < room_for(self.mesh, found, dim):
            return self
        changes: Any = {"padded": True}
        return replace(self, **changes)

    @property
    def block(self) -> int | None:
        """The elements of one padded block, on the device with the most; None without padding."""
        if not self.padded or self.along is None:
            return None
        return padded_elements(self.shape, self.mesh, self.along)

    def _are_even(self, placed: Placed) -> bool:
        """Whether all blocks of the tensor dims that a group cuts have one size."""
        return all(
            digits(n, chain, self.mesh) is not None
            for n, chain in zip(self.shape, placed.chains)
            if any(m in self.mesh_dims for m, _ in chain)
        )

    def _blocks_by_all(self, placed: Placed) -> int:
        """The elements that all ranks receive together, with blocks padded to the longest."""
        ranks = placed.mesh.ranks
        if len(ranks) > DEVICES:
            return len(ranks) * self.received_elements
        held = [prod(placed.shape_on(rank)) for rank in ranks]
        groups = map(self.group, ranks)
        return sum((len(group) - 1) * max(held[peer] for peer in group) for group in groups)


# -- collectives -----------------------------------------------------------------------------------
# The elements that a rank sends and receives in one collective: one rule for all collectives, ours
# and torch's.
#
# Reductions and gathers count as in rings, which is the least for each rank (Chan, Heimlich,
# Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007):
#
# - all-gather: each rank receives the blocks of all others, padding included;
# - reduce-scatter: each rank receives a contribution to its block from each other rank;
# - all-reduce: a reduce-scatter and an all-gather: 2 (n - 1) / n of the elements;
# - all-to-all: what the others send to this rank; its own block stays;
# - broadcast, reduce: every rank but one receives (but one sends) all elements once, as in a chain;
# - scatter, gather: one block for each rank but the root, sent or received by the root.


class Amount(NamedTuple):
    """The elements of one collective, for a rank.

    Attributes:
        received: by this rank, from others.
        sent: by this rank, to others.
        busiest: received by the rank that receives the most; None if this rank cannot know.
    """

    received: int
    sent: int
    busiest: int | None


def all_reduced(parts: int, elements: int) -> int:
    """The elements that a rank receives, and sends, in an all-reduce of ``elements``.

    >>> all_reduced(4, 10)
    15
    """
    return -(-2 * (parts - 1) * elements // parts)


def of_blocks(parts: int, block: int) -> int:
    """The elements that a rank receives, and sends, if it gets a block from each other rank.

    >>> of_blocks(4, 10)
    30
    """
    return (parts - 1) * block


def all_reduce(parts: int, elements: int) -> Amount:
    """An all-reduce of ``elements`` among ``parts`` ranks."""
    n = all_reduced(parts, elements)
    return Amount(n, n, n)


def reduce_scatter(parts: int, block: int) -> Amount:
    """A reduce-scatter that leaves ``block`` elements on each rank."""
    n = of_blocks(parts, block)
    return Amount(n, n, n)


def all_gather(parts: int, blocks: list[int], own: int) -> Amount:
    """An all-gather of these blocks; this rank's has ``own`` elements, others may differ."""
    return Amount(sum(blocks) - own, of_blocks(parts, own), sum(blocks) - min(blocks, default=0))


def all_to_all(receives: list[int], sends: list[int], at: int) -> Amount:
    """An all-to-all in which this rank, at place ``at`` of the group, receives and sends these
    numbers of elements. What other ranks receive is known only if all messages are equal.
    """
    received, sent = (sum(each) - each[at] for each in (receives, sends))
    is_even = len({*receives, *sends}) == 1
    return Amount(received, sent, received if is_even else None)


def from_root(elements: int, *, is_root: bool) -> Amount:
    """A broadcast."""
    return Amount(0 if is_root else elements, elements if is_root else 0, elements)


def to_root(elements: int, *, is_root: bool) -> Amount:
    """A reduction to one rank."""
    return Amount(elements if is_root else 0, 0 if is_root else elements, elements)


def scatter(parts: int, block: int, *, is_root: bool) -> Amount:
    """A scatter of one block for each rank."""
    return Amount(0 if is_root else block, of_blocks(parts, block) if is_root else 0, block)


def gather(parts: int, block: int, *, is_root: bool) -> Amount:
    """A gather of one block from each rank."""
    at_root = of_blocks(parts, block)
    return Amount(at_root if is_root else 0, 0 if is_root else block, at_root)


# -- all to all ------------------------------------------------------------------------------------
# One all-to-all that takes a tensor from one sharding to another: each missing element moves once,
# and no other. An ``cute_sharding.exchange.Exchange`` of the identity relation says who sends what
# to whom; this module makes it a collective.

# In groups of up to so many, peers are listed one by one to find the most that a device holds; in
# larger ones their messages are taken to be alike.
PEERS = 256
# In larger groups the messages to all peers are computed at once, if a layout describes them.
MANY = 64


@dataclass(frozen=True)
class AllToAll(Step):
    """From ``source`` to ``target`` in one all-to-all or all-gather; or in ``rounds`` of them with
    smaller buffers, each for a share of every message.

    Attributes:
        rounds: 1 or more.
        padded: whether blocks that differ by about a row are padded to one size, for an all-gather.

    >>> rows = Placed.numbered((8, 8), (4,), (((0, 1),), ()))
    >>> gather = AllToAll(rows, rows.cut_as(((), ())))
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
        if {*self.target.cut} != {*self.source.cut} - {*self.mesh_dims}:
            return False
        return self._are_even(self.source)

    @cached_property
    def along(self) -> Along | None:
        return (
            along(self.source, self.target, self.mesh_dims)
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
            else self._blocks_by_all(self.source)
        )

    @property
    def peak_elements(self) -> int:
        parts = self.parts
        source, target = self.source.most, self.target.most
        if self.block is not None and self.along is not None:
            # Blocks of the first dim are already in order, one behind the other.
            copied = any(n != 1 for n in self.shape[: self.along.gathered])
            return source + parts * self.block + max(self.block, target * copied)
        if parts <= PEERS:
            return max(map(self._peak_on, self._specimens))
        # All requested elements, sent in equal parts by the devices that hold them.
        sent = -(-source * self.target.copies // self.source.copies)
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
        ends = self.source.chains, self.target.chains
        found = received_by_digits(self.shape, *ends, self.mesh, near)
        if found is not None:
            return found
        need = self.target.most
        far = prod(self.mesh[m] for m in self.mesh_dims if m not in near)
        return min(self.received_elements, need - need // far)

    @property
    def _specimens(self) -> Sequence[int]:
        """All ranks of a small mesh; of a larger one the first, the last and a middle one."""
        mesh = self.source.mesh
        if len(mesh.ranks) <= 8:
            return mesh.ranks
        return 0, len(mesh.ranks) - 1, mesh.rank(tuple([n // 2 for n in mesh.sizes]))

    # -- on one rank -------------------------------------------------------------------------------

    def transfer(self, rank: int, peers: Sequence[int], turn: int = 0) -> Part:
        """The part of a rank in an all-to-all among ``peers``, in their order. It copies what it
        keeps in the first round.
        """
        shapes, own = self.shapes_on(rank), self.flow.kept_by(rank)
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
        shapes, own = self.shapes_on(rank), self.flow.kept_by(rank)
        by_peer = {each.peer: each for each in self._messages(rank, peers, own, 0, into=True)}
        # The send buffer is the whole source as it is, and each peer's is one block received.
        from_each = [by_peer[peer].copies if peer in by_peer else () for peer in peers]
        blocks = [([copy.flipped for copy in some], shapes[0]) for some in from_each]
        receives, copies = as_blocks(blocks, shapes[1])
        unpacks = None if copies is None else tuple([copy.flipped for copy in copies])
        return part_of_one(peers, (receives, None), (receives, unpacks), shapes)


# -- reduction -------------------------------------------------------------------------------------
# Reduces what is pending: all devices of a group hold contributions to the same elements, and each
# gets some of these elements, reduced.


@dataclass(frozen=True)
class Reduction(Step):
    """A reduction over ``mesh_dims`` from ``source`` to ``target``; every device's target is part
    of its source.

    Either none of these mesh dims cuts the target (an all-reduce, of what the target keeps), or all
    do (a reduce-scatter). ``op`` is torch's name of the reduction, and the result is divided by
    ``divisor``, the number of contributions to an average. ``padded``: blocks that differ by about
    a row are padded to one size, for a native reduce-scatter.

    >>> whole = Placed.numbered((8, 8), (4,), ((), ()))
    >>> step = Reduction(whole, whole.cut_as((((0, 1),), ())), mesh_dims=(0,))
    >>> step.kind, step.received_elements  # three contributions to 16 elements
    ('reduce-scatter (sum)', 48)
    """

    mesh_dims: tuple[int, ...] = ()
    op: str = "sum"
    divisor: int = 1
    padded: bool = False

    @cached_property
    def along(self) -> Along | None:
        """The reduce-scatter as a collective of a whole tensor dim."""
        return along(self.source, self.target, self.mesh_dims) if self.scatters else None

    @property
    def scatters(self) -> bool:
        """Whether it is a reduce-scatter."""
        return not {*self.target.cut}.isdisjoint(self.mesh_dims)

    @cached_property
    def is_of_whole(self) -> bool:
        """Whether it is an all-reduce of the whole local tensor, and divides nothing."""
        return not self.scatters and self.source == self.target and self.divisor == 1

    @cached_property
    def even(self) -> bool:
        """Whether all devices of a group get equally much, as a native reduce-scatter requires."""
        return self._are_even(self.target)

    @property
    def kind(self) -> str:
        return (
            f"{'reduce-scatter' if self.scatters else 'all-reduce'} "
            f"({'avg' if self.divisor > 1 else self.op}{', padded' if self.padded else ''})"
        )

    @property
    def received_elements(self) -> int:
        """The elements that the busiest device receives: the others' contributions to its share,
        and for an all-reduce also the others' shares (Chan et al. 2007).
        """
        most = self.target.most
        if self.scatters:
            return of_blocks(self.parts, most if self.block is None else self.block)
        return all_reduced(self.parts, most)

    @property
    def received_by_all(self) -> int:
        target = self.target
        if self.block is not None or len(target.mesh.ranks) > DEVICES:
            return self._blocks_by_all(target)
        shares = sum(prod(target.shape_on(rank)) for rank in target.mesh.ranks)
        times = self.parts - 1
        return times * shares if self.scatters else -(-2 * times * shares // self.parts)

    @property
    def peak_elements(self) -> int:
        source, target = self.source.most, self.target.most
        if not self.scatters:
            return source + target + (target if self.source != self.target else 0)
        if self.block is not None:
            return source + (self.parts + 1) * self.block
        if self.even:
            return 2 * source + target
        return source + 2 * self.parts * target + target

    def seconds(self, network: Network) -> float:
        total, before = 0.0, 1
        share = self.target.most if self.scatters else -(-self.source.most // self.parts)
        for m in sorted(self.mesh_dims, key=lambda m: network.link(m).beta):
            received = (self.mesh[m] - 1) * before * share
            total += network.collective(m, self.mesh[m], received, together=True)
            before *= self.mesh[m]
        return total if self.scatters else 2 * total  # scattered, and then gathered

    def transfer(self, rank: int, peers: Sequence[int]) -> Part:
        """The part of a rank: it sends each peer a block, in the layout of the peer's target, and
        receives as many blocks of its own target, which are the receive buffer.
        """
        shapes, target = self.shapes_on(rank), self.target
        blocks = [
            (self.flow.of_devices(self.place(rank), self.place(peer)).copies, target.shape_on(peer))
            for peer in peers
        ]
        receives = (prod(shapes[1]),) * len(peers)
        return part_of_one(peers, as_blocks(blocks, shapes[0]), (receives, None), shapes)
