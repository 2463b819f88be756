"""The mixed-radix digits of a row number that each mesh dim fixes: the modes of a sharding of one
tensor dim, where sizes divide.

A cut divides the layout of the rows: a mesh dim takes a mode out of the middle. Its coordinate is
then a number made of digits of the row number, each with a size and a stride. A comparison of
digits answers for all devices at once; a comparison of rows answers for two devices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.layout import Layout, LayoutError, make_layout
from cute_sharding.layout.algebra.modes import merge_neighbours
from cute_sharding.layout.layout import from_leaves, row_major
from cute_sharding.sharding.rows import Chains, pieces_of, up_to

Mode: TypeAlias = "tuple[int, int]"  # (size, stride), strides in rows


class Digits(NamedTuple):
    devices: dict[int, tuple[Mode, ...]]  # for each mesh dim, outermost first
    local: tuple[Mode, ...]

    def beyond(self, near: frozenset[int]) -> Digits:
        """The digits of the groups of devices that differ only on the mesh dims ``near``."""
        if not near:
            return self
        return Digits({m: some for m, some in self.devices.items() if m not in near}, self.local)


@remembered
def digits(n: int, chain: tuple[tuple[int, int], ...], mesh: Sequence[int]) -> Digits | None:
    """The digits of ``n`` rows under the cuts ``(mesh dim, split factor)``; None if blocks differ
    in size or start inside an earlier split, or if there are no rows.
    """
    try:
        return divided(n, chain, mesh) if n else None
    except LayoutError:
        return None


def divided(n: int, chain: tuple[tuple[int, int], ...], mesh: Sequence[int]) -> Digits:
    """:func:`digits`, or an error.

    Raises:
        LayoutError: there are no digits; the message says why.
    """
    if n == 0:
        return Digits({m: ((mesh[m], 0),) for m, _ in chain}, ((0, 1),))
    local: list[Mode] = [(n, 1)] if n > 1 else []
    devices: dict[int, tuple[Mode, ...]] = {}
    for m, split_factor in chain:
        rows, parts = prod(size for size, _ in local), mesh[m]
        pieces = pieces_of(rows, split_factor)
        if rows % (pieces * parts):
            raise LayoutError(
                f"mesh dim {m} cannot divide {rows} rows into {pieces} x {parts} blocks of one size"
            )
        # Block, device and pieces, from the inside out: two logical_divides.
        inner = _take(local, rows // (pieces * parts))
        middle = _take(inner[0], parts) if inner is not None else None
        if inner is None or middle is None:
            raise LayoutError(
                f"mesh dim {m} divides {rows} rows into blocks that cross the blocks of an "
                "earlier mesh dim"
            )
        devices[m] = tuple(middle[1])
        local = merge_neighbours([*middle[0], *inner[1]])
    return Digits(devices, tuple(local))


def chosen_by(
    m: int, n: int, chain: tuple[tuple[int, int], ...], mesh: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """The part of ``n`` rows that a mesh dim's coordinate selects: its digits, or else the cuts up
    to its own; None if it cuts nothing.
    """
    cuts = up_to(chain, m)
    found = None if cuts is None else digits(n, cuts, mesh)
    return cuts if found is None else found.devices[m]


def common(n: int, one: Digits, other: Digits) -> tuple[int, int] | None:
    """(The rows of ``n`` that a device holds under both, fewest over all devices; the rows that it
    holds under ``other``); None if the digits do not line up.
    """
    bounds = sorted(
        {
            1,
            n,
            *(
                b
                for d in (one, other)
                for modes in d.devices.values()
                for size, stride in modes
                for b in (stride, stride * size)
            ),
        }
    )
    if any(b % a for a, b in pairwise(bounds)):
        return None
    fixed = [
        {
            (low, weight): m
            for m, modes in d.devices.items()
            for low, weight in _weights(modes, bounds)
        }
        for d in (one, other)
    ]
    owners = [{low: (m, weight) for (low, weight), m in f.items()} for f in fixed]
    both = free = 1
    for low, high in pairwise(bounds):
        before, after = owners[0].get(low), owners[1].get(low)
        if before is not None and after is not None and before != after:
            both = 0  # some device has different digits under the two
        if before is None and after is None:
            both *= high // low
        if after is None:
            free *= high // low
    return both, free


def _weights(modes: Sequence[Mode], bounds: Sequence[int]) -> list[tuple[int, int]]:
    """(lower bound, weight in the coordinate) of each digit between two neighbouring bounds that
    the modes cover.
    """
    result, weight = [], 1
    for size, stride in reversed(modes):
        result += [(b, weight * (b // stride)) for b in bounds if stride <= b < stride * size]
        weight *= size
    return result


def _take(modes: Sequence[Mode], count: int) -> tuple[list[Mode], list[Mode]] | None:
    """Split off the innermost ``count`` rows: (the modes left, the modes taken); None if that would
    cut across a mode.
    """
    taken: list[Mode] = []
    rest = list(modes)
    while count > 1:
        size, stride = rest.pop() if rest else (0, 0)
        if size and count % size == 0:
            taken.insert(0, (size, stride))
            count //= size
        elif size % count == 0 and size:
            taken.insert(0, (count, stride))
            rest.append((size // count, stride * count))
            count = 1
        else:
            return None
    return rest, taken


def layout_of(shape: Sequence[int], chains: Chains, mesh: Sequence[int]) -> Layout:
    """The thread-value layout of chains: a mode for each mesh dim, and one for each tensor dim.

    Raises:
        LayoutError: sizes do not divide.
    """
    devices: list[Layout] = [Layout(n, 0) for n in mesh]
    local = []
    for dim, (n, chain, stride) in enumerate(zip(shape, chains, row_major(tuple(shape)))):
        try:
            found = divided(n, chain, mesh)
        except LayoutError as error:
            raise LayoutError(f"in tensor dim {dim}, {error}") from None
        for m, modes in found.devices.items():
            devices[m] = from_leaves([(s, d * stride) for s, d in modes])
        local.append(from_leaves([(s, d * stride) for s, d in found.local]))
    return make_layout(make_layout(*devices), make_layout(*local))
