"""The steps from one sharding to another, on layouts alone: reductions where some are pending, then
one exchange, or two where the network is not flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise, product
from math import lcm, prod
from typing import Any

from cute_sharding.redistribution.chains import Chains, appended, cuts_up_to, cutting
from cute_sharding.redistribution.cost import DEVICES, most_local, received
from cute_sharding.redistribution.digits import common, digits
from cute_sharding.redistribution.exchange import Exchange
from cute_sharding.redistribution.network import Network
from cute_sharding.redistribution.reduction import Reduction
from cute_sharding.redistribution.routes import Groups, admits, route
from cute_sharding.redistribution.step import Step


@dataclass(frozen=True)
class Held:
    """What the devices hold: the chains, and the mesh dims on which each device has but a
    contribution, with the op that reduces them. On mesh dims in ``kept`` it stays so.
    """

    chains: Chains
    pending: tuple[tuple[int, str], ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class RedistributionPlan:
    """Steps that take a tensor of ``shape`` on ``mesh`` from one sharding to another, and what they
    cost on ``network``.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    source: Held
    target: Held
    steps: tuple[Step, ...]
    network: Network
    mesh_names: tuple[str, ...] | None = None

    @cached_property
    def received_elements(self) -> int:
        """What the busiest device receives, step by step."""
        return received_by(self.steps)

    @cached_property
    def lower_bound(self) -> int | None:
        """What a device must receive at the least: what it needs and does not hold. None where
        something is to be reduced.
        """
        return (
            None
            if self.source.pending
            else received(self.shape, self.source.chains, self.target.chains, self.mesh)
        )

    @cached_property
    def peak_elements(self) -> int:
        """The most elements that a device holds at once: the source, which stays, the target, and
        the buffers between.
        """
        return peak_of(self.steps, most_local(self.shape, self.source.chains, self.mesh))

    @cached_property
    def seconds(self) -> float:
        """What the steps take by the network model."""
        return sum(map(self.network.seconds, self.steps))

    @property
    def collectives(self) -> int:
        return collectives(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in elements, times in seconds."""
        return {
            "shape": list(self.shape),
            "mesh": list(self.mesh),
            "steps": [
                {
                    "kind": step.kind,
                    "mesh_dims": [self._name(m) for m in step.mesh_dims],
                    "communicates": step.communicates,
                    "received_elements": step.received_elements,
                    "peak_elements": step.peak_elements,
                    "seconds": self.network.seconds(step),
                    "source_layout": _text(step.source_layout),
                    "target_layout": _text(step.target_layout),
                }
                for step in self.steps
            ],
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "lower_bound": self.lower_bound,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds,
        }

    def named(self, mesh_names: Sequence[str] | None) -> RedistributionPlan:
        """The plan with names for its mesh dims."""
        return self if mesh_names is None else replace(self, mesh_names=tuple(mesh_names))

    def _name(self, m: int) -> int | str:
        return self.mesh_names[m] if self.mesh_names else m

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do"
        lines = []
        for step in self.steps:
            where = (
                f" on mesh dims {', '.join(str(self._name(m)) for m in step.mesh_dims)}"
                if step.mesh_dims
                else ""
            )
            lines.append(
                f"{step.kind}{where}: receives {step.received_elements:,} elements, "
                f"{self.network.seconds(step):.4g} s"
            )
            if step.source_layout is not None and step.target_layout is not None:
                lines.append(f"  {step.source_layout} -> {step.target_layout}")
        lines.append(
            f"in all: {self.collectives} collectives, {self.received_elements:,} elements "
            f"received, at most {self.peak_elements:,} held, {self.seconds:.4g} s"
        )
        return "\n".join(lines)


def _text(layout: Any) -> str | None:
    return None if layout is None else str(layout)


def received_by(steps: Sequence[Step]) -> int:
    return sum(step.received_elements for step in steps)


def collectives(steps: Sequence[Step]) -> int:
    return sum(step.collectives for step in steps)


def peak_of(steps: Sequence[Step], source: int) -> int:
    """``source``, the most elements of the tensor that a device holds, stays all the while."""
    return max(
        [step.peak_elements + (source if i else 0) for i, step in enumerate(steps)], default=source
    )


@lru_cache(maxsize=1 << 10)
def plan_steps(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    network: Network | None = None,
    memory_limit: int | None = None,
    groups: Groups = None,
    native: bool = False,
) -> tuple[Step, ...]:
    """The steps that reduce everything pending of ``source`` and lead to ``target``: the fastest on
    ``network``, then the fewest elements received, then the fewest collectives.

    ``source.pending`` are the reductions to finish; those that stay pending commute with moving
    elements, between devices that hold the same contribution. ``network`` None counts elements
    received instead of seconds. Every step communicates among ranks that have a process group:
    those of one mesh dim, or of a set in ``groups``. With None, which stands for all sets, on a
    flat network at most one collective moves elements, and at most one reduces. ``native``: the
    backend gathers and reduce-scatters better than it exchanges.

    Raises:
        ValueError: no plan keeps every device within ``memory_limit`` elements. It names the least
            that would do.
    """

    if memory_limit is None:
        steps = _cheapest(
            nominal(shape, mesh, source, target, groups),
            mesh,
            source,
            target,
            network,
            groups,
            native,
        )
        steps = tuple([replace(step, shape=shape) for step in steps])
        if not all(map(_is_right, steps)) or not all(
            admits(groups, step.mesh_dims) for step in steps
        ):
            steps = _cheapest(shape, mesh, source, target, network, groups, native)
        return _natively(steps) if native else steps
    start, candidates = (
        most_local(shape, source.chains, mesh),
        _admitted(shape, mesh, source, target, network, groups),
    )
    fitting = [
        fitted
        for steps in candidates
        if (fitted := _fitted(steps, start, memory_limit)) is not None
    ]
    if not fitting:
        least = min(peak_of([_most_rounds(step) for step in steps], start) for steps in candidates)
        raise ValueError(
            f"no plan for {shape} on mesh {mesh} holds at most {memory_limit:,} elements on every "
            f"device: the least that would do is memory_limit={least}"
        )
    return min(fitting, key=lambda steps: _cost(steps, network))


# More messages than that at once are reckoned to take longer than a few more bytes.
MANY_PEERS = 64


def _natively(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps for a backend that gathers better than it exchanges. Where blocks differ in size, a
    gather from many devices over several mesh dims is better one after the other, the last to cut
    first.
    """
    found: list[Step] = []
    for step in steps:
        alone = []
        if (
            isinstance(step, Exchange)
            and prod(step.mesh[m] for m in step.dims) > MANY_PEERS
            and len(step.dims) > 1
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
                alone.append(Exchange(step.shape, step.mesh, at, bare).natively())
                at = bare
        if alone and 2 * received_by(alone) <= 3 * step.received_elements:
            found += alone
        else:
            found.append(step.natively())
    return tuple(found)


# Sizes that stand for all that do not divide: primes, so that nothing divides them.
STAND_INS = (1009, 10007, 100003, 1000003)


def nominal(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Held, target: Chains, groups: Groups
) -> tuple[int, ...]:
    """A shape for which the steps are chosen in the place of ``shape``: one for all shapes that
    answer alike to the same :func:`questions`.

    So ranks that run a graph for many sizes take the steps that a rank takes which runs eagerly.
    Steps are right for any sizes; which are the cheapest hardly depends on them, but for dims that
    are shorter than the devices that share them: these stand for themselves, as do dims of which
    split factors do not divide.
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
    """What the choice of steps asks of each tensor dim: whether it is as long as the devices are
    many, and which numbers of blocks divide it.

    Those are the blocks that source and target cut it into; and where several steps go in the place
    of one, all devices.
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
    if admits(groups, changed):
        return [(least if source.pending else 0, (count,)) for count in counts]
    return [(least, (count, lcm(count, prod(mesh)))) for count in counts]


def _is_right(step: Step) -> bool:
    """Whether every device has what it is to reduce. (What it has not is exchanged, whatever it
    is.)
    """
    return not isinstance(step, Reduction) or within(
        step.shape, step.mesh, step.source, step.target
    )


# What an all-to-all of many messages over several mesh dims is reckoned to take longer than
# collectives that a backend has natively, of as many elements.
MANY_MESSAGES = 1.5


def _cost(
    steps: tuple[Step, ...], network: Network | None, native: bool = False
) -> tuple[float, int, int, int]:
    seconds = 0.0
    if network is not None and not network.is_flat:
        seconds = sum(
            network.seconds(step)
            * (
                MANY_MESSAGES
                if native and isinstance(step, Exchange) and len(step.dims) > 1 and not step.gathers
                else 1
            )
            for step in steps
        )
    return seconds, received_by(steps), collectives(steps), len(steps)


@lru_cache(maxsize=1 << 10)
def _cheapest(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    network: Network | None,
    groups: Groups,
    native: bool,
) -> tuple[Step, ...]:
    return min(
        _admitted(shape, mesh, source, target, network, groups),
        key=lambda steps: _cost(steps, network, native),
    )


def _admitted(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    network: Network | None,
    groups: Groups,
) -> list[tuple[Step, ...]]:
    """The ways whose steps all have a group; one at the least."""
    found = [
        steps
        for steps in _candidates(shape, mesh, source, target, network, groups)
        if all(admits(groups, step.mesh_dims) for step in steps)
    ]
    return list(dict.fromkeys(found)) or [one_by_one(shape, mesh, source, target)]


def _candidates(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    network: Network | None,
    groups: Groups,
) -> Iterator[tuple[Step, ...]]:
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
    network: Network | None,
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
    direct = Exchange(shape, mesh, source, target)
    yield (direct,)
    flat = network is None or network.is_flat
    if not admits(groups, direct.mesh_dims) or (not flat and len(direct.mesh_dims) > 1):
        weights = (
            (1.0,) * len(mesh)
            if network is None or flat
            else tuple([network.link(m).beta for m in range(len(mesh))])
        )
        way = route(shape, mesh, source, target, kept, groups or frozenset(), weights)
        if way is not None:
            yield tuple(
                [Exchange(shape, mesh, before, after) for before, after in pairwise((source, *way))]
            )
    if network is None or flat:
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
            yield Exchange(shape, mesh, source, middle), Exchange(shape, mesh, middle, target)


def _reductions(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    source: Held,
    target: Chains,
    moved: Callable[[Chains], Iterator[tuple[Step, ...]]],
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

    def reduction(before: Chains, after: Chains, among: Sequence[int]) -> Reduction:
        ops = {m: op for m, op in source.pending if m in among}
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

    def alike(among: Sequence[int], to: Chains) -> bool:
        return len({m in cutting(to) for m in among}) == 1  # all of them cut it, or none

    def after(base: Chains, among: Sequence[int]) -> Iterator[Chains]:
        """What devices can hold once ``among`` are reduced: all that they had, or a share cut on
        one tensor dim or as the target is.
        """
        yield base
        for options in dict.fromkeys(
            tuple(option)
            for d in range(len(shape))
            for option in product(*(((d, 1), wanted.get(m, (d, 1))) for m in among))
        ):
            to = base
            for m, (d, f) in zip(among, options):
                to = appended(to, m, d, f)
            yield to

    direct = within(shape, mesh, source.chains, target)
    sliced = source.chains
    for m in sorted(wanted.keys() - cutting(source.chains) - {*dims}):
        sliced = appended(sliced, m, *wanted[m])
    if admits(groups, dims):
        if direct and alike(dims, target):
            yield from ((reduction(source.chains, target, dims), *steps) for steps in moved(target))
        for base in dict.fromkeys((source.chains, sliced)):
            for to in after(base, dims):
                yield from ((reduction(source.chains, to, dims), *steps) for steps in moved(to))
    else:
        # Each part by itself: an all-reduce, or a reduce-scatter as the target is. In which order
        # matters, as cuts follow one another.
        for parts in _ordered_parts(dims, groups):
            for base in dict.fromkeys((source.chains, sliced)):
                for scattered in product(
                    *(
                        (False, True) if all(m in wanted for m in part) else (False,)
                        for part in parts
                    )
                ):
                    at, first, steps = source.chains, base, []
                    for part, scatter in zip(parts, scattered):
                        for m in part if scatter else ():
                            first = appended(first, m, *wanted[m])
                        steps.append(reduction(at, first, part))
                        at = first
                    yield from ((*steps, *last) for last in moved(at))
    # Or one part of the mesh dims after the other. Where blocks differ in size a sum of sums
    # receives less than all the contributions at once.
    for count in range(1, len(dims) if direct else 1):
        for first_dims in combinations(dims, count):
            last_dims = [m for m in dims if m not in first_dims]
            middle = tuple(
                [tuple([cut for cut in chain if cut[0] not in last_dims]) for chain in target]
            )
            if (
                alike(first_dims, middle)
                and alike(last_dims, target)
                and within(shape, mesh, source.chains, middle)
                and within(shape, mesh, middle, target)
            ):
                yield (
                    reduction(source.chains, middle, first_dims),
                    reduction(middle, target, last_dims),
                )


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


def one_by_one(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Held, target: Chains
) -> tuple[Step, ...]:
    """Steps that each communicate on one mesh dim: for where there are no groups of several. They
    move more than they must.

    Reductions are all-reduces. Then the source gives up its cuts, the last first, until every
    device holds what it needs.
    """
    steps: list[Step] = []
    for m, op in source.pending:
        steps.append(
            Reduction(
                shape,
                mesh,
                source.chains,
                source.chains,
                (m,),
                "sum" if op == "avg" else op,
                mesh[m] if op == "avg" else 1,
            )
        )
    at = source.chains
    while not within(shape, mesh, at, target):
        # A cut that the target lacks, or has in another place; the last of its tensor dim, so that
        # the others stay as they are.
        d = next(
            d for d, (before, after) in enumerate(zip(at, target)) if before != after[: len(before)]
        )
        fewer = tuple([chain[:-1] if i == d else chain for i, chain in enumerate(at)])
        steps.append(Exchange(shape, mesh, at, fewer))
        at = fewer
    return (*steps, *_moved(shape, mesh, at, target))


def _moved(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains
) -> tuple[Step, ...]:
    return () if source == target else (Exchange(shape, mesh, source, target),)


def within(shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains) -> bool:
    """Whether every device already holds what it is to hold. Never a mistaken yes."""
    if all(after[: len(before)] == before for before, after in zip(source, target)):
        return True
    if prod(mesh) > DEVICES:
        for n, before, after in zip(shape, source, target):
            one, other = digits(n, before, mesh), digits(n, after, mesh)
            if one is None or other is None or common(n, one, other) is None:
                return False
    return received(shape, source, target, mesh) == 0


def _fitted(steps: tuple[Step, ...], source: int, limit: int) -> tuple[Step, ...] | None:
    """The steps, with exchanges in as many rounds as it takes to keep within ``limit``; None where
    nothing helps.
    """
    fitted: list[Step] = []
    for i, step in enumerate(steps):
        room = limit - (source if i else 0)
        if step.peak_elements > room and isinstance(step, Exchange) and step.communicates:
            rounds, most = 2, _most_rounds(step)
            while rounds < most.rounds and replace(step, rounds=rounds).peak_elements > room:
                rounds *= 2
            step = replace(step, rounds=min(rounds, most.rounds))
        if step.peak_elements > room:
            return None
        fitted.append(step)
    return tuple(fitted) if peak_of(fitted, source) <= limit else None


def _most_rounds(step: Step) -> Any:
    """The step in its smallest buffers: a row of the longest dim at a time."""
    return (
        replace(step, rounds=max(step.shape))
        if isinstance(step, Exchange) and step.communicates
        else step
    )
