"""Redistribution on all devices at once, with numpy: what the executor does with torch and a
process group, every position read or written checked.

Who holds what comes from ``enumeration``, which shares nothing with the package; so do the
reductions. Only the steps are the package's.
"""

from typing import NamedTuple

import numpy as np
from enumeration import devices, held

MESHES = [
    (1,),
    (2,),
    (3,),
    (4,),
    (8,),
    (2, 2),
    (2, 3),
    (3, 2),
    (4, 2),
    (1, 3),
    (2, 2, 2),
    (2, 1, 2),
    (3, 2, 2),
]
DIVIDING, ANY = (1, 2, 4, 8, 12, 16, 24), (0, 1, 2, 3, 5, 6, 7, 9, 12, 16)
UNSET = -1  # local tensors hold no negative numbers


class Sharding(NamedTuple):
    """The cut of each mesh dim, and the order in which they are made."""

    shape: tuple
    mesh: tuple
    cuts: tuple
    order: tuple

    @property
    def chains(self):
        chains = [[] for _ in self.shape]
        for m in self.order:
            if self.cuts[m] is not None and self.mesh[m] > 1:
                dim, split_factor = self.cuts[m]
                chains[dim].append((m, split_factor))
        return tuple(map(tuple, chains))

    @property
    def indices(self):
        """The flat indices that each device holds, as arrays of their local shape."""
        mesh, cuts = ([of[m] for m in self.order] for of in (self.mesh, self.cuts))
        return {
            device: held(self.shape, mesh, cuts, [device[m] for m in self.order])
            for device in devices(self.mesh)
        }


def drawn(rng, meshes=MESHES, sizes=None, most=1500):
    """Two shardings of a tensor of up to ``most`` elements; of sizes that divide as often as not,
    and in every fifth case related.
    """
    mesh, sizes = rng.choice(meshes), sizes or rng.choice([DIVIDING, ANY])
    shape = tuple(rng.choice(sizes) for _ in range(rng.choice([1, 2, 2, 3])))
    while np.prod(shape) > most:
        shape = shape[1:]

    def cut():
        dim = rng.randrange(len(shape))
        factor = rng.choice([1, 1, 1, 2, 4, rng.randint(1, shape[dim] + 2)])
        return None if rng.random() < 0.3 else (dim, factor)

    source, target = (tuple(cut() for _ in mesh) for _ in range(2))
    orders = [
        tuple(rng.sample(range(len(mesh)), len(mesh)))
        if rng.random() < 0.3
        else tuple(range(len(mesh)))
        for _ in range(2)
    ]
    if rng.random() < 0.2:
        target, orders[1] = tuple(rng.choice([c, None]) for c in source), orders[0]
    return Sharding(shape, mesh, source, orders[0]), Sharding(shape, mesh, target, orders[1])


def lacking(have, want):
    """How many elements each device needs and does not hold."""
    return {device: np.setdiff1d(want[device], have[device]).size for device in have}


def number(step, device):
    """Steps number ranks by their places."""
    return step.ends[0].mesh.rank(device)


def group_of(step, device):
    """The devices among which one exchanges."""
    return [step.place(rank) for rank in step.group(number(step, device))]


def part_on(step, device, peers, *turn):
    """The part of a device among its peers."""
    return step.transfer(number(step, device), [number(step, peer) for peer in peers], *turn)


# -- one device ------------------------------------------------------------------------------------


def places(copy_sizes, start, steps):
    """One side of a strided copy, as an index of the tensor: an array of rows for each of
    its dims.
    """
    assert min((*start, *(rows for step in steps for rows in step)), default=0) >= 0, (
        "torch has no negative strides"
    )
    index = []
    for dim, first in enumerate(start):
        rows = np.array(first)
        for count, step in zip(copy_sizes, steps, strict=True):
            rows = np.add.outer(rows, np.arange(count) * step[dim])
        index.append(rows)
    return tuple(index)


def write(copies, x, y):
    """Run copies; nothing is written twice."""
    for copy in copies:
        into = places(copy.sizes, copy.y, copy.dy)
        assert (y[into] == UNSET).all()
        y[into] = x[places(copy.sizes, copy.x, copy.dx)]


def packed(part, local):
    assert local.shape == part.source_shape()
    buffer = local.reshape(-1)
    if part.packs[0] is not None:
        buffer = np.full(sum(part.sends), UNSET, dtype=float)
        write(part.packs[0], local, buffer)
    assert len(buffer) == sum(part.sends) and (buffer != UNSET).all()
    return buffer


def unpacked(part, received, local, target=None):
    """The target, or what is new of it in ``target``, where it is filled in rounds."""
    if part.unpacks[0] is None:
        assert not part.kept() and target is None  # it travelled along
        return received.reshape(part.target_shape())
    target = np.full(part.target_shape(), UNSET, dtype=float) if target is None else target
    write(part.unpacks[0], received, target)
    write([copy for _, copy in part.kept()], local, target)
    return target


# -- all devices -----------------------------------------------------------------------------------


def all_to_all(parts, peers, local):
    """What each device gets, in the order of its peers."""
    sent = {}
    for device, part in parts.items():
        pieces = np.split(packed(part, local[device]), np.cumsum(part.sends)[:-1])
        sent |= {(device, peer): piece for peer, piece in zip(peers[device], pieces, strict=True)}
    received = {}
    for device, part in parts.items():
        pieces = [sent[peer, device] for peer in peers[device]]
        assert tuple(map(len, pieces)) == part.receives
        received[device] = np.concatenate(pieces)
    return received


def from_others(parts, peers):
    """How many elements each device receives that it did not send to itself."""
    return {
        device: sum(
            n for peer, n in zip(peers[device], part.receives, strict=True) if peer != device
        )
        for device, part in parts.items()
    }


def run_exchange(step, local, peers=None):
    """(the local tensors after, how many elements each device received in each round): an
    all-to-all among ``peers``, or one for each round.
    """
    peers = peers or {device: group_of(step, device) for device in local}
    after, received = {}, []
    for turn in range(step.rounds):
        parts = {device: part_on(step, device, peers[device], turn) for device in local}
        got = all_to_all(parts, peers, local)
        after = {
            device: unpacked(part, got[device], local[device], after.get(device))
            for device, part in parts.items()
        }
        received.append(from_others(parts, peers))
    assert all((tensor != UNSET).all() for tensor in after.values())
    return after, {device: [counts[device] for counts in received] for device in local}


def run_gather(step, local):
    """The local tensors after an all-gather."""
    after = {}
    for device in local:
        peers = group_of(step, device)
        part = step.gathering(number(step, device), [number(step, peer) for peer in peers])
        assert (
            part.packs[0] is None
            and part.sends == part.receives == tuple(local[peer].size for peer in peers)
            and len(set(part.sends)) == 1
        )
        after[device] = unpacked(
            part, np.concatenate([local[peer].reshape(-1) for peer in peers]), local[device]
        )
    return after


REDUCE = {"sum": np.sum, "max": np.max}


def run_reduction(step, local, peers=None):
    """(the local tensors after, how many elements each device received): an all-reduce of what each
    keeps, or blocks for everyone to reduce.

    How an all-reduce travels is not the step's affair: there the count is None. With ``peers``
    everything goes by blocks, as where the mesh has no group for it.
    """
    if peers is None and not step.scatters:
        parts = {device: part_on(step, device, (device,)) for device in local}
        kept = {
            device: unpacked(part, packed(part, local[device]), local[device])
            for device, part in parts.items()
        }
        stacked, moved = (
            {device: np.stack([kept[peer] for peer in group_of(step, device)]) for device in local},
            None,
        )
    else:
        peers = peers or {device: group_of(step, device) for device in local}
        parts = {device: part_on(step, device, peers[device]) for device in local}
        if step.even:  # a native reduce-scatter has no splits
            assert all(len({*part.sends}) == 1 for part in parts.values())
        received, moved = all_to_all(parts, peers, local), from_others(parts, peers)
        stacked = {
            device: received[device].reshape(step.parts, *part.target_shape())
            for device, part in parts.items()
        }
    return {
        device: REDUCE[step.op](stack, axis=0) / step.divisor for device, stack in stacked.items()
    }, moved


def shuffled(step, rng):
    """The peers of each device, in an order of the group's own."""
    everyone = devices(step.mesh)
    rng.shuffle(everyone)
    return {
        device: [peer for peer in everyone if peer in group_of(step, device)] for device in everyone
    }
