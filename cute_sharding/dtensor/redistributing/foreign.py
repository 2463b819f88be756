"""Pending reductions that are methods of placements of other kinds than torch's own Partial (a
norm's, a masked embedding's): where they stand among the steps of a plan, and which of them hand
out blocks of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import NamedTuple

from cute_sharding.redistribution.chains import Chains, cutting
from cute_sharding.redistribution.cost import most_local
from cute_sharding.redistribution.plan import Held, RedistributionPlan, received_by
from cute_sharding.redistribution.step import Step


class Way(NamedTuple):
    """What is done before the reductions, or None; the mesh dims over which these hand out blocks,
    in order, before they are finished over the others; and what is done then.
    """

    first: RedistributionPlan | None
    handed_out: tuple[int, ...]
    then: RedistributionPlan

    @property
    def steps(self) -> tuple[Step, ...]:
        return (*(self.first.steps if self.first else ()), *self.then.steps)


def cheapest(
    plan: Callable[[Held, Chains], RedistributionPlan],
    held: Held,
    target: Chains,
    foreign: tuple[int, ...],
    shards: Collection[int],
    *,
    may_move: bool,
) -> Way:
    """The way by which the fewest elements are received: the reductions first; or first what is
    cut before, so that there is less to reduce; or blocks handed out of what each device has.

    Args:
        plan: makes the steps from one to the other.
        foreign: the mesh dims of these reductions.
        shards: those of which the result has plain shards.
        may_move: whether contributions may move before they are reduced: as those of sums do, if
            they are reduced element by element.
    """
    best = Way(None, (), plan(held, target))
    if not foreign or held.pending:
        return best
    shape, mesh, source = best.then.shape, best.then.mesh, held.chains

    def reduced(chains: Chains, handed_out: tuple[int, ...]) -> float:
        received = 0.0
        for k, m in enumerate(handed_out):
            most = most_local(shape, _with(chains, handed_out[:k], target), mesh)
            received += most * (mesh[m] - 1) / mesh[m]
        most = most_local(shape, _with(chains, handed_out, target), mesh)
        others = [m for m in foreign if m not in handed_out]
        return received + sum(2 * most * (mesh[m] - 1) / mesh[m] for m in others)

    least = received_by(best.steps) + reduced(source, ())
    blocks = _handed_out(shape, mesh, foreign, shards, target)
    for between in dict.fromkeys((_until(target, blocks), source)):
        # Devices that reduce together have to hold the same rows still.
        if not cutting(between).isdisjoint(foreign) or (source != between and not may_move):
            continue
        first = plan(Held(source, kept=(*held.kept, *foreign)), between)
        then = plan(Held(_with(between, blocks, target), kept=held.kept), target)
        way = Way(first, blocks, then)
        received = received_by(way.steps) + reduced(between, blocks)
        if received < least or (received == least and best.first is None):
            least, best = received, way
    return best


def _handed_out(
    shape: Sequence[int],
    mesh: Sequence[int],
    foreign: Collection[int],
    shards: Collection[int],
    target: Chains,
) -> tuple[int, ...]:
    """Of each tensor dim the mesh dims, one after the other, that are the first of these to cut it;
    and tensor dims whose blocks are filled up with least first: what is filled in is received, too.
    """
    found: list[tuple[float, list[int]]] = []
    for n, chain in zip(shape, target):
        at = next((k for k, (m, _) in enumerate(chain) if m in foreign), len(chain))
        some: list[int] = []
        for m, factor in chain[at:]:
            if m not in shards or factor != 1:
                break
            some.append(m)
        if some:
            rows = -(-n // prod(mesh[m] for m, _ in chain[:at]))
            filled = -(-rows // mesh[some[0]]) * mesh[some[0]]
            found.append((filled / max(rows, 1), some))
    return tuple([m for _, some in sorted(found) for m in some])


def _until(chains: Chains, mesh_dims: Collection[int]) -> Chains:
    """What is cut of each tensor dim before the first of these mesh dims cuts it."""
    found = []
    for chain in chains:
        at = next((k for k, (m, _) in enumerate(chain) if m in mesh_dims), len(chain))
        found.append(chain[:at])
    return tuple(found)


def _with(chains: Chains, mesh_dims: Collection[int], target: Chains) -> Chains:
    """The chains when these mesh dims have cut what ``target`` says, too."""
    cuts = [tuple([cut for cut in chain if cut[0] in mesh_dims]) for chain in target]
    return tuple([(*chain, *more) for chain, more in zip(chains, cuts)])
