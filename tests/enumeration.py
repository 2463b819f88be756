"""Who holds what, by counting it out: the reference of the tests. It shares no code and no formula
with the package.

A mesh dim of M devices that shards a dim of n rows with split factor f hands rows out as cards:
`chunk` cuts the rows into f pieces, each piece into M blocks, and device k gets block k of every
piece. Everything else here only repeats that, device by device. A cut is (tensor dim, split
factor), or None for a mesh dim that shards nothing.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from operator import and_

import numpy as np


def chunk(rows, parts):
    """As torch.chunk, but always `parts` chunks: the last may be shorter, and after it they are
    empty.
    """
    size = -(-len(rows) // parts)
    return [rows[k * size : (k + 1) * size] if size else rows[:0] for k in range(parts)]


def dealt(rows, split_factor, parts, device):
    hand = []
    for piece in chunk(rows, split_factor):
        hand.extend(chunk(piece, parts)[device])
    return hand


@lru_cache(None)
def rows_after(n, steps):
    """The rows of a dim of n that are left after `steps`, each (split factor, parts, device)."""
    rows = list(range(n))
    for split_factor, parts, device in steps:
        rows = dealt(rows, split_factor, parts, device)
    return tuple(rows)


def devices(mesh):
    return list(product(*map(range, mesh)))


def rows_of(shape, mesh, cuts, device):
    """For each tensor dim, the rows that the device holds, in its local order."""
    steps = [()] * len(shape)
    for cut, parts, coordinate in zip(cuts, mesh, device, strict=True):
        if cut is not None:
            steps[cut[0]] += ((cut[1], parts, coordinate),)
    return [rows_after(n, s) for n, s in zip(shape, steps, strict=True)]


def held(shape, mesh, cuts, device):
    """The flat indices that the device holds, in its local order, as an array of its local
    shape.
    """
    rows = rows_of(shape, mesh, cuts, device)
    index = np.arange(prod(shape)).reshape(shape)
    return index[np.ix_(*rows)] if shape else index


def order_in(mesh, cuts):
    """The order of mesh dims that split factors encode, where they do: of the mesh dims that cut
    one tensor dim, each has the devices of those of the later ones that cut before it as its
    factor. Else None.
    """
    orders = {}
    for m in reversed(range(len(mesh))):
        if cuts[m] is None:
            continue
        before = orders.setdefault(cuts[m][0], [])
        at = [i for i in range(len(before) + 1) if prod(mesh[k] for k in before[:i]) == cuts[m][1]]
        if not at:
            return None
        before.insert(at[0], m)
    return [m for order in orders.values() for m in order]


def held_by_a_dtensor(shape, mesh, cuts, device):
    """As ``held``, of a DTensor that a program makes: torch takes split factors for the code of an
    order, where they are.
    """
    order = order_in(mesh, cuts) if any(cut and cut[1] != 1 for cut in cuts) else None
    if order is None:
        return held(shape, mesh, cuts, device)
    return held(
        shape,
        tuple([mesh[m] for m in order]),
        tuple([(cuts[m][0], 1) for m in order]),
        tuple([device[m] for m in order]),
    )


@lru_cache(None)
def _mask(shape, dim, rows):
    index = np.arange(prod(shape)).reshape(shape)
    return sum(1 << int(i) for i in np.take(index, rows, axis=dim).reshape(-1)) if rows else 0


@lru_cache(None)
def _masks(shape, mesh, dim, factors):
    """For every device, as the bits of an int, the elements whose rows of ``dim`` it holds.
    ``factors`` has the split factor of each mesh dim that cuts ``dim``, None for others.
    """
    result = []
    for device in devices(mesh):
        steps = zip(factors, mesh, device, strict=True)
        rows = rows_after(shape[dim], tuple([step for step in steps if step[0] is not None]))
        result.append(_mask(shape, dim, rows))
    return tuple(result)


def signature(shape, mesh, cuts):
    """The set of elements of every device, each as the bits of an int. Equal signatures: the same
    elements everywhere.
    """
    result = [(1 << prod(shape)) - 1] * prod(mesh)
    for dim in {cut[0] for cut in cuts if cut is not None}:
        factors = tuple([cut[1] if cut is not None and cut[0] == dim else None for cut in cuts])
        result = map(and_, result, _masks(shape, mesh, dim, factors))
    return tuple(result)


@lru_cache(None)
def factorizations(n, dims):
    """The shapes of `dims` dims with n elements, ones included."""
    if dims == 0:
        return [()] if n == 1 else []
    return [
        (d, *rest)
        for d in range(1, n + 1)
        if n % d == 0
        for rest in factorizations(n // d, dims - 1)
    ]


@lru_cache(None)
def shapes_of(n, most_dims=4):
    return [shape for dims in range(most_dims + 1) for shape in factorizations(n, dims)]


def cuts_on(shape):
    """Every cut that can differ from another: a split factor beyond the size is as good as the
    size.
    """
    return [None, *((d, f) for d, n in enumerate(shape) for f in range(1, max(n, 1) + 1))]
