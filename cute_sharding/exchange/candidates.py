"""All the ways from one sharding to another: reductions if some are pending, then one exchange, or
two if the network is not flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise, product
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.all_to_all import AllToAll
from cute_sharding.exchange.cost import holds_all
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.plan import Held
from cute_sharding.exchange.reduction import Reduction
from cute_sharding.exchange.routes import Groups, admits, route, sliced
from cute_sharding.exchange.step import Step
from cute_sharding.sharding.chains import Chains, appended, cutting


class Task(NamedTuple):
    """A redistribution to plan, and the means for it.

    Attributes:
        shape: the global shape.
        mesh: the number of devices of each mesh dim.
        source, target: what is held before and after.
        network: by which ways are compared.
        groups: the sets of mesh dims whose ranks have a process group.
        native: whether the backend gathers and reduce-scatters better than it exchanges.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    source: Held
    target: Chains
    network: Network
    groups: Groups = None
    native: bool = False

    def admits(self, mesh_dims: Sequence[int]) -> bool:
        """Whether the ranks that differ on ``mesh_dims`` have their own process group."""
        return admits(self.groups, mesh_dims)

    def is_within(self, source: Chains, target: Chains) -> bool:
        """Whether every device already holds what it needs."""
        return holds_all(self.shape, self.mesh, source, target)

    def by_way_of(self, stations: Iterable[Chains]) -> tuple[Step, ...]:
        """An exchange from each of the stations to the next."""
        pairs = pairwise(dict.fromkeys(stations))
        return tuple([AllToAll(self.shape, self.mesh, *both) for both in pairs])

    def reduction(self, before: Chains, after: Chains, among: Sequence[int]) -> Reduction:
        """The reduction of what is pending on the mesh dims ``among``."""
        ops = {m: op for m, op in self.source.pending if m in among}
        op = "sum" if {*ops.values()} <= {"sum", "avg"} else next(iter(ops.values()))
        divisor = prod(self.mesh[m] for m in ops if ops[m] == "avg")
        return Reduction(self.shape, self.mesh, before, after, tuple(among), op, divisor)


def candidates(task: Task) -> Iterator[tuple[Step, ...]]:
    """The ways to compare, each a tuple of steps; some may have steps without a process group."""
    if not task.source.pending or not prod(task.shape):
        yield from _moves(task, task.source.chains)
    else:
        yield from _reductions(task)


def _moves(task: Task, source: Chains) -> Iterator[tuple[Step, ...]]:
    """One exchange; and if some links are slower than others, also two: first one over the slow
    links, of shares that the fast links then gather; or the mesh dims of one kind before those of
    the other.

    If the single exchange has no process group, also ways of several (:mod:`routes`).
    """
    mesh, target, kept, network = task.mesh, task.target, task.source.kept, task.network
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
    at, stations = source, [source]
    while not task.is_within(at, task.target):
        # A cut that the target lacks or has elsewhere; the last of its tensor dim, so that the
        # other cuts stay as they are.
        pairs = enumerate(zip(at, task.target))
        d = next(d for d, (before, after) in pairs if before != after[: len(before)])
        at = tuple([chain[:-1] if i == d else chain for i, chain in enumerate(at)])
        stations.append(at)
    return task.by_way_of((*stations, task.target))


def _reductions(task: Task) -> Iterator[tuple[Step, ...]]:
    """Ways to reduce, each followed by the exchange that is still needed.

    Before a reduction a device may drop what it need not hold, for free: the cuts of the target on
    mesh dims that replicate the source. A reduce-scatter hands out the rest along one tensor dim,
    or as the target needs it; an all-reduce leaves it in place. Mesh dims without a common process
    group are reduced one after the other.
    """
    source, target = task.source.chains, task.target
    dims = tuple([m for m, _ in task.source.pending])
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
    source, target = task.source.chains, task.target
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
