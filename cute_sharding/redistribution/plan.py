"""The steps from one sharding to another, on layouts alone: reductions where some are pending, then one exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from cute_sharding.redistribution.chains import Chains, cutting
from cute_sharding.redistribution.cost import DEVICES, received
from cute_sharding.redistribution.digits import common, digits
from cute_sharding.redistribution.exchange import Exchange
from cute_sharding.redistribution.reduction import Reduction

Step: TypeAlias = "Exchange | Reduction"


@dataclass(frozen=True)
class Held:
    """What the devices hold: the chains, and the mesh dims on which each device has but a contribution, with the op that reduces them."""

    chains: Chains
    pending: tuple[tuple[int, str], ...] = ()


def received_by(steps: Sequence[Step]) -> int:
    return sum(step.received_elements for step in steps)


def collectives(steps: Sequence[Step]) -> int:
    return sum(isinstance(step, Reduction) or bool(step.dims) for step in steps)


@lru_cache(maxsize=1 << 10)
def plan_steps(shape: tuple[int, ...], mesh: tuple[int, ...], source: Held, target: Chains) -> tuple[Step, ...]:
    """The steps that reduce everything pending of ``source`` and lead to ``target``: the fewest elements received, then the fewest collectives.

    ``source.pending`` are the reductions to finish; those that stay pending are not the plan's affair, for they commute with moving elements.
    At most two collectives.
    """
    if not source.pending:
        return _moved(shape, mesh, source.chains, target)
    best = min(_reductions(shape, mesh, source, target), key=lambda steps: (received_by(steps), collectives(steps), len(steps)))
    return tuple(best)


def _moved(shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains) -> tuple[Step, ...]:
    return () if source == target else (Exchange(shape, mesh, source, target),)


def _reductions(shape: tuple[int, ...], mesh: tuple[int, ...], source: Held, target: Chains) -> Iterator[tuple[Step, ...]]:
    """Ways to reduce, each followed by the exchange that is still needed.

    Before reducing a device may drop what it need not hold, which is free: the cuts of the target on mesh dims that replicate the source. A reduce-scatter hands out what is left along one
    tensor dim or another, or as the target will have it; an all-reduce leaves it where it is.
    """
    dims = tuple([m for m, _ in source.pending])
    ops = {op for _, op in source.pending}
    op = "sum" if ops <= {"sum", "avg"} else next(iter(ops))
    divisor = prod(mesh[m] for m, op in source.pending if op == "avg")
    if not prod(shape):
        yield _moved(shape, mesh, source.chains, target)
        return

    def reduced(to: Chains) -> tuple[Step, ...]:
        return (Reduction(shape, mesh, source.chains, to, dims, op, divisor), *_moved(shape, mesh, to, target))

    pending = {*dims}
    if within(shape, mesh, source.chains, target) and (pending <= cutting(target) or pending.isdisjoint(cutting(target))):
        yield reduced(target)
    wanted = {m: (d, f) for d, chain in enumerate(target) for m, f in chain}
    sliced = source.chains
    for m in sorted(wanted.keys() - cutting(source.chains) - pending):
        sliced = _appended(sliced, m, *wanted[m])
    for base in {source.chains, sliced}:
        yield reduced(base)
        for options in {tuple(option) for d in range(len(shape)) for option in product(*({(d, 1), wanted.get(m, (d, 1))} for m in dims))}:
            to = base
            for m, (d, f) in zip(dims, options):
                to = _appended(to, m, d, f)
            yield reduced(to)


def _appended(chains: Chains, m: int, dim: int, split_factor: int) -> Chains:
    """One more cut, of what the others leave: always within them."""
    return tuple([(*chain, (m, split_factor)) if d == dim else chain for d, chain in enumerate(chains)])


def within(shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains) -> bool:
    """Whether every device already holds what it is to hold. Never a mistaken yes."""
    if all(after[: len(before)] == before for before, after in zip(source, target)):
        return True
    if prod(mesh) <= DEVICES:
        return received(shape, source, target, mesh) == 0
    for n, before, after in zip(shape, source, target):
        one, other = digits(n, before, mesh), digits(n, after, mesh)
        if one is None or other is None or common(n, one, other) is None:
            return False
    return received(shape, source, target, mesh) == 0
