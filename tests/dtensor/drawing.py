"""Draws of cases: shapes, placements, programs of views, and pending reductions. The same for the
same seed, in every process.
"""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from math import prod

import torch
from enumeration import devices, shapes_of
from simulation import is_partial, placement_of, plain
from torch.distributed.tensor import Partial

from cute_sharding.propagation.views import carry
from cute_sharding.relations.view import reshape, view_of

EMPTY = [(0,), (0, 1), (5, 0), (0, 4), (1, 0, 3), (2, 0, 2), (0, 0), (3, 1, 0, 2)]


def shapes(n):
    """Shapes of n elements and one to four dims."""
    return shapes_of(n)[n == 1 :] if n else EMPTY


def draw_cuts(rng, mesh, shape):
    """Shard, _StridedShard with any split factor from 1 to the dim's size, or none."""
    cuts = []
    for _ in mesh:
        dim = rng.randrange(-1, len(shape))
        cuts.append(None if dim < 0 else (dim, rng.choice((1, rng.randint(1, max(shape[dim], 1))))))
    return tuple(cuts)


def draw_shape(rng):
    return tuple(
        rng.choice((2, 4, 8, 12, 3, 6) if rng.random() < 0.7 else (0, 1, 1, 2, 5, 7))
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def draw_placements(rng, mesh, shape, strided=True, pending=None, chance=0.0):
    """Placements, each of them a pending reduction with that chance."""
    placements = [
        placement_of(cut if strided or cut is None else (cut[0], 1))
        for cut in draw_cuts(rng, mesh, shape)
    ]
    return [Partial(pending) if rng.random() < chance else p for p in placements]


# -- views -----------------------------------------------------------------------------------------


def draw_view(rng, mesh, sizes, wants_communication=None):
    """A shape, another, and cuts of the first. Most draws are free, so those that are not can be
    asked for.
    """
    while True:
        n = rng.choice(sizes)
        shape, target = rng.choice(shapes(n)), rng.choice(shapes(n))
        cuts = draw_cuts(rng, mesh, shape)
        is_blocked = carry(view_of(shape, reshape(shape, target)), cuts, mesh).blocked is not None
        if wants_communication in (None, is_blocked):
            return shape, target, cuts


OPS = [
    "view",
    "view",
    "reshape",
    "reshape",
    "flatten",
    "unflatten",
    "permute",
    "squeeze",
    "unsqueeze",
]


def draw_op(rng, tensor):
    """An op that a single device can do with its tensor, and its arguments."""
    shape, ndim = tuple(tensor.shape), tensor.dim()
    name = rng.choice(OPS if ndim else ["reshape", "unsqueeze"])
    if name in ("view", "reshape"):
        return "view" if name == "view" and tensor.is_contiguous() else "reshape", (
            rng.choice(shapes(prod(shape))),
        )
    if name == "flatten":
        start = rng.randrange(ndim)
        return name, (start, rng.randrange(start, ndim))
    if name == "unflatten":
        dim = rng.randrange(ndim)
        return name, (
            dim,
            rng.choice([s for s in shapes_of(shape[dim]) if s] if shape[dim] else [(0, 3), (2, 0)]),
        )
    if name == "permute":
        return name, (rng.sample(range(ndim), ndim),)
    if name == "squeeze":
        return name, rng.choice([(), (rng.randrange(-ndim, ndim),), (tuple(range(ndim)),)])
    return name, (rng.randint(-ndim - 1, ndim),)


def draw_program(rng, tensor, target):
    """One op or two, the first more often than not a view as ``target``."""
    with plain():
        program = [("view", (target,)) if rng.random() < 0.5 else draw_op(rng, tensor)]
        if rng.random() < 0.4:
            program.append(draw_op(rng, run(program, tensor)))
    return program


def run(program, tensor):
    for name, args in program:
        tensor = getattr(tensor, name)(*args)
    return tensor


# -- pending reductions ----------------------------------------------------------------------------


REDUCE = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.sum(0) // stacked.shape[0],
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
    "band": lambda stacked: reduce(torch.bitwise_and, stacked),
    "bor": lambda stacked: reduce(torch.bitwise_or, stacked),
    "bxor": lambda stacked: reduce(torch.bitwise_xor, stacked),
}


def contributions(rng, shape, mesh, placements, dtype=torch.float64):
    """For each rank a tensor of small integers: another one for each coordinate on the mesh dims
    whose reduction is pending.

    Every average of them is an integer too, so that what they come to can be compared to the bit.
    """
    pending = [m for m, p in enumerate(placements) if is_partial(p)]
    unit = prod(mesh) if any(p == Partial("avg") for p in placements) else 1
    drawn = {}
    with plain():
        for device in devices(mesh):
            values = [unit * rng.randint(1, 3) for _ in range(prod(shape))]
            drawn.setdefault(
                tuple(device[m] for m in pending), torch.tensor(values, dtype=dtype).reshape(shape)
            )
        return {
            rank: drawn[tuple(device[m] for m in pending)]
            for rank, device in enumerate(devices(mesh))
        }


def reduced(given, mesh, before, after):
    """What each rank's contributions come to, once the reductions that ``after`` does not keep
    pending are done.
    """
    everywhere = devices(mesh)
    with plain():
        for m, (placement, kept) in enumerate(zip(before, after)):
            if is_partial(placement) and not is_partial(kept):
                groups = defaultdict(list)
                for rank, device in enumerate(everywhere):
                    groups[device[:m] + device[m + 1 :]].append(given[rank])
                done = {
                    group: REDUCE[placement.reduce_op](torch.stack(tensors))
                    for group, tensors in groups.items()
                }
                given = {
                    rank: done[device[:m] + device[m + 1 :]]
                    for rank, device in enumerate(everywhere)
                }
    return given
