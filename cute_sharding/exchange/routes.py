"""Ways from one sharding to another by exchanges that each stay within a process group.

Every mesh dim has a process group; several together have one only if the program has made it. An
exchange that moves one mesh dim's cut, and leaves every other mesh dim its rows, stays within the
group of that mesh dim. So a way is a sequence of such moves: a cut is given up (gather), moved to
the target's place or parked in another one (all-to-all), or made (slice). A* finds the cheapest
way (Hart, Nilsson and Raphael 1968) over what the devices hold, with the elements that are still
missing as the bound; if that takes too long, weighted A* (Pohl 1970) finds a cheap one. Parking
makes ways cheap: on a mesh of a x a, [Shard(0), Shard(1)] to [Shard(1), Shard(0)] needs no gather,
but three all-to-alls of a local tensor each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange.cost import most_local, received_by_digits
from cute_sharding.sharding.chains import Chains, appended, cuts_up_to, cutting
from cute_sharding.sharding.digits import chosen_by, digits

# The sets of two or more mesh dims that have a common process group; one mesh dim always has one.
# None: all sets have one.
Groups: TypeAlias = "frozenset[tuple[int, ...]] | None"
# (shardings to look at before the next search starts, weight of missing elements): two mesh dims
# are searched completely, for the best way; in the end, more go straight for the target.
SEARCHES = ((60, 1.0), (120, 3.0), (1000, 10.0))


def admits(groups: Groups, mesh_dims: Sequence[int]) -> bool:
    """Whether the ranks that differ on ``mesh_dims`` have their own process group."""
    return groups is None or len(mesh_dims) < 2 or tuple(sorted(mesh_dims)) in groups


def sliced(source: Chains, target: Chains, mesh: tuple[int, ...], kept: tuple[int, ...]) -> Chains:
    """The source with the target's cuts by mesh dims that cut nothing yet, if they can be made in
    place. That is free, and mostly leaves less to move.
    """
    for d, chain in enumerate(target):
        for i, (m, split_factor) in enumerate(chain):
            free = mesh[m] > 1 and m not in kept and m not in cutting(source)
            if free and source[d] == chain[:i]:
                source = appended(source, m, d, split_factor)
    return source


class _At(NamedTuple):
    least: float  # a lower bound for the cost of the whole way
    hops: int
    tie: int
    cost: float  # so far
    chains: Chains
    way: tuple[Chains, ...]


@remembered
def route(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Chains,
    target: Chains,
    kept: tuple[int, ...],
    groups: Groups,
    weights: tuple[float, ...],
) -> tuple[Chains, ...] | None:
    """The shardings after each exchange of the cheapest way, the last one ``target``: by elements
    received times the ``weights`` of the mesh dims that they cross, then by moves.

    ``kept`` mesh dims hold contributions to a reduction that stays pending, and keep what they
    hold. None if no way is found.
    """
    moving = [
        m
        for m in range(len(mesh))
        if mesh[m] > 1 and (m in cutting(source) or m in cutting(target)) and m not in kept
    ]
    apart = [
        m for m in moving if _places(shape, source, mesh, m) != _places(shape, target, mesh, m)
    ]
    for movable in dict.fromkeys((tuple(apart), tuple(moving))):
        sets = [(m,) for m in movable] + sorted(
            group for group in groups or () if set(group) <= set(movable)
        )
        for budget, trust in SEARCHES:
            found = _search(shape, mesh, source, target, sets, weights, budget, trust)
            if found is not None:
                return found
    return None


def _search(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Chains,
    target: Chains,
    sets: Sequence[tuple[int, ...]],
    weights: Sequence[float],
    budget: int,
    trust: float,
) -> tuple[Chains, ...] | None:
    wanted = {m: _places(shape, target, mesh, m) for moved in sets for m in moved}
    goal, ties = _key(shape, target, mesh), count()
    queue = [_At(0.0, 0, next(ties), 0.0, source, ())]
    done: dict[Any, tuple[float, int]] = {}
    lightest = min(weights)
    while queue and budget:
        at = heappop(queue)
        key = _key(shape, at.chains, mesh)
        if key == goal:
            return (*at.way[:-1], target) if at.way else (target,)
        if done.get(key, (at.cost, at.hops)) < (at.cost, at.hops):
            continue  # there is already a better way to this sharding
        budget -= 1
        cuts = cutting(at.chains)
        for moved in sets:
            parts, weight = prod([mesh[m] for m in moved]), max([weights[m] for m in moved])
            cut_before = not cuts.isdisjoint(moved)
            for chains in _moves(shape, mesh, at.chains, moved, target, wanted):
                after = most_local(shape, chains, mesh)
                received = (
                    0.0
                    if not cut_before
                    else after - most_local(shape, at.chains, mesh, moved)
                    if cutting(chains).isdisjoint(moved)
                    else after - after / parts
                )
                cost, key = at.cost + weight * max(received, 0.0), _key(shape, chains, mesh)
                if done.get(key, (cost, at.hops + 2)) > (cost, at.hops + 1):
                    done[key] = cost, at.hops + 1
                    heappush(
                        queue,
                        _At(
                            cost + trust * lightest * _missing(shape, mesh, chains, target),
                            at.hops + 1,
                            next(ties),
                            cost,
                            chains,
                            (*at.way, chains),
                        ),
                    )
    return None


def _missing(shape: tuple[int, ...], mesh: tuple[int, ...], chains: Chains, target: Chains) -> int:
    """A lower bound for the elements that the busiest device still has to receive."""
    found = received_by_digits(shape, chains, target, mesh)
    return (
        max(0, most_local(shape, target, mesh) - most_local(shape, chains, mesh))
        if found is None
        else found
    )


def _moves(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    chains: Chains,
    moved: tuple[int, ...],
    target: Chains,
    wanted: dict[int, Any],
) -> Iterator[Chains]:
    """The chains that one exchange among devices that differ only on ``moved`` can reach."""
    bare = chains
    for m in reversed(_by_depth(moved, bare)):
        without = _without_cut(shape, bare, m, mesh)
        if without is None:
            return
        bare = without
    if bare != chains:
        yield bare
    if len(moved) == 1:
        for d in range(len(shape)):
            yield appended(bare, moved[0], d, 1)
    here: Chains | None = bare
    for m in _by_depth([m for m in moved if wanted[m] is not None], target):
        here = None if here is None else _with_cut(shape, here, m, target, mesh)
    if here is not None and here != bare:
        yield here


def _by_depth(moved: Sequence[int], chains: Chains) -> Sequence[int]:
    """The mesh dims, sorted by the depth of their cuts: earlier cuts first."""
    return moved if len(moved) < 2 else sorted(moved, key=lambda m: _depth(chains, m))


def _depth(chains: Chains, m: int) -> int:
    found = cuts_up_to(chains, m)
    return -1 if found is None else len(found[1])


def _places(shape: Sequence[int], chains: Chains, mesh: tuple[int, ...], m: int) -> Any:
    """The rows that the coordinate on ``m`` selects: the tensor dim and the digits, or the cuts up
    to it if there are no digits. None if it cuts nothing.
    """
    for d, (n, chain) in enumerate(zip(shape, chains)):
        chosen = chosen_by(m, n, chain, mesh)
        if chosen is not None:
            return d, chosen
    return None


def _key(shape: Sequence[int], chains: Chains, mesh: tuple[int, ...]) -> Any:
    """A key that is equal if devices hold the same, as far as digits tell."""
    return tuple(
        [
            chain
            if len(chain) < 2 or (found := digits(n, chain, mesh)) is None
            else tuple(sorted(found.devices.items()))
            for n, chain in zip(shape, chains)
        ]
    )


def _without_cut(
    shape: Sequence[int], chains: Chains, m: int, mesh: tuple[int, ...]
) -> Chains | None:
    """The chains without the cut of ``m``, while every other mesh dim selects the same rows; None
    if no split factors do that.
    """
    for d, chain in enumerate(chains):
        at = next((i for i, (mesh_dim, _) in enumerate(chain) if mesh_dim == m), None)
        if at is None:
            continue
        rest, before = chain[:at], digits(shape[d], chain, mesh)
        for k, split_factor in chain[at + 1 :]:
            if before is None:
                return None
            for factor in (split_factor, split_factor * mesh[m]):
                after = digits(shape[d], (*rest, (k, factor)), mesh)
                if after is not None and after.devices[k] == before.devices[k]:
                    rest = (*rest, (k, factor))
                    break
            else:
                return None
        return tuple([rest if e == d else other for e, other in enumerate(chains)])
    return chains


def _with_cut(
    shape: Sequence[int], chains: Chains, m: int, target: Chains, mesh: tuple[int, ...]
) -> Chains | None:
    """The chains with a cut of ``m`` that selects the same rows as the target's; None if other cuts
    are in the way.
    """
    d, i = next(
        (d, i)
        for d, chain in enumerate(target)
        for i, (mesh_dim, _) in enumerate(chain)
        if mesh_dim == m
    )
    n, chain = shape[d], chains[d]
    if chain == target[d][:i]:
        return appended(chains, m, d, target[d][i][1])
    here, there = digits(n, chain, mesh), digits(n, target[d], mesh)
    if here is None or there is None or len(there.devices[m]) != 1:
        return None
    ((size, stride),) = there.devices[m]
    # The number of pieces is the size of the local digits above it.
    pieces = prod(min(count, max(1, count * step // (size * stride))) for count, step in here.local)
    after = digits(n, (*chain, (m, pieces)), mesh)
    return (
        appended(chains, m, d, pieces)
        if after is not None and after.devices[m] == there.devices[m]
        else None
    )
