"""Which rank sends what to whom: the flow from an operand to one result, dim by dim, and the
strided copies that its messages are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from cute_sharding._memory import remembered
from cute_sharding.exchange.placed import Placed
from cute_sharding.layout.layout import row_major
from cute_sharding.relations.moves import Link, Rows, common_rows, count_common, held_rows
from cute_sharding.sharding.rows import (
    Chain,
    Device,
    Run,
    Runs,
    count_rows,
    near,
    rows_held,
    span,
    turns_of_loops,
)

# -- copies ----------------------------------------------------------------------------------------
# Strided copies between a tensor and a buffer, or two tensors: loops with a step on either side.

# A position in a tensor, or a step: rows of each dim. A flat buffer is a tensor of one dim.
Vector: TypeAlias = "tuple[int, ...]"


class Copy(NamedTuple):
    """``y[y_start + sum(i * dy)] = x[x_start + sum(i * dx)]`` for every index i of ``sizes``."""

    sizes: tuple[int, ...]
    x: Vector
    dx: tuple[Vector, ...]
    y: Vector
    dy: tuple[Vector, ...]

    @property
    def flipped(self) -> Copy:
        """The copy from y to x."""
        return Copy(self.sizes, self.y, self.dy, self.x, self.dx)


def flat(vector: Vector, strides: Sequence[int]) -> int:
    """A position or a step in elements, by the strides of the tensor's dims."""
    return sum([rows * stride for rows, stride in zip(vector, strides)])


def copy_of(link: Link, runs: Sequence[Run]) -> Copy:
    """The copy from a link's source to its target of the box of one run of each dim."""
    source, target = (_by_dim([pair[side].dim for pair in link.pairs]) for side in (0, 1))
    loops = [
        (d, *loop)
        for d, run in enumerate(runs)
        for loop in (*run.loops, (run.length, 1, 1))
        if loop[0] != 1
    ]

    def step(d: int, rows: int, dims: Sequence[int]) -> Vector:
        return tuple([rows if i == d else 0 for i in dims])

    return Copy(
        tuple([n for _, n, _, _ in loops]),
        tuple([runs[d].x for d in source]),
        tuple([step(d, dx, source) for d, _, dx, _ in loops]),
        tuple([runs[d].y for d in target]),
        tuple([step(d, dy, target) for d, _, _, dy in loops]),
    )


def _by_dim(dims: Sequence[int | None]) -> list[int]:
    """The indices of the dims, sorted by dim; None is left out."""
    return [i for _, i in sorted([(d, i) for i, d in enumerate(dims) if d is not None])]


def pack_copy(copy: Copy, at: int) -> Copy:
    """The same elements of x, to consecutive positions of a flat buffer from ``at`` on."""
    steps, below = [], 1
    for size in reversed(copy.sizes):
        steps.append((below,))
        below *= size
    return Copy(copy.sizes, copy.x, copy.dx, (at,), tuple(reversed(steps)))


def as_it_lies(copy: Copy, shape: tuple[int, ...], at: int) -> Copy:
    """The same elements of x, to a flat buffer that has the elements of y, a tensor of that shape,
    row-major from ``at`` on.
    """
    strides = row_major(shape)
    steps = tuple([(flat(step, strides),) for step in copy.dy])
    return Copy(copy.sizes, copy.x, copy.dx, (at + flat(copy.y, strides),), steps)


def fold(copies: Sequence[Copy]) -> list[Copy]:
    """The same copies, to places that do not overlap, as fewer copies: those of one form that are a
    step apart become turns of a loop.
    """
    before, after = list(copies), _fold_once(copies)
    while len(after) < len(before):
        before, after = after, _fold_once(after)
    return after


def _fold_once(copies: Sequence[Copy]) -> list[Copy]:
    # If sizes do not divide, whole and short blocks alternate, so each form is folded by itself.
    forms: dict[tuple[Any, ...], list[Copy]] = {}
    for copy in copies:
        forms.setdefault((copy.sizes, copy.dx, copy.dy), []).append(copy)
    return [loop for alike in forms.values() for loop in _loops(alike)]


def _loops(alike: Sequence[Copy]) -> Iterator[Copy]:
    for first, count, step in turns_of_loops(alike, _step_of_copies):
        yield (
            first
            if step is None
            else Copy(
                (count, *first.sizes), first.x, (step[0], *first.dx), first.y, (step[1], *first.dy)
            )
        )


def _step_of_copies(last: Copy, following: Copy) -> tuple[Vector, Vector] | None:
    delta = (minus(following.x, last.x), minus(following.y, last.y))
    # torch has no negative strides.
    return None if any(rows < 0 for vector in delta for rows in vector) else delta


def minus(a: Vector, b: Vector) -> Vector:
    return tuple([p - q for p, q in zip(a, b)])


@remembered
def fills(copies: tuple[Copy, ...], shape: tuple[int, ...]) -> bool:
    """Whether there is one copy, and it fills a tensor y of that shape from its first element to
    its last.
    """
    if len(copies) != 1 or prod(copies[0].sizes) != prod(shape):
        return False
    return run_of([copies[0].flipped], row_major(shape)) == 0


def in_place(copies: Sequence[Copy], strides: Sequence[int]) -> bool:
    """Whether every element of x, flat by ``strides``, is copied to the same position of the buffer
    y: then x can be used as the buffer.
    """
    return all(
        flat(copy.x, strides) == copy.y[0]
        and all(flat(a, strides) == b[0] for a, b in zip(copy.dx, copy.dy))
        for copy in copies
    )


def run_of(copies: Sequence[Copy], strides: Sequence[int]) -> int | None:
    """The start of the copied elements of x, one copy after the other, as one run in a tensor of
    these strides; None: they are no run.

    >>> rows = Copy((2, 3), (1, 0), ((1, 0), (0, 1)), (0,), ((3,), (1,)))
    >>> run_of([rows], (3, 1)), run_of([rows], (4, 1))
    (3, None)
    """
    start = at = flat(copies[0].x, strides)
    for copy in copies:
        below = 1
        for size, step in zip(reversed(copy.sizes), reversed(copy.dx)):
            if flat(step, strides) != below:
                return None
            below *= size
        if flat(copy.x, strides) != at:
            return None
        at += below
    return start


def cut_up(copy: Copy, most: int) -> Iterator[Copy]:
    """The same copy, in its order, as copies of at most ``most`` elements.

    >>> rows = Copy((2, 3), (0,), ((3,), (1,)), (0,), ((3,), (1,)))
    >>> [(piece.sizes, piece.x) for piece in cut_up(rows, 2)]
    [((2,), (0,)), ((1,), (2,)), ((2,), (3,)), ((1,), (5,))]
    """
    if prod(copy.sizes) <= most:
        yield copy
        return
    (first, *rest), inner = copy.sizes, prod(copy.sizes[1:])
    together = max(most // inner, 1)
    for k in range(0, first, together):
        x, y = _onward(copy.x, copy.dx[0], k), _onward(copy.y, copy.dy[0], k)
        if inner > most:
            yield from cut_up(Copy(tuple(rest), x, copy.dx[1:], y, copy.dy[1:]), most)
        else:
            yield Copy((min(together, first - k), *rest), x, copy.dx, y, copy.dy)


def _onward(start: Vector, step: Vector, times: int) -> Vector:
    return tuple([a + times * b for a, b in zip(start, step)])


# -- flow ------------------------------------------------------------------------------------------
# The flow from one operand of an exchange: which rank sends what to whom.
#
# Ranks that differ on mesh dims which cut the operand hold different elements of it; ranks that
# differ only on other mesh dims are a *class*, and hold the same. The elements that ranks outside a
# class need of it form one sequence, receiver by receiver, and each rank of the class sends an
# equal share of it. Sender and receiver compute this from the shardings alone, with the same
# result.

# The share of every message that is sent: (its number, the number of shares).
Turn: TypeAlias = "tuple[int, int]"
ALL: Turn = (0, 1)
# What a rank keeps: (operand, result, copies from the one to the other).
Own: TypeAlias = "tuple[int, int, tuple[Copy, ...]]"


class Message(Protocol):
    """The elements that one rank sends another."""

    @property
    def peer(self) -> int:
        """The other rank."""

    @property
    def size(self) -> int:
        """The number of elements."""

    def to(self: M, peer: int) -> M:
        """The same message, to or from another rank."""

    def share(self: M, first: int, stop: int, parts: int) -> M | None:
        """The part of the message from element ``first`` up to ``stop``, or about these:
        consecutive shares have each element once. None: it is empty.

        Args:
            parts: the number of ranks that share the sending.
        """

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Operand by operand, the copies into a buffer in which the message starts at ``at``."""

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """Result by result, the copies out of a buffer in which the message starts at ``at``."""


M = TypeVar("M", bound=Message)


def in_turn(messages: Iterable[M], turn: Turn) -> Iterator[M]:
    """The part of each message that is sent in that turn: a share, as large as in other turns."""
    k, rounds = turn
    if rounds == 1:
        yield from messages
        return
    for message in messages:
        some = message.share(*_share(message.size, k, rounds), rounds)
        if some is not None:
            yield some


class Flow(ABC, Generic[M]):
    """The flow from one operand, placed as ``source``, to results.

    Attributes:
        source: the operand on its mesh.
    """

    source: Placed

    @abstractmethod
    def between(self, holder: Device, rank: int) -> M | None:
        """All that a rank needs of the elements on a device; None: nothing."""

    @abstractmethod
    def _takers(self, holder: Device) -> Iterable[tuple[Sequence[int], M]]:
        """The ranks that need elements of this device, with these elements; ranks with equal needs
        together. Always in the same order.
        """

    @abstractmethod
    def _givers(self, rank: int) -> Iterable[tuple[Device, M]]:
        """One device of each class that holds elements which a rank needs, with these elements."""

    @abstractmethod
    def own(self, rank: int) -> Iterator[Own]:
        """The copies of what a rank needs and holds itself."""

    def _owners(self, holder: Device) -> list[int]:
        """The ranks of the device's class, which share the sending."""
        return self.source.mesh.slice_of(holder, self.source.replicated)

    # -- who sends what ----------------------------------------------------------------------------

    def kept_by(self, rank: int) -> M | None:
        """The elements that a rank needs and holds itself; None: there are none."""
        device = self.source.mesh.coordinates(rank)
        return None if device is None else self.between(device, rank)

    def sent_by(self, rank: int) -> Iterator[M]:
        """The messages that a rank sends, receiver by receiver."""
        device = self.source.mesh.coordinates(rank)
        if device is None:
            return
        owners, asked = self._owners(device), self._asked(device)
        if len(owners) == 1:
            for peers, message in asked:
                yield from [message.to(peer) for peer in peers]
            return
        sizes = [message.size for _, message in asked]
        total, at = sum([len(peers) * size for (peers, _), size in zip(asked, sizes)]), 0
        first, stop = _share(total, owners.index(rank), len(owners))
        for (peers, message), size in zip(asked, sizes):
            for i in range(max((first - at) // size, 0), min(-((at - stop) // size), len(peers))):
                begin = at + i * size
                some = message.share(first - begin, stop - begin, len(owners))
                if some is not None:
                    yield some.to(peers[i])
            at += len(peers) * size

    def sent_to(self, rank: int) -> Iterator[M]:
        """The messages that a rank receives, sender by sender."""
        for holder, message in self._givers(rank):
            if self._holds_it(rank, holder):
                continue
            owners = self._owners(holder)
            if len(owners) == 1:
                yield message.to(owners[0])
            else:
                yield from self._shares(rank, holder, message, owners)

    def amount(self, sender: int, receiver: int) -> int:
        """The elements that a rank sends another, computed for these two alone; for one rank, the
        elements that it keeps.
        """
        device = self.source.mesh.coordinates(sender)
        if device is None or (sender != receiver and self._holds_it(receiver, device)):
            return 0
        message = self.between(device, receiver)
        if message is None:
            return 0
        owners = self._owners(device)
        if sender == receiver or len(owners) == 1:
            return message.size
        shares = self._shares(receiver, device, message, owners)
        return sum([some.size for some in shares if some.peer == sender])

    def missed_by(self, rank: int) -> int:
        """The number of different elements that a rank needs and does not hold."""
        return sum([m.size for holder, m in self._givers(rank) if not self._holds_it(rank, holder)])

    def _holds_it(self, rank: int, holder: Device) -> bool:
        """Whether a rank is in the class of ``holder``."""
        device = self.source.mesh.coordinates(rank)
        return device is not None and all(device[m] == holder[m] for m in self.source.cut)

    def _asked(self, holder: Device) -> list[tuple[list[int], M]]:
        """The needs of ranks outside a class, in the order in which its ranks share the sending:
        (ranks with equal needs, these elements).
        """
        return [
            (others, message)
            for peers, message in self._takers(holder)
            if (others := [peer for peer in peers if not self._holds_it(peer, holder)])
        ]

    def _shares(self, rank: int, holder: Device, message: M, owners: Sequence[int]) -> Iterator[M]:
        """The share of a message to a rank that each of the owners sends."""
        size, many, total, before = message.size, len(owners), 0, 0
        for peers, each in self._asked(holder):
            if rank in peers:
                before = total + peers.index(rank) * size
            total += len(peers) * each.size
        for k in range(before * many // total, -(-(before + size) * many // total)):
            first, stop = _share(total, k, many)
            some = message.share(first - before, stop - before, many)
            if some is not None:
                yield some.to(owners[k])


def _share(total: int, k: int, parts: int) -> tuple[int, int]:
    """The start and the end of the k-th of ``parts`` shares of ``total`` elements."""
    return k * total // parts, (k + 1) * total // parts


# -- meetings --------------------------------------------------------------------------------------
# Finds the devices of one mesh that have rows in common with a device of another, in one dim of a
# relation.

# For each cut of a dim: (mesh dim, split factor, devices of the mesh dim, the coordinate on it;
# None: any).
Cuts: TypeAlias = "tuple[tuple[int, int, int, int | None], ...]"
# (mesh dim, coordinate) for the mesh dims that cut a dim.
Place: TypeAlias = "tuple[tuple[int, int], ...]"


class Met(NamedTuple):
    """Where there are rows in common with a device of the other side, in one dim.

    Attributes:
        places: coordinates on the mesh dims that cut it.
        runs: for each place the common rows, x of the source and y of the target.
    """

    places: tuple[Place, ...]
    runs: tuple[Runs, ...]


class Side(NamedTuple):
    """The dims of a tensor that the rows of an exchange are made of: their sizes, and how a device
    holds each.
    """

    sizes: tuple[int, ...]
    chains: tuple[Chain, ...]


def side_of(placed: Placed, rows: Rows, device: Device) -> Side:
    """The dims that the rows are made of, as a device holds them."""
    return Side(rows.of(placed.shape), rows.of(placed.held_on(device)))


def of_every(
    placed: Placed, rows: Rows, fixed: tuple[tuple[int, int], ...] = ()
) -> tuple[tuple[int, ...], tuple[Cuts, ...]]:
    """The dims that the rows are made of: their sizes, and their cuts for all devices with the
    coordinates ``fixed`` on some mesh dims.
    """
    sizes, at = placed.mesh.sizes, dict(fixed)
    cuts = [
        tuple([(m, factor, sizes[m], at.get(m)) for m, factor in chain])
        for chain in rows.of(placed.chains)
    ]
    return rows.of(placed.shape), tuple(cuts)


@remembered
def meet_devices(
    one: Rows,
    of: tuple[int, ...],
    chain: tuple[Chain, ...],
    other: Rows,
    n: tuple[int, ...],
    cuts: tuple[Cuts, ...],
    is_target: bool,
) -> Met:
    """The rows in common with ``one``, as a device holds it, on each device that holds ``other``.
    ``is_target``: ``one`` belongs to the target.
    """
    places: list[Place] = []
    runs: list[Runs] = []
    has = held_rows(one, of, chain)
    for place in _places_near(other, n, cuts, has) if has else ():
        at = dict(place)
        there = tuple([tuple([(factor, parts, at[m]) for m, factor, parts, _ in c]) for c in cuts])
        found = (
            common_rows(other, n, there, one, of, chain)
            if is_target
            else common_rows(one, of, chain, other, n, there)
        )
        if found:
            places.append(place)
            runs.append(found)
    return Met(tuple(places), tuple(runs))


def _places_near(
    rows: Rows, n: tuple[int, ...], cuts: tuple[Cuts, ...], has: Runs
) -> Iterator[Place]:
    """Coordinates at which there may be some of the rows. For plain rows: those near the rows by
    the first cut, and with rows in their range after each further cut.
    """
    if not rows.is_plain:
        every = {m: _coordinates(parts, at) for some in cuts for m, _, parts, at in some}
        yield from product(*([(m, k) for k in ks] for m, ks in every.items()))
    elif not cuts[0]:
        yield ()
    else:
        m, factor, parts, at = cuts[0][0]
        some = sorted(near(n[0], factor, parts, has)) if at is None else (at,)
        first, stop = min(run.x for run in has), max(run.reach for run in has)
        for k in some:
            yield from _in_range(n[0], cuts[0], ((m, k),), first, stop)


def _coordinates(parts: int, at: int | None) -> range:
    return range(parts) if at is None else range(at, at + 1)


def _in_range(n: int, cuts: Cuts, done: Place, first: int, stop: int) -> Iterator[Place]:
    """Coordinates at which rows of ``n`` are in ``[first, stop)``, or around it, cut by cut."""
    if len(done) == len(cuts):
        yield done
        return
    m, _, parts, at = cuts[len(done)]
    for k in _coordinates(parts, at):
        place = (*done, (m, k))
        chain = tuple([(f, parts, at) for (_, f, parts, _), (_, at) in zip(cuts, place)])
        if any(run.x < stop and first < run.reach for run in rows_held(n, chain)):
            yield from _in_range(n, cuts, place, first, stop)


# -- by links --------------------------------------------------------------------------------------
# The flow from an operand to one result, dim by dim: boxes of rows, the intersections of the rows
# that a class of ranks holds, mapped through a link, with those that a rank needs.


class LinkMessage(NamedTuple):
    """The elements that one rank sends another through one link: for each dim of the link, rows x
    of the sender and y of the receiver.
    """

    peer: int
    link: Link
    runs: tuple[Runs, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(map(count_rows, self.runs))

    @property
    def copies(self) -> list[Copy]:
        """One copy for each choice of one run of each dim."""
        return [copy_of(self.link, runs) for runs in product(*self.runs)]

    def to(self, peer: int) -> LinkMessage:
        """See :meth:`.flow.Message.to`."""
        return LinkMessage(peer, self.link, self.runs)

    def share(self, first: int, stop: int, parts: int) -> LinkMessage | None:
        """See :meth:`.flow.Message.share`. Shares are rows of the dim that divides best."""
        size = self.size
        if first <= 0 and stop >= size:
            return self
        if not self.runs:
            return None
        counts = [count_rows(found) for found in self.runs]
        d = max(range(len(counts)), key=lambda d: (counts[d] % parts == 0, counts[d]))
        low, high = (min(max(at, 0), size) * counts[d] // size for at in (first, stop))
        runs = (*self.runs[:d], span(self.runs[d], low, high), *self.runs[d + 1 :])
        return self._replace(runs=runs) if low < high else None

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """See :meth:`.flow.Message.into`."""
        return [(self.link.source, _pack(self.copies, at))]

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """See :meth:`.flow.Message.out_of`."""
        copies = _pack([copy.flipped for copy in self.copies], at)
        return [(self.link.target, [copy.flipped for copy in copies])]


def _pack(copies: Sequence[Copy], at: int) -> list[Copy]:
    """The copies, with their elements one behind the other in a buffer."""
    found = []
    for copy in copies:
        found.append(pack_copy(copy, at))
        at += prod(copy.sizes)
    return found


def missed(
    link: Link,
    shape: tuple[int, ...],
    had: Sequence[Chain] | None,
    onto: tuple[int, ...],
    wanted: Sequence[Chain],
) -> int:
    """The number of elements of the link's result that a rank needs and does not hold.

    Args:
        shape, onto: of the operand, and of the result.
        had, wanted: the cuts of each of their dims, with the rank's coordinates. None: it is not on
            the operand's mesh.
    """
    needed, held = 1, 0 if had is None else 1
    for one, other in link.pairs:
        of, n, want = one.of(shape), other.of(onto), other.of(wanted)
        # Rows that the operand does not have are filled in.
        needed *= count_common(one, of, ((),) * len(of), other, n, want)
        if had is not None:
            held *= count_common(one, of, one.of(had), other, n, want)
    return needed - held


@dataclass(frozen=True, eq=False)
class LinkFlow(Flow[LinkMessage]):
    """The flow from an operand placed as ``source`` to a result placed as ``target``.

    Attributes:
        link: maps rows of the operand to rows of the result.
        aligned: mesh dims that replicate the operand, if both are on one mesh, and on which a rank
            receives only from ranks with its own coordinates.
    """

    link: Link
    source: Placed
    target: Placed
    aligned: tuple[int, ...]

    def missed_by(self, rank: int) -> int:
        """See :meth:`.flow.Flow.missed_by`; computed without a search for the holders."""
        source, target = self.source, self.target
        wanted = target.mesh.coordinates(rank)
        if wanted is None:
            return 0
        had = wanted if source.mesh is target.mesh else source.mesh.coordinates(rank)
        of = None if had is None else source.held_on(had)
        return missed(self.link, source.shape, of, target.shape, target.held_on(wanted))

    def between(self, holder: Device, rank: int) -> LinkMessage | None:
        wanted = self.target.mesh.coordinates(rank)
        if wanted is None or any(holder[m] != wanted[m] for m in self.aligned):
            return None
        found = self.of_devices(holder, wanted)
        return found if found.size else None

    def of_devices(self, had: Device, wanted: Device) -> LinkMessage:
        """The elements that the first device holds and the second needs."""
        runs = [
            common_rows(
                one, *side_of(self.source, one, had), other, *side_of(self.target, other, wanted)
            )
            for one, other in self.link.pairs
        ]
        return LinkMessage(self.target.mesh.rank(wanted), self.link, tuple(runs))

    def own(self, rank: int) -> Iterator[Own]:
        kept = self.kept_by(rank)
        if kept is not None:
            yield kept.link.source, kept.link.target, tuple(fold(kept.copies))

    def _owners(self, holder: Device) -> list[int]:
        sharing = [m for m in self.source.replicated if m not in self.aligned]
        return self.source.mesh.slice_of(holder, sharing)

    def _takers(self, holder: Device) -> Iterator[tuple[list[int], LinkMessage]]:
        """In the order of their coordinates."""
        fixed = self._fixed(holder)
        mets = [
            meet_devices(
                one,
                *side_of(self.source, one, holder),
                other,
                *of_every(self.target, other, fixed),
                False,
            )
            for one, other in self.link.pairs
        ]
        alike = [m for m in self.target.replicated if m not in self.aligned]
        for device, runs in _meet(self.target, fixed, mets):
            ranks = self.target.mesh.slice_of(device, alike)
            yield ranks, LinkMessage(ranks[0], self.link, runs)

    def _givers(self, rank: int) -> Iterator[tuple[Device, LinkMessage]]:
        wanted = self.target.mesh.coordinates(rank)
        if wanted is None:
            return
        mets = [
            meet_devices(
                other,
                *side_of(self.target, other, wanted),
                one,
                *of_every(self.source, one),
                True,
            )
            for one, other in self.link.pairs
        ]
        for device, runs in _meet(self.source, self._fixed(wanted), mets):
            yield device, LinkMessage(rank, self.link, runs)

    def _fixed(self, device: Device) -> tuple[tuple[int, int], ...]:
        """The coordinates that are equal on senders and receivers."""
        return tuple([(m, device[m]) for m in self.aligned])


def _meet(
    placed: Placed, fixed: Iterable[tuple[int, int]], mets: Sequence[Met]
) -> Iterator[tuple[Device, tuple[Runs, ...]]]:
    """Devices on which every dim has rows in common, and these rows; one device for those that hold
    the same.
    """
    for some in product(*[zip(found.places, found.runs) for found in mets]):
        at = {**dict(fixed), **dict(chain.from_iterable(place for place, _ in some))}
        device = tuple([at.get(m, 0) for m in range(len(placed.mesh.sizes))])
        yield device, tuple([runs for _, runs in some])
