"""The search for the steps from one sharding to another: all the ways, those that need several
process groups, and the cheapest of them, by layouts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import combinations, count, pairwise, product
from math import lcm, prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.placed import Mesh, Placed, holds_all, most_local, received_by_digits
from cute_sharding.exchange.plan import collectives, received_by, within_memory
from cute_sharding.exchange.step import AllToAll, Reduction, Step
from cute_sharding.sharding.digits import chosen_by, digits
from cute_sharding.sharding.rows import Chains, appended, cuts_up_to, cutting

# -- candidates ------------------------------------------------------------------------------------
# All the ways from one sharding to another: reductions if some are pending, then one exchange, or
# two if the network is not flat.


class Task(NamedTuple):
    """A redistribution to plan, and the means for it.

    Attributes:
        source, target: how the tensor lies before and after, on one mesh.
        network: by which ways are compared.
        groups: the sets of mesh dims whose ranks have a process group.
        native: whether the backend gathers and reduce-scatters better than it exchanges.
    """

    source: Placed
    target: Placed
    network: Network
    groups: Groups = None
    native: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.source.mesh.sizes

    @property
    def reduced(self) -> dict[int, str]:
        """The mesh dims on which something is pending and must not stay so, with the op."""
        return self.source.reduced_to(self.target)

    @property
    def kept(self) -> tuple[int, ...]:
        """The mesh dims on which a reduction stays pending: ranks keep what they hold."""
        return tuple([m for m, _ in self.target.pending])

    def admits(self, mesh_dims: Sequence[int]) -> bool:
        """Whether the ranks that differ on ``mesh_dims`` have their own process group."""
        return admits(self.groups, mesh_dims)

    def is_within(self, source: Chains, target: Chains) -> bool:
        """Whether every device already holds what it needs."""
        return holds_all(self.shape, self.mesh, source, target)

    def by_way_of(self, stations: Iterable[Chains]) -> tuple[Step, ...]:
        """An exchange from each of the stations to the next."""
        every = map(self.source.cut_as, dict.fromkeys(stations))
        return tuple([AllToAll(*both) for both in pairwise(every)])

    def reduction(self, before: Chains, after: Chains, among: Sequence[int]) -> Reduction:
        """The reduction of what is pending on the mesh dims ``among``."""
        ops = {m: op for m, op in self.reduced.items() if m in among}
        op = "sum" if {*ops.values()} <= {"sum", "avg"} else next(iter(ops.values()))
        divisor = prod(self.mesh[m] for m in ops if ops[m] == "avg")
        one, other = self.source.cut_as(before), self.source.cut_as(after)
        return Reduction(one, other, tuple(among), op, divisor)


def candidates(task: Task) -> Iterator[tuple[Step, ...]]:
    """The ways to compare, each a tuple of steps; some may have steps without a process group."""
    if not task.reduced or not prod(task.shape):
        yield from _moves(task, task.source.chains)
    else:
        yield from _reductions(task)


def _moves(task: Task, source: Chains) -> Iterator[tuple[Step, ...]]:
    """One exchange; and if some links are slower than others, also two: first one over the slow
    links, of shares that the fast links then gather; or the mesh dims of one kind before those of
    the other.

    If the single exchange has no process group, also ways of several (:func:`route`).
    """
    mesh, target, kept, network = task.mesh, task.target.chains, task.kept, task.network
    if source == target:
        yield ()
        return
    (direct,) = task.by_way_of((source, target))
    yield (direct,)
    flat, has_group = network.is_flat, task.admits(direct.mesh_dims)
    if not has_group:
        yield _gathered(task, source)
    if not has_group or (not flat and len(direct.mesh_dims) > 1):
        weights = tuple([1.0 if flat else network.link(m).beta for m in range(len(mesh))])
        starts = dict.fromkeys((source, sliced(source, target, mesh, kept)))
        # Also without the groups of several mesh dims: a step among them that turns out to move
        # fewer mesh dims than it might has no group.
        groups = dict.fromkeys((task.groups or frozenset(), frozenset()))
        for start, sets in product(starts, groups):
            way = (
                ()
                if start == target
                else route(task.shape, mesh, start, target, kept, sets, weights)
            )
            if way is not None:
                yield task.by_way_of((source, start, *way))
    if flat:
        return
    slow = max(network.link(m).beta for m in range(len(mesh)))
    fast = [
        m for m in range(len(mesh)) if mesh[m] > 1 and m not in kept and network.link(m).beta < slow
    ]
    middles = []
    for d in range(len(task.shape)):
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
            yield task.by_way_of((source, middle, target))


def _gathered(task: Task, source: Chains) -> tuple[Step, ...]:
    """Steps that each communicate on one mesh dim, whatever groups there are. They move more than
    necessary: the source gives up its cuts, the last first, until every device holds what it needs.
    """
    at, target, stations = source, task.target.chains, [source]
    while not task.is_within(at, target):
        # A cut that the target lacks or has elsewhere; the last of its tensor dim, so that the
        # other cuts stay as they are.
        pairs = enumerate(zip(at, target))
        d = next(d for d, (before, after) in pairs if before != after[: len(before)])
        at = tuple([chain[:-1] if i == d else chain for i, chain in enumerate(at)])
        stations.append(at)
    return task.by_way_of((*stations, target))


def _reductions(task: Task) -> Iterator[tuple[Step, ...]]:
    """Ways to reduce, each followed by the exchange that is still needed.

    Before a reduction a device may drop what it need not hold, for free: the cuts of the target on
    mesh dims that replicate the source. A reduce-scatter hands out the rest along one tensor dim,
    or as the target needs it; an all-reduce leaves it in place. Mesh dims without a common process
    group are reduced one after the other.
    """
    source, target = task.source.chains, task.target.chains
    dims = tuple(task.reduced)
    wanted = {m: (d, f) for d, chain in enumerate(target) for m, f in chain}
    direct = task.is_within(source, target)
    sliced = source
    for m in sorted(wanted.keys() - cutting(source) - {*dims}):
        sliced = appended(sliced, m, *wanted[m])
    bases = tuple(dict.fromkeys((source, sliced)))
    if task.admits(dims):
        ends = [to for base in bases for to in _shares(base, dims, wanted)]
        if direct and _alike(dims, target):
            ends.insert(0, target)
        for to in ends:
            first = task.reduction(source, to, dims)
            yield from ((first, *steps) for steps in _moves(task, to))
    else:
        yield from _by_parts(task, bases, dims, wanted)
    if direct:
        yield from _sums_of_sums(task, dims)


def _alike(among: Sequence[int], to: Chains) -> bool:
    """Whether all of these mesh dims cut ``to``, or none does."""
    return len({m in cutting(to) for m in among}) == 1


def _shares(
    base: Chains, among: Sequence[int], wanted: dict[int, tuple[int, int]]
) -> Iterator[Chains]:
    """The chains that devices can hold after ``among`` are reduced: all that they had, or a share,
    cut along one tensor dim or as in the target.
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
    task: Task,
    bases: Iterable[Chains],
    dims: tuple[int, ...],
    wanted: dict[int, tuple[int, int]],
) -> Iterator[tuple[Step, ...]]:
    """Reduce each part of the mesh dims that has a group alone: by an all-reduce, or a
    reduce-scatter as in the target. The order matters, because cuts follow one another.
    """
    for parts, base in product(_ordered_parts(task, dims), bases):
        may_scatter = [(False, True) if wanted.keys() >= {*part} else (False,) for part in parts]
        for scattered in product(*may_scatter):
            at, first, steps = task.source.chains, base, []
            for part, scatter in zip(parts, scattered):
                for m in part if scatter else ():
                    first = appended(first, m, *wanted[m])
                steps.append(task.reduction(at, first, part))
                at = first
            yield from ((*steps, *last) for last in _moves(task, at))


def _ordered_parts(task: Task, dims: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The mesh dims, divided into parts with a group each, in every order."""
    if not dims:
        yield ()
    for size in range(len(dims), 0, -1):
        for part in combinations(dims, size):
            if task.admits(part):
                others = tuple([m for m in dims if m not in part])
                yield from ((part, *rest) for rest in _ordered_parts(task, others))


def _sums_of_sums(task: Task, dims: tuple[int, ...]) -> Iterator[tuple[Step, ...]]:
    """Reduce one part of the mesh dims after the other. If blocks differ in size, a sum of sums
    receives less than all contributions at once.
    """
    source, target = task.source.chains, task.target.chains
    for size in range(1, len(dims)):
        for first_dims in combinations(dims, size):
            last_dims = [m for m in dims if m not in first_dims]
            middle = tuple([tuple([c for c in chain if c[0] not in last_dims]) for chain in target])
            if (
                _alike(first_dims, middle)
                and _alike(last_dims, target)
                and task.is_within(source, middle)
                and task.is_within(middle, target)
            ):
                yield (
                    task.reduction(source, middle, first_dims),
                    task.reduction(middle, target, last_dims),
                )


# -- routes ----------------------------------------------------------------------------------------
# Ways from one sharding to another by exchanges that each stay within a process group.
#
# Every mesh dim has a process group; several together have one only if the program has made it. An
# exchange that moves one mesh dim's cut, and leaves every other mesh dim its rows, stays within the
# group of that mesh dim. So a way is a sequence of such moves: a cut is given up (gather), moved to
# the target's place or parked in another one (all-to-all), or made (slice). A* finds the cheapest
# way (Hart, Nilsson and Raphael 1968) over what the devices hold, with the elements that are still
# missing as the bound; if that takes too long, weighted A* (Pohl 1970) finds a cheap one. Parking
# makes ways cheap: on a mesh of a x a, [Shard(0), Shard(1)] to [Shard(1), Shard(0)] needs no
# gather, but three all-to-alls of a local tensor each.

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
            for chains in _reachable(shape, mesh, at.chains, moved, target, wanted):
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


def _reachable(
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


# -- planner ---------------------------------------------------------------------------------------
# The search for the steps from one sharding to another: the cheapest of the ways in ``planner``, by
# layouts alone.


@remembered
def plan_steps(
    source: Placed,
    target: Placed,
    network: Network,
    memory_limit: int | None = None,
    groups: Groups = None,
    native: bool = False,
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``, on one mesh. If the links of ``network`` differ, the
    fastest; among equals, and if all links are equal, those that receive the fewest elements, then
    those with the fewest collectives.

    What is pending in both commutes with moving elements, between devices that hold the same
    contribution; what is pending in ``source`` alone is reduced. Every step communicates among
    ranks that have a process group: those of one mesh dim, or of a set in ``groups``. With None,
    which stands for all sets, at most one collective moves elements on a flat network, and at most
    one reduces. ``native``: the backend gathers and reduce-scatters better than it exchanges;
    without a ``memory_limit`` steps are then turned into such collectives. The ranks of the steps
    are the numbers of their places on the mesh.

    Raises:
        ValueError: no plan keeps every device within ``memory_limit`` elements. The message names
            the smallest limit that would do.
    """
    places = Mesh.numbered(source.mesh.sizes)
    source, target = replace(source, mesh=places), replace(target, mesh=places)
    task = Task(source, target, network, groups, native)
    if memory_limit is not None:
        return _within_limit(memory_limit, task)
    shape = nominal(source, target, groups)
    found = _cheapest(
        task._replace(source=replace(source, shape=shape), target=replace(target, shape=shape))
    )
    steps = tuple([step.of_shape(source.shape) for step in found])
    if not all(_is_right(step) and task.admits(step.mesh_dims) for step in steps):
        steps = _cheapest(task)
    return _natively(steps) if native else steps


def _within_limit(memory_limit: int, task: Task) -> tuple[Step, ...]:
    """The cheapest ways, with exchanges in rounds, that keep every device within the limit."""
    start = task.source.most
    what = f"{task.shape} on mesh {task.mesh}"
    fitting: list[Any] = within_memory(_admitted_ways(task), start, memory_limit, what)
    return min(fitting, key=lambda steps: _cost(steps, task.network))


# Gathers from more peers at once are taken to be slower than ones that move some more elements.
MANY_PEERS = 64


def _natively(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps for a backend that gathers better than it exchanges. If blocks differ in size, a
    gather from many devices over several mesh dims becomes one gather after the other, the last cut
    first.
    """
    found: list[Step] = []
    for step in steps:
        alone = []
        if (
            isinstance(step, AllToAll)
            and prod(step.mesh[m] for m in step.mesh_dims) > MANY_PEERS
            and len(step.mesh_dims) > 1
            and not step.gathers
            and all(
                before[: len(after)] == after
                for before, after in zip(step.source.chains, step.target.chains)
            )
        ):
            at, target = step.source, step.target.chains
            while at.chains != target:
                _, d = max(
                    (chain[-1][0], d)
                    for d, (chain, after) in enumerate(zip(at.chains, target))
                    if chain != after
                )
                bare = at.cut_as(
                    tuple([chain[:-1] if e == d else chain for e, chain in enumerate(at.chains)])
                )
                alone.append(AllToAll(at, bare).natively())
                at = bare
        if alone and 2 * received_by(alone) <= 3 * step.received_elements:
            found += alone
        else:
            found.append(step.natively())
    return tuple(found)


# Sizes that stand for all sizes that do not divide: primes.
STAND_INS = (1009, 10007, 100003, 1000003)


def nominal(source: Placed, target: Placed, groups: Groups) -> tuple[int, ...]:
    """A shape for which steps are chosen in place of the tensor's: the same for all shapes with the
    same answers to :func:`questions`.

    So ranks with a graph for many sizes take the same steps as ranks that run eagerly. Steps are
    right for any sizes, and the cheapest ones hardly depend on them. Exceptions keep their own
    sizes: dims shorter than the number of devices that share them, and dims that split factors do
    not divide.
    """
    prime = next((p for p in STAND_INS if p > 8 * prod(source.mesh.sizes)), STAND_INS[-1])
    sizes = []
    for n, before, after, (least, counts) in zip(
        source.shape, source.chains, target.chains, questions(source, target, groups)
    ):
        dividing = [count for count in counts if n % count == 0]
        if (
            n >= least
            and n > 1
            and (dividing or all(factor == 1 for _, factor in (*before, *after)))
        ):
            n = max(dividing, default=1) * prime
        sizes.append(n)
    return tuple(sizes)


def questions(source: Placed, target: Placed, groups: Groups) -> list[tuple[int, tuple[int, ...]]]:
    """The questions that the choice of steps asks about each tensor dim: (the least size that is as
    long as the devices are many, the numbers of blocks that may divide it).

    These are the blocks into which source and target cut it; and if several steps may replace one,
    the blocks of all devices.
    """
    mesh, reduced = source.mesh.sizes, source.reduced_to(target)
    counts = [
        lcm(*(prod(factor * mesh[m] for m, factor in chain) for chain in (before, after)))
        for before, after in zip(source.chains, target.chains)
    ]
    changed = tuple(
        [
            m
            for m in range(len(mesh))
            if mesh[m] > 1
            and (cuts_up_to(source.chains, m) != cuts_up_to(target.chains, m) or m in reduced)
        ]
    )
    least = prod(mesh[m] for m in changed)
    # For some sizes a mesh dim that changes takes no part in the exchange.
    parts = (some for k in range(2, len(changed) + 1) for some in combinations(changed, k))
    if all(admits(groups, some) for some in parts):
        return [(least if reduced else 0, (count,)) for count in counts]
    return [(least, (count, lcm(count, prod(mesh)))) for count in counts]


def _is_right(step: Step) -> bool:
    """Whether every device holds what it reduces. (Exchanges are right for any sizes.)"""
    return not isinstance(step, Reduction) or holds_all(
        step.shape, step.mesh, step.source.chains, step.target.chains
    )


# The factor by which an all-to-all of many messages over several mesh dims is taken to be slower
# than native collectives of as many elements.
MANY_MESSAGES = 1.5


def _cost(
    steps: tuple[Step, ...], network: Network, native: bool = False
) -> tuple[float, int, int, int]:
    seconds = 0.0
    if not network.is_flat:
        seconds = sum(
            step.seconds(network)
            * (
                MANY_MESSAGES
                if native
                and isinstance(step, AllToAll)
                and len(step.mesh_dims) > 1
                and not step.gathers
                else 1
            )
            for step in steps
        )
    return seconds, received_by(steps), collectives(steps), len(steps)


@remembered
def _cheapest(task: Task) -> tuple[Step, ...]:
    return min(_admitted_ways(task), key=lambda steps: _cost(steps, task.network, task.native))


def _admitted_ways(task: Task) -> list[tuple[Step, ...]]:
    """The ways whose steps all have a group; there is at least one."""
    every = dict.fromkeys(candidates(task))
    if task.groups is None:  # all sets have one, whatever mesh dims a step turns out to need
        return [*every]
    return [steps for steps in every if all(task.admits(step.mesh_dims) for step in steps)]
