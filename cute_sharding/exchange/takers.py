"""Those that need something of one device, and which share of it each sender sends."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.meetings import Met
from cute_sharding.exchange.placed import Placed
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Runs, count_rows, span


class Takers(NamedTuple):
    """Those that need something of one device, numbered.

    Attributes:
        target: what they are to hold.
        fixed: (mesh dim, coordinate) that all have.
        mets: dim by dim, where there is something of what the device has.
    """

    target: Placed
    fixed: tuple[tuple[int, int], ...]
    mets: tuple[Met, ...]

    @property
    def many(self) -> int:
        """How many they are."""
        return prod(len(found.runs) for found in self.mets) * self._replicas

    @property
    def _replicating(self) -> tuple[int, ...]:
        """The mesh dims on which those differ that need the same."""
        fixed = dict(self.fixed)
        return tuple([m for m in self.target.replicated if m not in fixed])

    @property
    def _replicas(self) -> int:
        return count_on(self.target, self._replicating)

    def at(self, i: int) -> tuple[Device, tuple[Runs, ...]]:
        """The i-th, and what it needs."""
        i, replica = divmod(i, self._replicas)
        places = [*self.fixed]
        runs: list[Runs] = []
        for found in reversed(self.mets):
            i, at = divmod(i, len(found.runs))
            places += found.places[at]
            runs.append(found.runs[at])
        return device_at(self.target, places, self._replicating, replica), tuple(reversed(runs))

    def number(self, device: Device) -> int:
        """Which one a device is."""
        i = 0
        for found in self.mets:
            place = tuple([(m, device[m]) for m, _ in found.places[0]])
            i = i * len(found.runs) + found.numbers[place]
        return i * self._replicas + number_on(self.target, self._replicating, device)


def count_on(placed: Placed, dims: Sequence[int]) -> int:
    """How many devices there are that differ on those mesh dims alone."""
    return prod([placed.mesh.sizes[m] for m in dims])


def number_on(placed: Placed, dims: Sequence[int], device: Device) -> int:
    """The number of a device among those that differ on those mesh dims alone."""
    number = 0
    for m in dims:
        number = number * placed.mesh.sizes[m] + device[m]
    return number


def device_at(
    placed: Placed, places: Sequence[tuple[int, int]], dims: Sequence[int], number: int
) -> Device:
    """The device at those coordinates, and of that number among those that differ on ``dims``."""
    found = dict(places)
    for m in reversed(dims):
        number, found[m] = divmod(number, placed.mesh.sizes[m])
    return tuple([found[m] for m in range(len(placed.mesh.sizes))])


def overlap(
    runs: tuple[Runs, ...], i: int, takers: int, k: int, owners: int
) -> tuple[Runs, ...] | None:
    """Of the box of the i-th of ``takers`` what the k-th of ``owners`` sends: the share by which
    [i / takers, (i + 1) / takers) and [k / owners, (k + 1) / owners) overlap; None: nothing.
    """
    low, high = max(k * takers - i * owners, 0), min((k + 1) * takers - i * owners, owners)
    if (low, high) == (0, owners):
        return runs
    counts = [count_rows(found) for found in runs]
    if low >= high or not counts:
        return runs if low == 0 and high > 0 and not counts else None
    d = max(range(len(runs)), key=lambda d: (counts[d] % owners == 0, counts[d]))
    some = span(runs[d], counts[d] * low // owners, counts[d] * high // owners)
    return (*runs[:d], some, *runs[d + 1 :]) if some else None
