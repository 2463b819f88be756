"""The search for the steps from one sharding to another: the cheapest of the ways in
:mod:`.candidates`, by layouts alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import lcm, prod
from typing import Any

from cute_sharding._memory import remembered
from cute_sharding.exchange.all_to_all import AllToAll
from cute_sharding.exchange.candidates import Task, candidates
from cute_sharding.exchange.cost import holds_all, most_local
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.plan import Held, collectives, received_by, within_memory
from cute_sharding.exchange.reduction import Reduction
from cute_sharding.exchange.routes import Groups, admits
from cute_sharding.exchange.step import Step
from cute_sharding.sharding.chains import Chains, cuts_up_to


@remembered
def plan_steps(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    network: Network,
    memory_limit: int | None = None,
    groups: Groups = None,
    native: bool = False,
) -> tuple[Step, ...]:
    """The steps that reduce everything in ``source.pending`` and lead to ``target``. If the links
    of ``network`` differ, the fastest; among equals, and if all links are equal, those that receive
    the fewest elements, then those with the fewest collectives.

    Reductions that stay pending (``source.kept``) commute with moving elements, between devices
    that hold the same contribution. Every step communicates among ranks that have a process group:
    those of one mesh dim, or of a set in ``groups``. With None, which stands for all sets, at most
    one collective moves elements on a flat network, and at most one reduces. ``native``: the
    backend gathers and reduce-scatters better than it exchanges; without a ``memory_limit`` steps
    are then turned into such collectives.

    Raises:
        ValueError: no plan keeps every device within ``memory_limit`` elements. The message names
            the smallest limit that would do.
    """
    task = Task(shape, mesh, source, target, network, groups, native)
    if memory_limit is not None:
        return _within_limit(memory_limit, task)
    steps = _cheapest(task._replace(shape=nominal(shape, mesh, source, target, groups)))
    steps = tuple([replace(step, shape=shape) for step in steps])
    if not all(_is_right(step) and task.admits(step.mesh_dims) for step in steps):
        steps = _cheapest(task)
    return _natively(steps) if native else steps


def _within_limit(memory_limit: int, task: Task) -> tuple[Step, ...]:
    """The cheapest ways, with exchanges in rounds, that keep every device within the limit."""
    start = most_local(task.shape, task.source.chains, task.mesh)
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
                before[: len(after)] == after for before, after in zip(step.source, step.target)
            )
        ):
            at = step.source
            while at != step.target:
                _, d = max(
                    (chain[-1][0], d)
                    for d, (chain, after) in enumerate(zip(at, step.target))
                    if chain != after
                )
                bare = tuple([chain[:-1] if e == d else chain for e, chain in enumerate(at)])
                alone.append(AllToAll(step.shape, step.mesh, at, bare).natively())
                at = bare
        if alone and 2 * received_by(alone) <= 3 * step.received_elements:
            found += alone
        else:
            found.append(step.natively())
    return tuple(found)


# Sizes that stand for all sizes that do not divide: primes.
STAND_INS = (1009, 10007, 100003, 1000003)


def nominal(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Held, target: Chains, groups: Groups
) -> tuple[int, ...]:
    """A shape for which steps are chosen in place of ``shape``: the same for all shapes with the
    same answers to :func:`questions`.

    So ranks with a graph for many sizes take the same steps as ranks that run eagerly. Steps are
    right for any sizes, and the cheapest ones hardly depend on them. Exceptions keep their own
    sizes: dims shorter than the number of devices that share them, and dims that split factors do
    not divide.
    """
    prime = next((p for p in STAND_INS if p > 8 * prod(mesh)), STAND_INS[-1])
    sizes = []
    for n, before, after, (least, counts) in zip(
        shape, source.chains, target, questions(shape, mesh, source, target, groups)
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


def questions(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Held, target: Chains, groups: Groups
) -> list[tuple[int, tuple[int, ...]]]:
    """The questions that the choice of steps asks about each tensor dim: (the least size that is as
    long as the devices are many, the numbers of blocks that may divide it).

    These are the blocks into which source and target cut it; and if several steps may replace one,
    the blocks of all devices.
    """
    counts = [
        lcm(*(prod(factor * mesh[m] for m, factor in chain) for chain in (before, after)))
        for before, after in zip(source.chains, target)
    ]
    changed = tuple(
        [
            m
            for m in range(len(mesh))
            if mesh[m] > 1
            and (cuts_up_to(source.chains, m) != cuts_up_to(target, m) or m in dict(source.pending))
        ]
    )
    least = prod(mesh[m] for m in changed)
    # For some sizes a mesh dim that changes takes no part in the exchange.
    parts = (some for k in range(2, len(changed) + 1) for some in combinations(changed, k))
    if all(admits(groups, some) for some in parts):
        return [(least if source.pending else 0, (count,)) for count in counts]
    return [(least, (count, lcm(count, prod(mesh)))) for count in counts]


def _is_right(step: Step) -> bool:
    """Whether every device holds what it reduces. (Exchanges are right for any sizes.)"""
    return not isinstance(step, Reduction) or holds_all(
        step.shape, step.mesh, step.source, step.target
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
    return [steps for steps in every if all(task.admits(step.mesh_dims) for step in steps)]
