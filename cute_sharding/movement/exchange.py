"""A movement op on sharded tensors: who sends what to whom, at most once, in one all-to-all.

What device q needs of what device p has is, dim by dim, the meeting of the rows that p holds, taken
through the op's map, with those that q is to hold: a box, as in the exchange of a redistribution
(redistribution/exchange.py), from which the copies into buffers and out of them follow in the same
way. Replicas send nothing to one another: each device takes from the one with its own coordinates
on the mesh dims that do not cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from cute_sharding.movement.moves import Link, Move
from cute_sharding.movement.rows import Rows, between, held, needed
from cute_sharding.redistribution.chains import Chains, Device, chain_of, cutting, up_to
from cute_sharding.redistribution.copies import Copy, Vector, folded, from_runs, packed
from cute_sharding.redistribution.cost import coordinates
from cute_sharding.sharding.meeting import Chain, Run, Runs, count_rows, rows_held


class Transfer(NamedTuple):
    """One device's part in a movement.

    Attributes:
        target_shapes: what it is to hold of each result; of windows, the rows that they are made
            of, each once.
        sends, receives: elements to and from each peer.
        packs: for each operand, copies into the send buffer.
        own: for each operand and result, copies from the one to the other.
        unpacks: for each result, copies out of the receive buffer; of sums those of each peer by
            themselves, since they are added.
        filled: whether each result has rows that nothing is copied to.
    """

    target_shapes: tuple[tuple[int, ...], ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    packs: tuple[tuple[Copy, ...], ...]
    own: tuple[tuple[int, int, tuple[Copy, ...]], ...]
    unpacks: tuple[tuple[Copy, ...], ...]
    filled: tuple[bool, ...]


class Side(NamedTuple):
    """Of the dims of a tensor that the rows of an exchange are made of: their sizes, and how a
    device holds each.
    """

    sizes: tuple[int, ...]
    chains: tuple[Chain, ...]


class Slice(NamedTuple):
    """Local rows of a dim of an operand; of one that is not kept, the one row."""

    first: int
    rows: int
    step: int
    is_kept: bool = True


@dataclass(frozen=True)
class Movement:
    """A move of tensors that are cut as ``sources`` say to results cut as ``targets`` say.

    Attributes:
        move: the op on the global shapes.
        mesh: the number of devices of each mesh dim.
        sources, targets: for each operand, and each result, the cuts of each dim, in order.

    >>> from cute_sharding.movement import BY_OP
    >>> cut = (((0, 1),),)  # dim 0, by mesh dim 0
    >>> halo = Movement(BY_OP["torch.roll"].move((8,), 1, 0), (4,), (cut,), (cut,))
    >>> halo.received_elements, halo.mesh_dims
    (1, (0,))
    """

    move: Move
    mesh: tuple[int, ...]
    sources: tuple[Chains, ...]
    targets: tuple[Chains, ...]

    # -- how much ----------------------------------------------------------------------------------

    @cached_property
    def received_elements(self) -> int:
        """What the busiest device receives: what it needs and does not hold, each element once; of
        a sum, one contribution of each other device that has some.

        On meshes of more than 64 devices the first, middle and last coordinates of each mesh dim
        stand for the others.
        """
        return max(map(self.received_by, self._devices()))

    @cached_property
    def received_by_all(self) -> int:
        """What the devices receive together. On meshes of more than 64 devices each is taken to
        receive as much as the busiest.
        """
        devices, looked_at = prod(self.mesh), list(self._devices())
        if not self._is_small:
            return devices * self.received_elements
        # Devices that differ on mesh dims that cut nothing are looked at once.
        return sum(map(self.received_by, looked_at)) * devices // len(looked_at)

    @cached_property
    def is_free(self) -> bool:
        """Whether none receives anything."""
        return not any(map(self.received_by, self._devices()))

    def _devices(self) -> Iterator[Device]:
        """Those that are looked at."""
        used = {m for chains in (*self.sources, *self.targets) for m in cutting(chains)}
        devices = prod(self.mesh)
        return product(
            *(coordinates(n, devices) if m in used else (0,) for m, n in enumerate(self.mesh))
        )

    def received_by(self, device: Device) -> int:
        """What one device receives, in elements."""
        return sum(self._received(link, device) for link in self.move.links)

    def _received(self, link: Link, device: Device) -> int:
        if self.move.adds:
            others = self.slice_of(device, sorted(cutting(self.sources[link.source])))
            return sum(self._size(link, other, device) for other in others if other != device)
        need = has = 1
        for d, (source, target) in enumerate(link.pairs):
            (of, had), (n, wanted) = self._dim(link, d, device, device)
            need *= count_rows(needed(source, of, target, n, wanted))
            has *= count_rows(between(source, of, had, target, n, wanted))
        return need - has

    def _size(self, link: Link, sender: Device, receiver: Device) -> int:
        return prod(map(count_rows, self._box(link, sender, receiver)))

    def _dim(self, link: Link, d: int, sender: Device, receiver: Device) -> tuple[Side, Side]:
        """Of one dim of the exchange: the rows of the operand's and of the result's dims, and how
        the devices hold them.
        """
        source, target = link.pairs[d]
        return (
            self.side(source, link.source, sender),
            self.side(target, link.target, receiver, of_result=True),
        )

    def side(self, rows: Rows, k: int, device: Device, *, of_result: bool = False) -> Side:
        """The sizes of the dims of an operand, or of a result, that rows are made of, and how the
        device holds them.
        """
        shape, chains = (
            (self.move.outputs[k], self.targets[k])
            if of_result
            else (self.move.inputs[k], self.sources[k])
        )
        return Side(
            tuple([shape[d] for d in rows.dims]),
            tuple([chain_of(chains[d], self.mesh, device) for d in rows.dims]),
        )

    def _box(self, link: Link, sender: Device, receiver: Device) -> tuple[Runs, ...]:
        """The rows that the one has and the other needs."""
        found = []
        for d, (source, target) in enumerate(link.pairs):
            (of, had), (n, wanted) = self._dim(link, d, sender, receiver)
            found.append(between(source, of, had, target, n, wanted))
        return tuple(found)

    # -- which mesh dims take part -----------------------------------------------------------------

    @cached_property
    def mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims over which messages go; none where all have what they need."""
        if self.received_elements == 0 and self._is_small:
            return ()
        return tuple(
            sorted(
                {
                    m
                    for link in self.move.links
                    for m in cutting(self.sources[link.source])
                    if not self._is_stationary(link, m)
                }
            )
        )

    @property
    def _is_small(self) -> bool:
        """Whether all devices were looked at."""
        return all(len(coordinates(n, prod(self.mesh))) == n for n in self.mesh)

    def keeps(self, link: Link, d: int) -> bool:
        """Whether a dim of the exchange stays as it is, on each device, whatever its size is."""
        one, other = link.pairs[d]
        return (
            one.is_plain
            and other.is_plain
            and one.dim is not None
            and other.dim is not None
            and self.sources[link.source][one.dim] == self.targets[link.target][other.dim]
        )

    def _is_stationary(self, link: Link, m: int) -> bool:
        """Whether no element changes its coordinate on that mesh dim."""
        source, target = self.sources[link.source], self.targets[link.target]
        for one, other in link.pairs:
            if one.dim is None or (before := up_to(source[one.dim], m)) is None:
                continue
            return (
                one.is_plain
                and other.is_plain
                and other.dim is not None
                and up_to(target[other.dim], m) == before
            )
        return False

    @property
    def communicates(self) -> bool:
        """Whether devices send anything to one another."""
        return bool(self.mesh_dims)

    # -- without communication ---------------------------------------------------------------------

    @cached_property
    def is_view(self) -> bool:
        """Whether what each device needs of each result is a slice of its own of the one operand,
        one step in each dim; windows of it, at one step; a diagonal of rows that lie together.
        """
        if self.communicates or self.move.adds or len(self.move.inputs) != 1:
            return False
        devices = prod(self.mesh)
        some = list(product(*(coordinates(n, devices) for n in self.mesh)))
        return all(
            self.slices(link.target, device) is not None and self._are_views(link, device)
            for link in self.move.links
            for device in some
        )

    def _are_views(self, link: Link, device: Device) -> bool:
        return all(
            rows.form is None
            or rows.form.is_view(*map(rows_held, *self.side(rows, k, device, of_result=of_result)))
            for pair in link.pairs
            for rows, k, of_result in zip(pair, link[:2], (False, True))
        )

    def slices(self, output: int, device: Device) -> list[Slice] | None:
        """Of each dim of the operand, which local rows the result has; None where they are not
        evenly spaced, or some come from elsewhere.
        """
        links = [link for link in self.move.links if link.target == output]
        if len(links) != 1 or any(source.dim is None for source, _ in links[0].pairs):
            return None
        (link,), result = links, []
        lacks = 0 in self.local_shape(output, device)
        for d, (source, target) in enumerate(link.pairs):
            (of, had), (n, wanted) = self._dim(link, d, device, device)
            found = between(source, of, had, target, n, wanted)
            there = count_rows(held(Rows(source.dim), of, had))
            if len(found) > 1 or (not found and target.dim is None and not (lacks and there)):
                return None
            first, count, step, _ = _evenly(found[0]) if found else Slice(0, 0, 1)
            if count < 0 or (
                target.dim is not None and count != count_rows(held(target, n, wanted))
            ):
                return None
            result.append(Slice(first, count, step, target.dim is not None))
        return result

    # -- on one device -----------------------------------------------------------------------------

    def slice_of(self, device: Device, dims: Sequence[int]) -> list[Device]:
        """The devices that differ from ``device`` on those mesh dims alone, row-major."""
        return list(
            product(*(range(n) if m in dims else (device[m],) for m, n in enumerate(self.mesh)))
        )

    def boxes(self, link: Link, sender: Device, receiver: Device) -> tuple[Runs, ...] | None:
        """What ``receiver`` takes from ``sender`` through one link, dim by dim; None: nothing. What
        it has itself it takes from itself.
        """
        cuts = cutting(self.sources[link.source])
        if any(a != b for m, (a, b) in enumerate(zip(sender, receiver)) if m not in cuts):
            return None
        found = self._box(link, sender, receiver)
        return found if all(found) else None

    def local_shape(self, output: int, device: Device) -> tuple[int, ...]:
        """What the device holds of a result as the exchange numbers its rows: of windows the rows
        that they are made of, in the place of two dims.
        """
        formed = {
            target.dim: target
            for link in self.move.links
            for _, target in link.pairs
            if link.target == output and target.form is not None
        }
        gone = {d for rows in formed.values() for d in rows.dims[1:]}
        every = [formed.get(d, Rows(d)) for d in range(len(self.move.outputs[output]))]
        return tuple(
            [
                count_rows(held(rows, *self.side(rows, output, device, of_result=True)))
                for d, rows in enumerate(every)
                if d not in gone
            ]
        )

    def copies(self, link: Link, sender: Device, receiver: Device) -> list[Copy]:
        """What goes from one device to another by one link: x in the operand, y in the result."""
        found = self.boxes(link, sender, receiver)
        return [] if found is None else [copy_of(link, runs) for runs in product(*found)]

    def transfer(self, device: Device, peers: Sequence[Device | None]) -> Transfer:
        """The part of ``device`` among ``peers``, in their order; None stands for a peer of another
        group.
        """
        links = self.move.links
        shapes = tuple([self.local_shape(k, device) for k in range(len(self.move.outputs))])
        packs: list[list[Copy]] = [[] for _ in self.move.inputs]
        unpacks: list[list[list[Copy]]] = [[] for _ in self.move.outputs]
        sends: list[int] = []
        receives: list[int] = []
        for peer in peers:
            alone = peer is None or peer == device
            sent = got = 0
            for some in unpacks:
                some.append([])
            for link in () if alone else links:
                assert peer is not None
                for copy in self.copies(link, device, peer):
                    packs[link.source].append(packed(copy, sum(sends) + sent))
                    sent += prod(copy.sizes)
                for copy in self.copies(link, peer, device):
                    placed = packed(copy.flipped, sum(receives) + got)
                    unpacks[link.target][-1].append(placed.flipped)
                    got += prod(copy.sizes)
            sends.append(sent)
            receives.append(got)
        own = [(link, self.copies(link, device, device)) for link in links]
        filled = []
        for k, shape in enumerate(shapes):
            copies = [copy for some in unpacks[k] for copy in some]
            copies += [copy for link, some in own if link.target == k for copy in some]
            filled.append(self.move.adds or sum(prod(c.sizes) for c in copies) < prod(shape))
        return Transfer(
            shapes,
            tuple(sends),
            tuple(receives),
            tuple([tuple(folded(some)) for some in packs]),
            tuple([(link.source, link.target, tuple(folded(some))) for link, some in own if some]),
            tuple([tuple(self._unpacked(some)) for some in unpacks]),
            tuple(filled),
        )

    def _unpacked(self, by_peer: Sequence[Sequence[Copy]]) -> list[Copy]:
        """Of a sum, those of each peer by themselves: they reach the same rows."""
        if self.move.adds:
            return [copy for some in by_peer for copy in folded(some)]
        return folded([copy for some in by_peer for copy in some])


def copy_of(link: Link, runs: Sequence[Run]) -> Copy:
    """The copy of a run of each dim of the exchange, in the dims that the tensors have."""
    copy = from_runs(runs)
    source, target = (_by_dim([pair[side].dim for pair in link.pairs]) for side in (0, 1))

    def of(vector: Vector, dims: Sequence[int]) -> Vector:
        return tuple([vector[i] for i in dims])

    return Copy(
        copy.sizes,
        of(copy.x, source),
        tuple([of(step, source) for step in copy.dx]),
        of(copy.y, target),
        tuple([of(step, target) for step in copy.dy]),
    )


def _evenly(run: Run) -> Slice:
    """The rows x of a run; of those that are not evenly spaced, a count of -1."""
    if not run.loops:
        return Slice(run.x, run.length, 1)
    if len(run.loops) == 1 and run.length == 1:
        (count, step, at), *_ = run.loops
        return Slice(run.x, count if at == 1 else -1, step)
    return Slice(0, -1, 1)


def _by_dim(dims: Sequence[int | None]) -> list[int]:
    """The places of the dims, in the order of the dims."""
    return [i for _, i in sorted([(d, i) for i, d in enumerate(dims) if d is not None])]
