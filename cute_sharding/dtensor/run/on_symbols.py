"""A plan for the sizes at hand, run on a tensor whose sizes are symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

import torch

from cute_sharding.dtensor.compiled.symbols import known, symbols_of, unknown
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.dynamic import run_opaque
from cute_sharding.dtensor.run.executor import looks_at_sizes, run
from cute_sharding.dtensor.run.groups import groups_at_hand
from cute_sharding.exchange.plan import RedistributionPlan
from cute_sharding.exchange.planner import questions
from cute_sharding.exchange.step import Step
from cute_sharding.layout import Size
from cute_sharding.layout.symbolic import Int


def run_on_symbols(
    plan: RedistributionPlan, local: torch.Tensor, spec: DTensorSpec
) -> torch.Tensor:
    """A plan for the sizes at hand, on a tensor whose sizes are symbolic.

    What a rank sends lies in the order of its elements, in a graph for many sizes as where a
    program runs eagerly: else ranks that do one and ranks that do the other would take each other's
    elements for something else. A compiler can say that of collectives of whole tensor dims, and
    sees those; other steps are one op that plans and runs anew in each call. By what the steps were
    chosen (exchange/planner.py) becomes guards of the former, so that every call of the graph
    is one for which they are chosen. Of the latter, that sizes divide does, where they do at hand,
    as what follows then computes with sizes that are simpler.
    """
    if not plan.steps:
        return local
    asked = _asked(plan, spec.mesh)
    if _is_of_any_size(plan, tuple(spec.shape), asked):
        return run_opaque([plan], [local], spec.mesh, [tuple(spec.shape)])[0]
    alone = not any(step.communicates for step in plan.steps)
    seen = alone or not any(looks_at_sizes(step, local.dtype, spec.mesh) for step in plan.steps)
    with symbols_of(tuple(spec.shape)):
        for d, (n, (least, counts)) in enumerate(zip(known(tuple(spec.shape)), asked)):
            if isinstance(n, Size):
                _ = n % _count(d, plan.steps) == 0
            if isinstance(n, Size) and seen:
                _ = least <= n, [n % count == 0 for count in counts]
    if alone:
        return _run_on_blocks(plan.steps, local, spec)
    return (
        run(plan.steps, local, spec.mesh)
        if seen
        else run_opaque([plan], [local], spec.mesh, [tuple(spec.shape)])[0]
    )


def settle_divisions(plan: RedistributionPlan, shape: tuple[Any, ...], mesh: Any) -> None:
    """Have it a guard that sizes divide, where they do at hand, of a plan that the op runs."""
    if not _is_of_any_size(plan, shape, _asked(plan, mesh)):
        with symbols_of(shape):
            for d, n in enumerate(known(shape)):
                if isinstance(n, Size):
                    _ = n % _count(d, plan.steps) == 0


def _asked(plan: RedistributionPlan, mesh: Any) -> list[tuple[int, tuple[int, ...]]]:
    groups = groups_at_hand(mesh)
    return questions(plan.shape, plan.mesh, plan.source, plan.target.chains, groups)


def _is_of_any_size(
    plan: RedistributionPlan, shape: tuple[Any, ...], asked: Sequence[tuple[int, Any]]
) -> bool:
    """Whether a graph is told nothing of the sizes, as these do not divide, or are too few.

    A size with fewer rows than steps are chosen for would have to be a number, and so would all
    that is computed with it: too late, where a backward pass is traced.
    """
    return any(
        n % _count(d, plan.steps) or (isinstance(size, torch.SymInt) and n < least)
        for d, (n, size, (least, _)) in enumerate(zip(plan.shape, shape, asked))
    )


def _run_on_blocks(steps: Sequence[Step], local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Steps of which none communicates, planned for the sizes at hand, on a tensor whose sizes are
    symbolic.

    Let all cuts of a dim divide it into U parts of one size. Then the steps move whole such parts,
    whatever their size: they are the steps of a tensor of U rows, of which each stands for a block
    of n / U. So sizes that divide stay symbolic (with the guard that they do), and the others are
    fixed.
    """
    with symbols_of(tuple(spec.shape)):
        counts, blocks = zip(
            *(_blocks(n, d, steps) for d, n in enumerate(known(tuple(spec.shape)))), strict=True
        )
        blocks = unknown(blocks, local=True)
    ndim = len(counts)
    scaled = [replace(step, shape=counts) for step in steps]
    before, after = scaled[0].ends[0], scaled[-1].ends[1]
    rank = before.mesh.rank(tuple(spec.mesh.get_coordinate()))  # type: ignore[arg-type]
    held = before.shape_on(rank)
    apart = local.reshape([n for pair in zip(held, blocks) for n in pair]).permute(
        *range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)
    )
    moved = run(scaled, apart, spec.mesh)
    held = after.shape_on(rank)
    together = moved.permute([d for pair in zip(range(ndim), range(ndim, 2 * ndim)) for d in pair])
    return together.reshape([n * block for n, block in zip(held, blocks)])


def _blocks(n: Int, dim: int, steps: Sequence[Step]) -> tuple[int, Int]:
    """Into how many blocks the steps divide a dim of ``n`` rows, and how long each is."""
    if not isinstance(n, Size):
        return n, 1
    count = _count(dim, steps)
    if n % count == 0:
        return count, n // count
    return int(unknown(n)), 1


def _count(dim: int, steps: Sequence[Step]) -> int:
    """Into how many blocks the steps want to divide a dim."""
    count = 1
    for step in steps:
        for chains in (step.source, step.target):
            count = lcm(count, prod(factor * step.mesh[m] for m, factor in chains[dim]))
    return count
