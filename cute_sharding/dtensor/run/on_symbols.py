"""Redistributions of compiled programs with symbolic sizes: the steps that a compiler can describe
for many sizes are in the graph; other exchanges are one op (:mod:`.in_graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

import torch

from cute_sharding.dtensor.compiled.symbols import symbols_of, to_sizes, to_symints
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.executor import looks_at_sizes, run
from cute_sharding.dtensor.run.groups import groups_at_hand
from cute_sharding.dtensor.run.in_graphs import run_opaque
from cute_sharding.exchange.plan import RedistributionPlan
from cute_sharding.exchange.planner import questions
from cute_sharding.exchange.step import Step
from cute_sharding.layout import Size
from cute_sharding.layout.symbolic import Int


def run_on_symbols(
    plan: RedistributionPlan, local: torch.Tensor, spec: DTensorSpec
) -> torch.Tensor:
    """Run a plan, made for the sizes at hand, on a tensor whose sizes are symbolic.

    In a graph for many sizes, a rank must send elements in the same order as in an eager program;
    else compiled and eager ranks would misread each other's messages. A compiler can describe that
    order for collectives of whole tensor dims, and the graph shows these. Other steps are one op
    that plans and runs anew in each call. For collectives that the graph shows, the conditions by
    which the steps were chosen (exchange/planner.py) become guards, so the steps are right in every
    call of the graph. For the op, only the divisibility of sizes does, if they divide at hand,
    because what follows then computes with simpler sizes.
    """
    if not plan.steps:
        return local
    asked = _questions(plan, spec.mesh)
    if _is_of_any_size(plan, tuple(spec.shape), asked):
        return run_opaque([plan], [local], spec.mesh, [tuple(spec.shape)])[0]
    alone = not any(step.communicates for step in plan.steps)
    seen = alone or not any(looks_at_sizes(step, local.dtype, spec.mesh) for step in plan.steps)
    with symbols_of(tuple(spec.shape)):
        for d, (n, (least, counts)) in enumerate(zip(to_sizes(tuple(spec.shape)), asked)):
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
    """Add guards that sizes divide, where they do at hand, for a plan that the op runs."""
    if not _is_of_any_size(plan, shape, _questions(plan, mesh)):
        with symbols_of(shape):
            for d, n in enumerate(to_sizes(shape)):
                if isinstance(n, Size):
                    _ = n % _count(d, plan.steps) == 0


def _questions(plan: RedistributionPlan, mesh: Any) -> list[tuple[int, tuple[int, ...]]]:
    groups = groups_at_hand(mesh)
    return questions(plan.shape, plan.mesh, plan.source, plan.target.chains, groups)


def _is_of_any_size(
    plan: RedistributionPlan, shape: tuple[Any, ...], asked: Sequence[tuple[int, Any]]
) -> bool:
    """Whether the graph gets no guards on sizes, since they do not divide or are too few.

    A size with fewer rows than the choice of steps asks for would have to become a number, and so
    would all sizes computed from it; when a backward pass is traced, it is too late for that.
    """
    return any(
        n % _count(d, plan.steps) or (isinstance(size, torch.SymInt) and n < least)
        for d, (n, size, (least, _)) in enumerate(zip(plan.shape, shape, asked))
    )


def _run_on_blocks(steps: Sequence[Step], local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Run steps of which none communicates, planned for the sizes at hand, on symbolic sizes.

    Let all cuts of a dim divide it into U parts of one size. Then the steps move whole parts,
    whatever their size: they are the steps of a tensor of U rows, each of which stands for a block
    of n / U rows. So sizes that divide stay symbolic (with a guard that they do), and other sizes
    become numbers.
    """
    with symbols_of(tuple(spec.shape)):
        counts, blocks = zip(
            *(_blocks(n, d, steps) for d, n in enumerate(to_sizes(tuple(spec.shape)))), strict=True
        )
        blocks = to_symints(blocks, local=True)
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
    """How many blocks the steps divide a dim of ``n`` rows into, and the length of each."""
    if not isinstance(n, Size):
        return n, 1
    count = _count(dim, steps)
    if n % count == 0:
        return count, n // count
    return int(to_symints(n)), 1


def _count(dim: int, steps: Sequence[Step]) -> int:
    """The number of blocks into which the steps together would divide a dim."""
    count = 1
    for step in steps:
        for chains in (step.source, step.target):
            count = lcm(count, prod(factor * step.mesh[m] for m, factor in chains[dim]))
    return count
