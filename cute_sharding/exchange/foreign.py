"""Pending reductions that placements run by their own methods (a norm's, a masked embedding's):
their place among the steps of a plan, and which of them scatter the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.network import Network
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.plan import RedistributionPlan, received_by
from cute_sharding.exchange.step import Step, all_reduced, of_blocks
from cute_sharding.sharding.rows import Chains, cutting

Plan: TypeAlias = Callable[[Placed, Placed], RedistributionPlan]


class ForeignReduction(NamedTuple):
    """One of these reductions, over a mesh dim. It gives each device a block of the result
    (``hands_out``), or all of it.
    """

    mesh_dim: int
    hands_out: bool
    received_elements: int

    def seconds(self, network: Network, parts: int) -> float:
        """The time that it takes among ``parts`` devices, by the model for plans."""
        return network.collective(
            self.mesh_dim,
            parts,
            self.received_elements,
            together=True,
            times=1 if self.hands_out else 2,
        )


class ForeignWay(NamedTuple):
    """A plan that runs before the reductions, or None; the reductions, in order; and the plan after
    them.
    """

    first: RedistributionPlan | None
    reductions: tuple[ForeignReduction, ...]
    then: RedistributionPlan

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*(self.first.steps if self.first else ()), *self.then.steps)

    @property
    def received_elements(self) -> int:
        """The elements that the busiest device receives, in all."""
        return received_by(self.steps) + sum(each.received_elements for each in self.reductions)


def cheapest(
    plan: Plan,
    source: Placed,
    target: Placed,
    foreign: tuple[int, ...],
    shards: Collection[int],
    *,
    may_move: bool,
) -> ForeignWay:
    """The way that receives the fewest elements: the reductions first; or after a slice of what
    each device holds, so that there is less to reduce; or with blocks of the result handed out.

    The choice depends on the placements alone: it is computed for sizes that all cuts divide. So a
    rank that runs eagerly, and ranks with a graph for any sizes, do the same.

    Args:
        plan: makes the steps between two shardings of a tensor.
        source, target: how it lies before and after; without what is pending on ``foreign``.
        foreign: the mesh dims of these reductions.
        shards: the mesh dims among them on which the result has plain shards.
        may_move: whether contributions may move before they are reduced: they may if the reduction
            is element by element, as a sum is.
    """
    before, after = source.chains, target.chains
    blocks = _handed_out(foreign, shards, after)
    ways: list[tuple[Chains, tuple[int, ...]]] = []  # (cuts made before, blocks handed out)
    if foreign and not source.reduced_to(target):
        for between in dict.fromkeys((_chains_until(after, blocks), before)):
            # Devices that reduce together still have to hold the same rows.
            if cutting(between).isdisjoint(foreign) and (before == between or may_move):
                ways.append((between, blocks))
    if not ways:
        reductions = _reductions(source, foreign, (), after)
        return ForeignWay(None, reductions, plan(source, target))
    pending = (*target.pending, *[(m, "foreign") for m in foreign])

    def way(shape: tuple[int, ...], chains: Chains, blocks: tuple[int, ...]) -> ForeignWay:
        start = replace(source, shape=shape, pending=pending)
        between = replace(start, chains=chains)
        goal = replace(target, shape=shape)
        reduced = replace(goal, chains=_chains_with(chains, blocks, after))
        reductions = _reductions(between, foreign, blocks, after)
        return ForeignWay(plan(start, between), reductions, plan(reduced, goal))

    even = _divisible(source.shape, source.mesh.sizes, (before, after))
    every = [(before, ()), *ways]
    return way(source.shape, *min(every, key=lambda each: way(even, *each).received_elements))


def _reductions(
    between: Placed, foreign: tuple[int, ...], blocks: tuple[int, ...], target: Chains
) -> tuple[ForeignReduction, ...]:
    """The reductions of a tensor placed as ``between``, first those that hand out ``blocks``."""
    mesh, found = between.mesh.sizes, []

    def held(blocks: tuple[int, ...]) -> int:
        return between.cut_as(_chains_with(between.chains, blocks, target)).most

    for k, m in enumerate(blocks):
        found.append(ForeignReduction(m, True, of_blocks(mesh[m], held(blocks[: k + 1]))))
    whole = held(blocks)
    rest = [m for m in foreign if m not in blocks]
    return (*found, *[ForeignReduction(m, False, all_reduced(mesh[m], whole)) for m in rest])


def _divisible(
    shape: Sequence[int], mesh: Sequence[int], every: Sequence[Chains]
) -> tuple[int, ...]:
    """A shape with the same number of dims that all of these cuts divide."""
    factors = [factor for chains in every for chain in chains for _, factor in chain]
    return (prod(mesh) * lcm(*factors),) * len(shape)


def _handed_out(
    foreign: Collection[int], shards: Collection[int], target: Chains
) -> tuple[int, ...]:
    """The mesh dims whose reductions can hand out blocks: for each tensor dim, the first foreign
    ones that cut it, while they make plain shards; all left to right if possible, as in torch.
    """
    runs: list[list[int]] = []
    for chain in target:
        at = next((k for k, (m, _) in enumerate(chain) if m in foreign), len(chain))
        run: list[int] = []
        for m, factor in chain[at:]:
            if m not in shards or factor != 1:
                break
            run.append(m)
        if run:
            runs.append(run)
    found: list[int] = []
    while runs:
        run = min(runs)
        found.append(run.pop(0))
        runs = [run for run in runs if run]
    return tuple(found)


def _chains_until(chains: Chains, mesh_dims: Collection[int]) -> Chains:
    """The chains of cuts up to the first cut by one of these mesh dims."""
    found = []
    for chain in chains:
        at = next((k for k, (m, _) in enumerate(chain) if m in mesh_dims), len(chain))
        found.append(chain[:at])
    return tuple(found)


def _chains_with(chains: Chains, mesh_dims: Collection[int], target: Chains) -> Chains:
    """The chains, followed by the cuts of these mesh dims in ``target``."""
    cuts = [tuple([cut for cut in chain if cut[0] in mesh_dims]) for chain in target]
    return tuple([(*chain, *more) for chain, more in zip(chains, cuts)])
