"""The bytes that a step receives, line by line, in groups of equal collectives; and their seconds
by the network model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cute_sharding.exchange import Network
from cute_sharding.exchange.network import Chosen
from cute_sharding.tools.profile.report import Collective, Place

# The collectives whose elements a host receives once, for all its devices.
_TOGETHER = ("all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce")


class Alike(NamedTuple):
    """The common properties of collectives that are counted together.

    Attributes:
        place: the line for which they run; None if the line is unknown.
        backward: whether gradients were computed.
        op: the kind of the collectives, as in
            :class:`~cute_sharding.tools.profile.report.Collective`.
        group: the mesh dims of the group, and the number of ranks of each.
        itemsize: the bytes of an element.
    """

    place: Place | None
    backward: bool
    op: str
    group: tuple[tuple[int, int], ...]
    itemsize: int


class TrafficAmount(NamedTuple):
    """The amount of communication of equal collectives.

    Attributes:
        collectives: the number of collectives.
        received: the elements that this rank receives.
        busiest: the elements that the busiest rank receives; if unknown, as ``received``.
    """

    collectives: int = 0
    received: int = 0
    busiest: int = 0

    def plus(self, other: TrafficAmount, times: int = 1) -> TrafficAmount:
        """The sum of both amounts, with the other amount so many times."""
        return TrafficAmount(*(a + times * b for a, b in zip(self, other)))


def group_on(mesh: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The mesh dims on which the ranks differ, and the number of ranks on each.

    >>> group_on((2, 4), [4, 5, 6, 7])
    ((1, 4),)
    """
    found, step = [], 1
    for m in range(len(mesh) - 1, -1, -1):
        parts = len({rank // step % mesh[m] for rank in ranks})
        if parts > 1:
            found.append((m, parts))
        step *= mesh[m]
    return tuple(reversed(found))


@dataclass(frozen=True)
class Traffic:
    """The bytes that a step receives.

    Attributes:
        rows: groups of equal collectives, with their amounts.
    """

    rows: dict[Alike, TrafficAmount]

    @classmethod
    def of(cls, collectives: Iterable[Collective], mesh: Sequence[int]) -> Traffic:
        """The recorded collectives, on a mesh of these sizes whose ranks start at 0. Barriers
        receive nothing.
        """
        rows: dict[Alike, TrafficAmount] = {}
        for one in collectives:
            if one.op == "barrier":
                continue
            alike = Alike(one.place, one.backward, one.op, group_on(mesh, one.ranks), one.itemsize)
            busiest = one.received if one.busiest is None else one.busiest
            rows[alike] = rows.get(alike, TrafficAmount()).plus(
                TrafficAmount(1, one.received, busiest)
            )
        return cls(rows)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum(amount.collectives for amount in self.rows.values())

    @property
    def received_bytes(self) -> int:
        """The bytes that the rank receives."""
        return sum(amount.received * alike.itemsize for alike, amount in self.rows.items())

    @property
    def busiest_bytes(self) -> int:
        """The bytes that the busiest rank of each collective receives."""
        return sum(amount.busiest * alike.itemsize for alike, amount in self.rows.items())

    def seconds(self, mesh: Sequence[int], network: Chosen = None) -> float:
        """The seconds of all collectives by the network model, one after the other."""
        return sum(seconds(alike, amount, mesh, network) for alike, amount in self.rows.items())

    def by_line(self) -> dict[Place | None, Traffic]:
        """For each line, the communication of its forward and backward pass."""
        found: dict[Place | None, dict[Alike, TrafficAmount]] = {}
        for alike, amount in self.rows.items():
            found.setdefault(alike.place, {})[alike] = amount
        return {place: Traffic(rows) for place, rows in found.items()}

    def to_data(self) -> list[list[Any]]:
        """The rows as plain data."""
        return [[*alike, *amount] for alike, amount in self.rows.items()]

    @classmethod
    def from_data(cls, data: Iterable[Sequence[Any]]) -> Traffic:
        """The traffic from the data of :meth:`to_data`."""
        rows = {}
        for place, backward, op, group, itemsize, *amount in data:
            alike = Alike(
                None if place is None else Place(*place),
                backward,
                op,
                tuple([(m, parts) for m, parts in group]),
                itemsize,
            )
            rows[alike] = TrafficAmount(*amount)
        return cls(rows)


def seconds(alike: Alike, amount: TrafficAmount, mesh: Sequence[int], network: Chosen) -> float:
    """The seconds of equal collectives, one after the other, by
    :meth:`~cute_sharding.exchange.Network.collective`. Over several mesh dims, the fastest dims
    come first, as in the times of plans. A rank receives from the ranks that differ from it on
    the slower dims in proportion to their number.
    """
    times, links = amount.collectives, Network.of_elements(tuple(mesh), network, alike.itemsize)
    if not times:
        return 0.0
    dims = sorted(alike.group, key=lambda each: links.link(each[0]).beta)
    total, others, near = 0.0, _others(dims), 1
    for m, parts in dims:
        elements = amount.busiest / times * near * (parts - 1) / others
        total += times * links.collective(
            m,
            parts,
            elements,
            together=alike.op in _TOGETHER,
            times=2 if alike.op == "all-reduce" else 1,
        )
        near *= parts
    return total


def _others(dims: Sequence[tuple[int, int]]) -> int:
    ranks = 1
    for _, parts in dims:
        ranks *= parts
    return max(ranks - 1, 1)
