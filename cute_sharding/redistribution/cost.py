"""What going from one sharding to another costs, in elements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

from cute_sharding.sharding.deal import local_size, rows
from cute_sharding.views import Cut

# Devices looked at one by one; of larger meshes a few coordinates of each mesh dim stand for all.
DEVICES = 64
# Intervals of rows compared one by one; longer lists are counted by their shares.
INTERVALS = 4096


def local_elements(shape: Sequence[int], cuts: Sequence[Cut], mesh: Sequence[int]) -> int:
    """The most elements a device holds: device 0, everywhere."""
    sizes = list(shape)
    for cut, parts in zip(cuts, mesh, strict=True):
        if cut is not None:
            sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], parts, 0)
    return prod(sizes)


def received_elements(shape: Sequence[int], source: Sequence[Cut], target: Sequence[Cut], mesh: Sequence[int]) -> int:
    """The elements that the busiest device must receive: what it needs under ``target`` and does not hold under ``source``.

    Counted dim by dim from the intervals of rows held: exact on meshes of up to 64 devices; on larger ones the first, a middle and the last
    coordinates of each mesh dim stand for the rest, and split factors with thousands of pieces are counted by their shares.
    """
    if tuple(source) == tuple(target):
        return 0
    if any(prod(c[1] for c in cuts if c is not None) > INTERVALS for cuts in (source, target)):
        return _by_shares(shape, source, target, mesh)
    dims = sorted({cut[0] for cut in (*source, *target) if cut is not None})
    whole = prod(n for dim, n in enumerate(shape) if dim not in dims)
    chains = [[[(m, cut[1]) for m, cut in enumerate(cuts) if cut is not None and cut[0] == dim] for cuts in (source, target)] for dim in dims]
    worst = 0
    for device in _devices(mesh):
        need = have = whole
        for dim, (before, after) in zip(dims, chains, strict=True):
            wanted, common = _counts(shape[dim], tuple((f, mesh[m], device[m]) for m, f in before), tuple((f, mesh[m], device[m]) for m, f in after))
            need *= wanted
            have *= common
        worst = max(worst, need - have)
    return worst


def _devices(mesh: Sequence[int]) -> product[tuple[int, ...]]:
    if prod(mesh) <= DEVICES:
        return product(*map(range, mesh))
    return product(*(sorted({0, 1, n // 2, n - 1}) if n > 3 else range(n) for n in mesh))


@lru_cache(maxsize=1 << 14)
def _counts(n: int, before: tuple[tuple[int, int, int], ...], after: tuple[tuple[int, int, int], ...]) -> tuple[int, int]:
    """(rows wanted after, rows of them held before) of a dim of ``n`` rows."""
    wanted = rows(n, after)
    held = wanted if before == after else rows(n, before)
    total = sum(stop - start for start, stop in wanted)
    common = i = j = 0
    while i < len(wanted) and j < len(held):
        common += max(0, min(wanted[i][1], held[j][1]) - max(wanted[i][0], held[j][0]))
        if wanted[i][1] <= held[j][1]:
            i += 1
        else:
            j += 1
    return total, common


def _by_shares(shape: Sequence[int], source: Sequence[Cut], target: Sequence[Cut], mesh: Sequence[int]) -> int:
    """As if sizes divided and the cuts crossed: of each mesh dim that changes, a device that held a shard has one part in as many as there are."""
    need = local_elements(shape, target, mesh)
    share = prod(parts for a, b, parts in zip(source, target, mesh, strict=True) if a != b and a is not None)
    return need - need // share
