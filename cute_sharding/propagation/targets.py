"""The cheapest placements of the input that make a view free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding.exchange.cost import DEVICES, most_rows, received_elements
from cute_sharding.propagation.carry import Kinds, carry_one, kinds_of, unblocked
from cute_sharding.propagation.solver import Budget, Cost, carried, split_factors
from cute_sharding.relations.view import View
from cute_sharding.sharding.chains import Cut, chains_of

# The budget of one search: a cut that is tried, or a device whose cost is counted, is a step. It
# covers meshes of two dims over small tensors; larger searches try few changes first.
BUDGET = 12_000

Cuts: TypeAlias = "tuple[Cut, ...]"
# The local shapes of each kind of device, and the cuts of the output so far.
_Carried: TypeAlias = "tuple[Kinds, Cuts]"


class Target(NamedTuple):
    """Cuts of the input under which the view is free, and the cost of getting there.

    Attributes:
        cost: the elements received; those held of input and output together; how many mesh dims
            change; the split factors above 1 of both.
        source: the cuts of the input.
        output: the cuts of the output.

    >>> from cute_sharding.relations.table import BY_OP
    >>> view = BY_OP["Tensor.view"].view((6, 4), (3, 2, 4))
    >>> target: Target = cheapest(view, [(1, 1)], (2,))
    >>> target.received, target.source, target.output
    (0, ((1, 1),), ((2, 1),))
    """

    cost: Cost
    source: Cuts
    output: Cuts

    @property
    def received(self) -> int:
        """The elements that the busiest device receives."""
        return self.cost.received


def cheapest(
    view: View,
    cuts: Sequence[Cut],
    mesh: Sequence[int],
    *,
    fixed: Sequence[int] = (),
    unsharded: Sequence[int] = (),
) -> Target:
    """The cuts of the input under which ``view`` is free and for which the fewest elements are
    received; of several, those that hold the least memory of input and output; then the closest to
    ``cuts``.

    Every mesh dim may keep its cut, shard any dim by any split factor, or replicate; but mesh dims
    in ``fixed`` keep their cuts (they carry a pending reduction), and input dims in ``unsharded``
    must not be sharded. The search starts from :func:`.unblocked`, and covers everything if that
    fits the budget, as it does for small tensors on meshes of two dims. Otherwise it tries changes
    of one mesh dim first, then of two, and so on, so that it leaves out the distant ones.

    Args:
        view: the view.
        cuts: the input's cuts, one for each mesh dim.
        mesh: the mesh's sizes.

    >>> from cute_sharding.relations.table import BY_OP
    >>> view = BY_OP["Tensor.view"].view((7, 4), (28,))  # 7 rows on 3 devices: blocked
    >>> target = cheapest(view, [(0, 1)], (3,))
    >>> target.source, target.output, target.received
    (((1, 1),), ((0, 7),), 8)
    """
    cuts, mesh = tuple(cuts), tuple(mesh)
    before, _ = _rows_and_elements(view.input_shape, cuts, mesh)
    best: Target | None = None
    for source, output in _tried(view, cuts, mesh, fixed, unsharded):
        after, held = _rows_and_elements(view.input_shape, source, mesh)
        # At least what the fullest device lacks if it keeps all rows that it can.
        least = held - prod(map(min, before, after))
        if best is not None and least > best.received:
            continue
        cost = Cost(
            least,
            held=held + _rows_and_elements(view.output_shape, output, mesh)[1],
            changed=sum(a != b for a, b in zip(cuts, source, strict=True)),
            strides=sum(cut is not None and cut[1] > 1 for cut in (*source, *output)),
        )
        if best is not None and cost >= best.cost:
            continue
        cost = cost._replace(received=received_elements(view.input_shape, cuts, source, mesh))
        if best is None or cost < best.cost:
            best = Target(cost, source, output)
    assert best is not None, "the first is always tried"
    return best


def _rows_and_elements(
    shape: Sequence[int], cuts: Cuts, mesh: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """The rows of each dim and the elements that the fullest device holds."""
    rows = most_rows(tuple(shape), chains_of(cuts, len(shape), mesh), mesh)
    return rows, prod(rows)


def _tried(
    view: View, cuts: Cuts, mesh: tuple[int, ...], fixed: Sequence[int], unsharded: Sequence[int]
) -> Iterator[tuple[Cuts, Cuts]]:
    """Cuts of the input under which the view is free, with the output's: first those without what
    blocks it, then those that change few mesh dims.
    """
    without, found = unblocked(view, cuts, mesh, unsharded)
    yield without, found.cuts
    if not prod(view.target):
        return
    budget = Budget(BUDGET)
    start: _Carried = kinds_of(view), ()
    free = [m for m in range(len(cuts)) if m not in fixed and mesh[m] > 1]
    for changing in chain(*(combinations(free, count) for count in range(len(free) + 1))):

        def options(decided: Cuts, so_far: _Carried, changing: Any = changing) -> Sequence[Cut]:
            m = len(decided)
            cut = cuts[m]
            if m in changing:
                return _options(view, so_far[0], cut, unsharded)
            return [] if cut is not None and cut[0] in unsharded and mesh[m] > 1 else [cut]

        def add(decided: Cuts, so_far: _Carried, cut: Cut) -> _Carried | None:
            step = carry_one(view, so_far[0], cut, mesh[len(decided)])
            return None if step is None else (step[1], (*so_far[1], step[0]))

        for source, (_, output) in carried(len(cuts), options, add, start, budget):
            budget.take(min(prod(mesh), DEVICES))
            yield source, output


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
