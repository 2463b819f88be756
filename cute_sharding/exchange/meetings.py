"""Finds the devices of one mesh that have rows in common with a device of another, in one dim of a
relation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange.placed import Placed
from cute_sharding.relations.rows import Rows, common_rows, held_rows
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Chain, Runs, near, rows_held

# For each cut of a dim: (mesh dim, split factor, devices of the mesh dim, the coordinate on it;
# None: any).
Cuts: TypeAlias = "tuple[tuple[int, int, int, int | None], ...]"
# (mesh dim, coordinate) for the mesh dims that cut a dim.
Place: TypeAlias = "tuple[tuple[int, int], ...]"


class Met(NamedTuple):
    """Where there are rows in common with a device of the other side, in one dim.

    Attributes:
        places: coordinates on the mesh dims that cut it.
        runs: for each place the common rows, x of the source and y of the target.
    """

    places: tuple[Place, ...]
    runs: tuple[Runs, ...]


class Side(NamedTuple):
    """The dims of a tensor that the rows of an exchange are made of: their sizes, and how a device
    holds each.
    """

    sizes: tuple[int, ...]
    chains: tuple[Chain, ...]


def sizes_of(placed: Placed, rows: Rows) -> tuple[int, ...]:
    """The sizes of the dims that the rows are made of."""
    return tuple([placed.shape[d] for d in rows.dims])


def side_of(placed: Placed, rows: Rows, device: Device) -> Side:
    """The dims that the rows are made of, as a device holds them."""
    dims = rows.dims
    chains = [placed.chain(d, device) for d in dims]
    return Side(tuple([placed.shape[d] for d in dims]), tuple(chains))


def of_every(
    placed: Placed, rows: Rows, fixed: tuple[tuple[int, int], ...] = ()
) -> tuple[tuple[int, ...], tuple[Cuts, ...]]:
    """The dims that the rows are made of: their sizes, and their cuts for all devices with the
    coordinates ``fixed`` on some mesh dims.
    """
    sizes, at = placed.mesh.sizes, dict(fixed)
    cuts = [
        tuple([(m, factor, sizes[m], at.get(m)) for m, factor in placed.chains[d]])
        for d in rows.dims
    ]
    return sizes_of(placed, rows), tuple(cuts)


@remembered
def meet_devices(
    one: Rows,
    of: tuple[int, ...],
    chain: tuple[Chain, ...],
    other: Rows,
    n: tuple[int, ...],
    cuts: tuple[Cuts, ...],
    is_target: bool,
) -> Met:
    """The rows in common with ``one``, as a device holds it, on each device that holds ``other``.
    ``is_target``: ``one`` belongs to the target.
    """
    places: list[Place] = []
    runs: list[Runs] = []
    has = held_rows(one, of, chain)
    for place in _places_near(other, n, cuts, has) if has else ():
        at = dict(place)
        there = tuple([tuple([(factor, parts, at[m]) for m, factor, parts, _ in c]) for c in cuts])
        found = (
            common_rows(other, n, there, one, of, chain)
            if is_target
            else common_rows(one, of, chain, other, n, there)
        )
        if found:
            places.append(place)
            runs.append(found)
    return Met(tuple(places), tuple(runs))


def _places_near(
    rows: Rows, n: tuple[int, ...], cuts: tuple[Cuts, ...], has: Runs
) -> Iterator[Place]:
    """Coordinates at which there may be some of the rows. For plain rows: those near the rows by
    the first cut, and with rows in their range after each further cut.
    """
    if not rows.is_plain:
        every = {m: _coordinates(parts, at) for some in cuts for m, _, parts, at in some}
        yield from product(*([(m, k) for k in ks] for m, ks in every.items()))
    elif not cuts[0]:
        yield ()
    else:
        m, factor, parts, at = cuts[0][0]
        some = sorted(near(n[0], factor, parts, has)) if at is None else (at,)
        first, stop = min(run.x for run in has), max(run.reach for run in has)
        for k in some:
            yield from _in_range(n[0], cuts[0], ((m, k),), first, stop)


def _coordinates(parts: int, at: int | None) -> range:
    return range(parts) if at is None else range(at, at + 1)


def _in_range(n: int, cuts: Cuts, done: Place, first: int, stop: int) -> Iterator[Place]:
    """Coordinates at which rows of ``n`` are in ``[first, stop)``, or around it, cut by cut."""
    if len(done) == len(cuts):
        yield done
        return
    m, _, parts, at = cuts[len(done)]
    for k in _coordinates(parts, at):
        place = (*done, (m, k))
        chain = tuple([(f, parts, at) for (_, f, parts, _), (_, at) in zip(cuts, place)])
        if any(run.x < stop and first < run.reach for run in rows_held(n, chain)):
            yield from _in_range(n, cuts, place, first, stop)
