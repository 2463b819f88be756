"""What a device holds of a tensor, as boxes: one for each run of rows of each dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

from cute_sharding.sharding.deal import rows


@dataclass(frozen=True)
class Block:
    """Elements that are a box in the global tensor, and a box in the device's local tensor.

    Attributes:
        offsets: where it begins in the global tensor, for each dim.
        sizes: how many rows it has, for each dim.
        places: where it begins in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]


def blocks(shape: Sequence[int], chains: Sequence[Sequence[tuple[int, int, int]]]) -> list[Block]:
    """The boxes of one device, in the order of the global tensor; none where it holds nothing.

    The local tensor has a dim's rows in the order that they have globally, so that a run of rows is
    one there too.

    Args:
        shape: the global shape.
        chains: for each dim, (split factor, devices, the device's coordinate) of each mesh dim that
            shards it, in order.
    """
    if prod(shape) == 0:
        return []
    runs = []
    for n, chain in zip(shape, chains):
        intervals = rows(n, chain)
        places = accumulate((stop - start for start, stop in intervals), initial=0)
        runs.append(
            [(start, stop - start, place) for (start, stop), place in zip(intervals, places)]
        )
    return [
        Block(*(tuple(column) for column in zip(*box))) if box else Block((), (), ())
        for box in product(*runs)
    ]
