"""The cost of going from one sharding to another, in elements held and received. Seconds, and so
latency, are in :mod:`.network`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as chained
from itertools import product
from math import prod

from cute_sharding._memory import remembered
from cute_sharding.sharding.chains import Chains, Cut, chain_of, chains_of
from cute_sharding.sharding.deal import kinds_of_device, local_size
from cute_sharding.sharding.digits import common, digits
from cute_sharding.sharding.meeting import Chain, count_rows, meet, rows_held

# Meshes of up to so many devices are looked at one by one; on larger ones a few coordinates of each
# mesh dim stand for all, if sizes do not divide.
DEVICES = 64


def local_elements(shape: Sequence[int], cuts: Sequence[Cut], mesh: Sequence[int]) -> int:
    """The most elements that a device holds of a tensor of global ``shape`` under ``cuts``, one for
    each mesh dim.

    >>> local_elements((10, 4), [(0, 1)], (4,))  # 3 of 10 rows
    12
    """
    shape, mesh = tuple(shape), tuple(mesh)
    return most_local(shape, chains_of(cuts, len(shape), mesh), mesh)


def received_elements(
    shape: Sequence[int], source: Sequence[Cut], target: Sequence[Cut], mesh: Sequence[int]
) -> int:
    """The elements that the busiest device must receive: what it needs under ``target`` and does
    not hold under ``source``.

    If sizes divide, it follows from the digits that each mesh dim fixes, on meshes of any size.
    Otherwise devices are counted one by one: all on meshes of up to 64 devices; on larger ones the
    first, a middle and the last coordinates of each mesh dim stand for the rest.

    >>> received_elements((8, 8), [(0, 1)], [(1, 1)], (4,))  # Shard(0) to Shard(1): 3/4 of 16
    12
    """
    shape, mesh = tuple(shape), tuple(mesh)
    return received(
        shape, chains_of(source, len(shape), mesh), chains_of(target, len(shape), mesh), mesh
    )


def received(shape: tuple[int, ...], source: Chains, target: Chains, mesh: tuple[int, ...]) -> int:
    """:func:`received_elements` for chains."""
    if source == target or 0 in shape:
        return 0
    found = received_by_digits(shape, source, target, mesh)
    return (
        max([wanted - kept for wanted, kept in devices_of(shape, source, target, mesh)])
        if found is None
        else found
    )


def holds_all(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains
) -> bool:
    """Whether every device already holds what it needs. May be False by mistake, but never True."""
    if all(after[: len(before)] == before for before, after in zip(source, target)):
        return True
    if prod(mesh) > DEVICES:
        for n, before, after in zip(shape, source, target):
            one, other = digits(n, before, mesh), digits(n, after, mesh)
            if one is None or other is None or common(n, one, other) is None:
                return False
    return received(shape, source, target, mesh) == 0


def received_by_digits(
    shape: tuple[int, ...],
    source: Chains,
    target: Chains,
    mesh: tuple[int, ...],
    near: frozenset[int] = frozenset(),
) -> int | None:
    """:func:`received`, if sizes divide and the digits line up; else None. ``near``: without
    elements from devices that differ on these mesh dims alone.
    """
    need = have = 1
    for n, before, after in zip(shape, source, target):
        one, other = digits(n, before, mesh), digits(n, after, mesh)
        counts = None if one is None or other is None else common(n, one.beyond(near), other)
        if counts is None:
            return None
        have *= counts[0]
        need *= counts[1]
    return need - have


def most_local(
    shape: tuple[int, ...], chains: Chains, mesh: tuple[int, ...], least_of: Sequence[int] = ()
) -> int:
    """The number of elements on the fullest device; ``least_of``: see :func:`most_rows`."""
    return prod(most_rows(shape, chains, mesh, tuple(least_of)))


@remembered
def most_rows(
    shape: tuple[int, ...], chains: Chains, mesh: tuple[int, ...], least_of: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The number of rows of each dim on the fullest device. This may not be device 0: if a cut
    before left another device fewer rows, they are dealt in shorter pieces, and it may get more of
    them.

    Among devices that differ on the mesh dims ``least_of``, the one with the fewest counts: it
    receives most when they gather.
    """
    most = []
    for n, chain in zip(shape, chains):
        if chain:
            cuts = tuple([(factor, mesh[m], m in least_of) for m, factor in chain])
            n = max(rows_of_devices(n, cuts))
        most.append(n)
    return tuple(most)


@remembered
def rows_of_devices(n: int, chain: tuple[tuple[int, int, bool], ...]) -> frozenset[int]:
    """The numbers of rows, of ``n``, that devices hold after a chain of cuts: (split factor,
    devices, whether only the device with the fewest of these counts).

    >>> sorted(rows_of_devices(10, ((1, 4, False),)))
    [1, 3]
    """
    sizes = {n}
    for split_factor, parts, is_least in chain:
        blocks = [
            {
                local_size(size, split_factor, parts, device)
                for device in kinds_of_device(size, split_factor, parts)
            }
            for size in sizes
        ]
        sizes = {*map(min, blocks)} if is_least else {*chained.from_iterable(blocks)}
    return frozenset(sizes)


def devices_of(
    shape: tuple[int, ...], source: Chains, target: Chains, mesh: tuple[int, ...]
) -> list[tuple[int, int]]:
    """(elements needed, elements of these held) of each device, or of those that stand for all."""
    dims = [d for d in range(len(shape)) if source[d] or target[d]]
    whole = prod(n for d, n in enumerate(shape) if d not in dims)
    used = {m for chains in (source, target) for chain in chains for m, _ in chain}
    result = []
    for device in product(
        *(coordinates(n, prod(mesh)) if m in used else (0,) for m, n in enumerate(mesh))
    ):
        need = have = whole
        for d in dims:
            before, after = (chain_of(chains[d], mesh, device) for chains in (source, target))
            wanted, kept = _counts(shape[d], before, after)
            need *= wanted
            have *= kept
        result.append((need, have))
    return result


def coordinates(n: int, devices: int) -> Sequence[int]:
    """The coordinates of a mesh dim of ``n`` that stand for all, on a mesh of so many devices."""
    return range(n) if devices <= DEVICES or n <= 3 else sorted({0, 1, n // 2, n - 1})


@remembered
def _counts(n: int, before: Chain, after: Chain) -> tuple[int, int]:
    """(rows needed after, rows of these held before) of a dim of ``n`` rows."""
    return count_rows(rows_held(n, after)), count_rows(meet(n, before, after))
