"""All the ways from one sharding to another: reductions where some are pending, then one exchange,
or two where the network is not flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise, product
from math import prod
from typing import TypeAlias

from cute_sharding.exchange.all_to_all import AllToAll
from cute_sharding.exchange.cost import within
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.plan import Held
from cute_sharding.exchange.reduction import Reduction
from cute_sharding.exchange.routes import Groups, admits, route, sliced
from cute_sharding.exchange.step import Step
from cute_sharding.sharding.chains import Chains, appended, cutting

# The ways to move on from chains; and the reduction from chains to others among mesh dims.
Moved: TypeAlias = "Callable[[Chains], Iterator[tuple[Step, ...]]]"
Reduced: TypeAlias = "Callable[[Chains, Chains, Sequence[int]], Reduction]"


def candidates(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    network: Network,
    groups: Groups,
) -> Iterator[tuple[Step, ...]]:
    """The ways that are weighed, each a tuple of steps; some may take steps that have no group."""

    def moved(before: Chains) -> Iterator[tuple[Step, ...]]:
        return _moves(shape, mesh, before, target, network, source.kept, groups)

    if not source.pending or not prod(shape):
        yield from moved(source.chains)
    else:
        yield from _reductions(shape, mesh, source, target, moved, groups)


def _moves(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Chains,
    target: Chains,
    network: Network,
    kept: tuple[int, ...],
    groups: Groups,
) -> Iterator[tuple[Step, ...]]:
    """One exchange; and where some links are slower than others, two: of the slow links one first,
    of shares that the fast links then gather, or the mesh dims of one kind before those of the
    other.

    Where the ranks of the one have no group, a way of several (:mod:`routes`).
    """
    if source == target:
        yield ()
        return
    direct = AllToAll(shape, mesh, source, target)
    yield (direct,)
    flat, has_group = network.is_flat, admits(groups, direct.mesh_dims)
    if not has_group:
        yield _gathered(shape, mesh, source, target)
    if not has_group or (not flat and len(direct.mesh_dims) > 1):
        weights = (
            (1.0,) * len(mesh) if flat else tuple([network.link(m).beta for m in range(len(mesh))])
        )
        starts = dict.fromkeys((source, sliced(source, target, mesh, kept)))
        # Also without the groups of several: a step among these that turns out to move fewer mesh
        # dims than it might has no group.
        for start, sets in product(starts, dict.fromkeys((groups or frozenset(), frozenset()))):
            way = () if start == target else route(shape, mesh, start, target, kept, sets, weights)
            if way is not None:
                yield _by_way_of(shape, mesh, dict.fromkeys((source, start, *way)))
    if flat:
        return
    slow = max(network.link(m).beta for m in range(len(mesh)))
    fast = [
        m for m in range(len(mesh)) if mesh[m] > 1 and m not in kept and network.link(m).beta < slow
    ]
    middles = []
    for d in range(len(shape)):
        middle = target
        for m in fast:
            if m not in cutting(target):
                middle = appended(middle, m, d, 1)
        middles.append(middle)
    for first, last in ((source, target), (target, source)):
        middles.append(
            tuple(
                [
                    (*[c for c in a if c[0] in fast], *[c for c in b if c[0] not in fast])
                    for a, b in zip(first, last)
                ]
            )
        )
    for middle in dict.fromkeys(middles):
        if middle not in (source, target):
            yield _by_way_of(shape, mesh, (source, middle, target))


def _reductions(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    moved: Moved,
    groups: Groups,
) -> Iterator[tuple[Step, ...]]:
    """Ways to reduce, each followed by the exchange that is still needed.

    Before reducing a device may drop what it need not hold, which is free: the cuts of the target
    on mesh dims that replicate the source. A reduce-scatter hands out what is left along one tensor
    dim or another, or as the target will have it; an all-reduce leaves it where it is. Mesh dims
    that have no group together are reduced one after the other.
    """
    dims = tuple([m for m, _ in source.pending])
    wanted = {m: (d, f) for d, chain in enumerate(target) for m, f in chain}
    reduction = partial(_reduction, shape, mesh, source.pending)
    direct = within(shape, mesh, source.chains, target)
    sliced = source.chains
    for m in sorted(wanted.keys() - cutting(source.chains) - {*dims}):
        sliced = appended(sliced, m, *wanted[m])
    bases = tuple(dict.fromkeys((source.chains, sliced)))
    if admits(groups, dims):
        if direct and _alike(dims, target):
            yield from ((reduction(source.chains, target, dims), *steps) for steps in moved(target))
        for base in bases:
            for to in _shares(base, dims, wanted):
                yield from ((reduction(source.chains, to, dims), *steps) for steps in moved(to))
    else:
        yield from _by_parts(source.chains, bases, dims, wanted, reduction, moved, groups)
    if direct:
        yield from _sums_of_sums(shape, mesh, source.chains, target, dims, reduction)


def _reduction(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    pending: tuple[tuple[int, str], ...],
    before: Chains,
    after: Chains,
    among: Sequence[int],
) -> Reduction:
    """Of what is pending, that of the mesh dims ``among``."""
    ops = {m: op for m, op in pending if m in among}
    op = "sum" if {*ops.values()} <= {"sum", "avg"} else next(iter(ops.values()))
    return Reduction(
        shape,
        mesh,
        before,
        after,
        tuple(among),
        op,
        prod(mesh[m] for m in ops if ops[m] == "avg"),
    )


def _alike(among: Sequence[int], to: Chains) -> bool:
    """All of them cut it, or none."""
    return len({m in cutting(to) for m in among}) == 1


def _shares(
    base: Chains, among: Sequence[int], wanted: dict[int, tuple[int, int]]
) -> Iterator[Chains]:
    """What devices can hold once ``among`` are reduced: all that they had, or a share cut on one
    tensor dim or as the target is.
    """
    yield base
    for options in dict.fromkeys(
        tuple(option)
        for d in range(len(base))
        for option in product(*(((d, 1), wanted.get(m, (d, 1))) for m in among))
    ):
        to = base
        for m, (d, f) in zip(among, options):
            to = appended(to, m, d, f)
        yield to


def _by_parts(
    source: Chains,
    bases: tuple[Chains, ...],
    dims: tuple[int, ...],
    wanted: dict[int, tuple[int, int]],
    reduction: Reduced,
    moved: Moved,
    groups: Groups,
) -> Iterator[tuple[Step, ...]]:
    """Each part that has a group by itself: an all-reduce, or a reduce-scatter as the target is. In
    which order matters, as cuts follow one another.
    """
    for parts in _ordered_parts(dims, groups):
        for base in bases:
            for scattered in product(
                *((False, True) if all(m in wanted for m in part) else (False,) for part in parts)
            ):
                at, first, steps = source, base, []
                for part, scatter in zip(parts, scattered):
                    for m in part if scatter else ():
                        first = appended(first, m, *wanted[m])
                    steps.append(reduction(at, first, part))
                    at = first
                yield from ((*steps, *last) for last in moved(at))


def _ordered_parts(dims: tuple[int, ...], groups: Groups) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The dims in parts that have a group each, in every order."""
    if not dims:
        yield ()
    for count in range(len(dims), 0, -1):
        for part in combinations(dims, count):
            if admits(groups, part):
                yield from (
                    (part, *rest)
                    for rest in _ordered_parts(tuple([m for m in dims if m not in part]), groups)
                )


def _sums_of_sums(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Chains,
    target: Chains,
    dims: tuple[int, ...],
    reduction: Reduced,
) -> Iterator[tuple[Step, ...]]:
    """One part of the mesh dims after the other. Where blocks differ in size a sum of sums receives
    less than all the contributions at once.
    """
    for count in range(1, len(dims)):
        for first_dims in combinations(dims, count):
            last_dims = [m for m in dims if m not in first_dims]
            middle = tuple(
                [tuple([cut for cut in chain if cut[0] not in last_dims]) for chain in target]
            )
            if (
                _alike(first_dims, middle)
                and _alike(last_dims, target)
                and within(shape, mesh, source, middle)
                and within(shape, mesh, middle, target)
            ):
                yield (
                    reduction(source, middle, first_dims),
                    reduction(middle, target, last_dims),
                )


def _gathered(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains
) -> tuple[Step, ...]:
    """Steps that each communicate on one mesh dim, whatever groups there are. They move more than
    they must: the source gives up its cuts, the last first, until every device holds what it needs.
    """
    stations = [source]
    while not within(shape, mesh, stations[-1], target):
        # A cut that the target lacks, or has in another place; the last of its tensor dim, so that
        # the others stay as they are.
        at = stations[-1]
        d = next(
            d for d, (before, after) in enumerate(zip(at, target)) if before != after[: len(before)]
        )
        stations.append(tuple([chain[:-1] if i == d else chain for i, chain in enumerate(at)]))
    return _by_way_of(shape, mesh, dict.fromkeys((*stations, target)))


def _by_way_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], stations: Iterable[Chains]
) -> tuple[Step, ...]:
    """An exchange from each of them to the next."""
    return tuple([AllToAll(shape, mesh, *both) for both in pairwise(stations)])
