"""The placements of the input that make a view free, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.cost import DEVICES, local_elements, received_elements
from cute_sharding.propagation.carry import Kinds, carry, carry_one, kinds_of
from cute_sharding.propagation.solver import Budget, Cost, carried, split_factors
from cute_sharding.relations.view import View
from cute_sharding.sharding.chains import Cut

# The budget of one search: a cut that is tried, or a device whose cost is counted, is a step. It
# covers meshes of two dims over small tensors; larger searches try few changes first.
BUDGET = 12_000


class Target(NamedTuple):
    """Cuts of the input under which the view is free, and the cost of getting there.

    Attributes:
        cost: the elements received; those held of input and output together; how many mesh dims
            change; the split factors above 1 of both.
        source: the cuts of the input.
        output: the cuts of the output.

    >>> from cute_sharding.relations.table import BY_OP
    >>> view = BY_OP["Tensor.view"].view((6, 4), (3, 2, 4))
    >>> target = free_targets(view, [(1, 1)], (2,))[0]
    >>> isinstance(target, Target), target.received, target.source, target.output
    (True, 0, ((1, 1),), ((2, 1),))
    """

    cost: Cost
    source: tuple[Cut, ...]
    output: tuple[Cut, ...]

    @property
    def received(self) -> int:
        """The elements that the busiest device receives."""
        return self.cost.received


def free_targets(
    view: View,
    cuts: Sequence[Cut],
    mesh: Sequence[int],
    *,
    fixed: Sequence[int] = (),
    unsharded: Sequence[int] = (),
    allowed: Callable[[tuple[Cut, ...]], bool] = lambda source: True,
    most: int | None = 3,
) -> list[Target]:
    """The ``most`` (None: all that are found) cheapest cuts of the input under which ``view`` is
    free; at least one.

    They are sorted by elements received, then by memory of input and output, then by closeness to
    ``cuts``. Every mesh dim may keep its cut, shard any dim by any split factor, or replicate. Mesh
    dims in ``fixed`` keep their cuts (they carry a pending reduction), input dims in ``unsharded``
    must not be sharded, and ``allowed`` may reject any answer but replicating everything.

    The search covers all of that if it fits the budget, as it does for small tensors on meshes of
    two dims. Otherwise it tries changes of one mesh dim first, then of two, and so on, so that it
    leaves out the distant ones; replicating everything is always among the answers.

    Args:
        view: the view.
        cuts: the input's cuts, one for each mesh dim.
        mesh: the mesh's sizes.

    >>> from cute_sharding.relations.table import BY_OP
    >>> view = BY_OP["Tensor.view"].view((7, 4), (28,))  # 7 rows on 3 devices: blocked
    >>> [(target.source, target.received) for target in free_targets(view, [(0, 1)], (3,))]
    [(((1, 1),), 8), (((1, 2),), 8), (((1, 4),), 16)]
    """
    search = _Search(view, tuple(cuts), tuple(mesh), tuple(unsharded), allowed)
    everything: tuple[Cut, ...] = tuple(
        [cut if m in fixed else None for m, cut in enumerate(search.cuts)]
    )
    if prod(view.target):
        free = [m for m in range(len(cuts)) if m not in fixed and mesh[m] > 1]
        for changes in range(len(free) + 1):
            for changing in combinations(free, changes):
                search.try_all(changing)
    if everything not in search.found:
        search.add(everything, carry(view, everything, search.mesh).cuts)
    return sorted(search.found.values(), key=itemgetter(0))[:most]


# The local shapes of each kind of device, and the cuts of the output so far.
_Carried: TypeAlias = "tuple[Kinds, tuple[Cut, ...]]"


@dataclass
class _Search:
    """One call of :func:`free_targets`: its arguments, the rest of the budget, and the answers so
    far, by the input's cuts.
    """

    view: View
    cuts: tuple[Cut, ...]
    mesh: tuple[int, ...]
    unsharded: tuple[int, ...]
    allowed: Callable[[tuple[Cut, ...]], bool]
    budget: Budget = field(default_factory=lambda: Budget(BUDGET))
    found: dict[tuple[Cut, ...], Target] = field(default_factory=dict)

    def try_all(self, changing: tuple[int, ...]) -> None:
        """Try all cuts of the mesh dims ``changing``; the others keep theirs."""

        def options(decided: tuple[Cut, ...], so_far: _Carried) -> Sequence[Cut]:
            m = len(decided)
            cut = self.cuts[m]
            return _options(self.view, so_far[0], cut, self.unsharded) if m in changing else [cut]

        def carry(decided: tuple[Cut, ...], so_far: _Carried, cut: Cut) -> _Carried | None:
            step = carry_one(self.view, so_far[0], cut, self.mesh[len(decided)])
            return None if step is None else (step[1], (*so_far[1], step[0]))

        start: _Carried = kinds_of(self.view), ()
        for source, (_, output) in carried(len(self.cuts), options, carry, start, self.budget):
            self.budget.take(min(prod(self.mesh), DEVICES))
            if self.allowed(source) and not self._shards_what_it_must_not(source):
                self.add(source, output)

    def _shards_what_it_must_not(self, source: tuple[Cut, ...]) -> bool:
        return any(
            cut is not None and cut[0] in self.unsharded and n > 1
            for cut, n in zip(source, self.mesh, strict=True)
        )

    def add(self, source: tuple[Cut, ...], output: tuple[Cut, ...]) -> None:
        """Record an answer with its cost."""
        self.found[source] = target_of(self.view, self.cuts, self.mesh, source, output)


def target_of(
    view: View,
    cuts: tuple[Cut, ...],
    mesh: tuple[int, ...],
    source: tuple[Cut, ...],
    output: tuple[Cut, ...],
) -> Target:
    """The target ``source``, ``output`` with its cost from ``cuts``."""
    cost = Cost(
        received_elements(view.input_shape, cuts, source, mesh),
        held=local_elements(view.input_shape, source, mesh)
        + local_elements(view.output_shape, output, mesh),
        changed=sum(a != b for a, b in zip(cuts, source, strict=True)),
        strides=sum(cut is not None and cut[1] > 1 for cut in (*source, *output)),
    )
    return Target(cost, source, output)


def _options(view: View, kinds: Kinds, cut: Cut, unsharded: Sequence[int]) -> list[Cut]:
    """The cuts of the next mesh dim other than ``cut``, one for each division on the kinds of
    device, Shard before _StridedShard.
    """
    options: list[Cut] = [] if cut is None else [None]
    factors_of: list[tuple[int, int]] = []
    for dim in range(len(view.input_shape)):
        if dim in unsharded:
            continue
        at = view.position(dim)
        sizes = [source[at] for source, _ in kinds] or [1]
        seen = set()
        for factor in split_factors(max(sizes), () if cut is None else (cut[1],)):
            pieces = tuple([-(-n // factor) for n in sizes])
            if pieces not in seen:
                seen.add(pieces)
                factors_of.append((factor, dim))
    options += [(dim, factor) for factor, dim in sorted(factors_of) if (dim, factor) != cut]
    return options
