"""Shardings are carried through a view exactly; where a view is not free, why, and the cheapest
placements of its input that make it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._words import counted
from cute_sharding.exchange.placed import DEVICES, most_rows, received_elements
from cute_sharding.layout.size import is_at_most, is_multiple, is_same
from cute_sharding.propagation.solver import Budget, Cost, carried, split_factors
from cute_sharding.relations.view import View
from cute_sharding.sharding.placement import Shard
from cute_sharding.sharding.rows import (
    Cut,
    are_even,
    chains_of,
    deal,
    dim_of,
    kinds_of_device,
    local_size,
    smallest_factor,
)

# -- carry -----------------------------------------------------------------------------------------
# Shardings are carried through a view exactly, one mesh dim after the other.
#
# A view reads the same elements in the same order under another shape. Every device holds its
# elements in ascending order of index, before and after, so the output's placements are right if
# and only if each device's *set* of elements is. After the first t mesh dims, the devices that
# share t coordinates together hold the union of their sets: if the whole is right, so is every
# prefix. Hence:
#
# - mesh dims can be decided one by one from left to right, without backtracking: the set that a
#   prefix gives a device does not depend on which cuts describe it;
# - given an equal prefix, mesh dim t divides the same local tensor, once under the local input
#   shape and once under the local output shape. The two divisions are equal exactly when their
#   *deals* are (cute_sharding/sharding/rows.py), and the dim and split factor are read off the
#   deal.
#
# Devices differ only in their local shapes, of which there are few (at most five for each mesh dim,
# one where sizes divide), whatever the number of devices. The method is complete: if ``carry``
# finds no placements, none exist.

# The local (source shape, target shape) of the devices of each kind.
Kinds: TypeAlias = list[tuple[Sequence[int], Sequence[int]]]


class Carried(NamedTuple):
    """The cuts of the output, one for each mesh dim; or the first mesh dim that cannot be carried,
    and the cuts of those before it.

    Attributes:
        cuts: for the mesh dims that are carried.
        blocked: the first mesh dim that cannot be carried; None: all are carried.
        traced: some blocks may differ in size, so that each kind of device was proved by itself.
            (No graph is traced.)

    >>> from cute_sharding.relations.table import BY_OP
    >>> flatten = BY_OP["Tensor.view"].view((6, 4), (24,))
    >>> carried: Carried = carry(flatten, [(0, 1)], (3,))
    >>> carried
    Carried(cuts=((0, 1),), blocked=None, traced=False)
    >>> carry(BY_OP["Tensor.view"].view((7, 4), (28,)), [(0, 1)], (3,)).blocked
    0
    """

    cuts: tuple[Cut, ...]
    blocked: int | None = None
    traced: bool = False


def carry(view: View, cuts: Sequence[Cut], mesh: Sequence[int]) -> Carried:
    """The cuts of the view's output that hold, on every device, exactly the elements that ``cuts``
    of its input hold.

    Args:
        view: the view.
        cuts: one for each mesh dim, on the view's input dims.
        mesh: the mesh's sizes.

    The method, and why it is complete, is in docs/how-it-works.md ("The deal").

    Raises:
        Undecided: sizes are symbols, and it depends on a fact that is not known.

    >>> from cute_sharding.relations.table import BY_OP
    >>> carry(BY_OP["Tensor.view"].view((4, 6), (24,)), [(1, 1)], (2,)).cuts
    ((0, 4),)
    """
    if len(cuts) != len(mesh):
        raise ValueError(
            f"the mesh has {counted(len(mesh), 'dim')}, but the list of cuts has {len(cuts)}: give "
            "one cut for each mesh dim"
        )
    kept = view.kept
    kinds: Kinds = [(view.sizes, view.target)]
    carried: list[Cut] = []
    before: tuple[Cut, Cut, int] | None = None  # the cuts that divide the kinds next
    is_even = True  # all blocks are known to be of equal size; kept dims are not examined
    for cut, parts in zip(cuts, mesh):
        found = None
        if cut is None:
            pass
        elif cut[0] in kept:
            found, is_even = (kept[cut[0]], cut[1]), False
        elif not view.elements:
            return _carry_nothing(view, cuts, mesh)
        else:
            if before is not None:
                kinds = _divide(view, kinds, *before)
            found = _place_even(view, kinds, cut, parts)
            if found is None:
                found, is_even = _place(view, kinds, cut, parts), False
                if found is None and parts > 1:
                    return Carried(tuple(carried), len(carried), _is_traced(view, cuts, mesh))
            before = cut, found, parts
        carried.append(found)
    if is_even or before is None:
        return Carried(tuple(carried))
    return Carried(tuple(carried), None, _is_traced(view, cuts, mesh))


def unblocked(
    view: View, cuts: Sequence[Cut], mesh: Sequence[int], unsharded: Sequence[int] = ()
) -> tuple[tuple[Cut, ...], Carried]:
    """The cuts without those that block the view, removed one by one until none does, and without
    the cuts of the input dims ``unsharded``; and these carried through the view. The cuts are the
    given ones if and only if the view is free.

    >>> from cute_sharding.relations.table import BY_OP
    >>> flatten = BY_OP["Tensor.view"].view((7, 4), (28,))
    >>> unblocked(flatten, [(0, 1), (1, 1)], (3, 2))[0]
    (None, (1, 1))
    """
    cuts = tuple(
        [
            None if cut is not None and cut[0] in unsharded and n > 1 else cut
            for cut, n in zip(cuts, mesh)
        ]
    )
    while (found := carry(view, cuts, mesh)).blocked is not None:
        cuts = (*cuts[: found.blocked], None, *cuts[found.blocked + 1 :])
    return cuts, found


def _is_traced(view: View, cuts: Sequence[Cut], mesh: Sequence[int]) -> bool:
    """Whether some blocks may differ in size."""
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for cut, parts in zip(cuts, mesh):
        if cut is not None and parts > 1:
            by_dim.setdefault(cut[0], []).append((cut[1], parts))
    return not all(are_even(view.input_shape[d], some) for d, some in by_dim.items())


def kinds_of(view: View) -> Kinds:
    """The kinds of device before any mesh dim: one kind, which holds the whole tensor."""
    return [(view.sizes, view.target)]


def carry_one(view: View, kinds: Kinds, cut: Cut, parts: int) -> tuple[Cut, Kinds] | None:
    """Carry one more mesh dim, of ``parts`` devices: return its cut of the output and the kinds of
    device after it, or None if it cannot be carried.

    ``kinds`` are those after the mesh dims before it; the view must have elements.
    """
    if cut is None:
        return None, kinds
    if cut[0] in view.kept:
        return (view.kept[cut[0]], cut[1]), kinds
    found = _place_even(view, kinds, cut, parts) or _place(view, kinds, cut, parts)
    if found is None and parts > 1:
        return None
    return found, _divide(view, kinds, cut, found, parts)


def _carry_nothing(view: View, cuts: Sequence[Cut], mesh: Sequence[int]) -> Carried:
    """:func:`carry` for a tensor without elements: every placement is right, but the local shapes
    must be those that the local op makes.

    A reshape gets its local shape as an argument, so any dim will do. A kept dim stays where it is;
    a dim that is repeated or broadcast in place is carried by itself.
    """
    alone: dict[int, tuple[View, Kinds]] = {}
    carried: list[Cut] = []
    for mesh_dim, (cut, parts) in enumerate(zip(cuts, mesh, strict=True)):
        if cut is None:
            carried.append(None)
            continue
        dim, split_factor = cut
        home = view.home.get(dim)
        if dim in view.kept:
            carried.append((view.kept[dim], split_factor))
        elif home is None or not view.target[home]:
            carried.append((min(view.position(dim), view.rank - 1) if home is None else home, 1))
        else:
            n = view.input_shape[dim]
            if dim not in alone:
                single = View(
                    (n,), (None, 0), (view.target[home] // n, n), (view.target[home],), {}, {0: 0}
                )
                alone[dim] = single, kinds_of(single)
            single, kinds = alone[dim]
            step = carry_one(single, kinds, (0, split_factor), parts)
            if step is None:
                return Carried(tuple(carried), mesh_dim)
            alone[dim] = single, step[1]
            carried.append(None if step[0] is None else (home, step[0][1]))
    return Carried(tuple(carried))


def _place(view: View, kinds: Kinds, cut: tuple[int, int], parts: int) -> Cut:
    """The cut of the output with the same deal as ``cut``, on every kind of device; None if there
    is none. ``cut`` must not be of a kept dim.
    """
    at, split_factor = view.position(cut[0]), cut[1]
    if parts == 1:
        return _nearest(view, at)
    where = -1
    # deal, rows, elements below them, smallest split factor
    found: list[tuple[tuple[int, ...], int, int, int]] = []
    whole: list[Sequence[int]] = []  # local target shapes of the kinds that device 0 holds whole
    for source, target in kinds:
        dealt = deal(source[at], prod(source[at + 1 :]), split_factor, parts)
        if dealt is None:
            whole.append(target)
            continue
        dim, inner = dim_of(dealt[0], target)
        if where not in (-1, dim) or not 0 <= dim < view.rank:
            return None
        where = dim
        n = target[dim]
        smallest = smallest_factor(dealt, n, inner, parts)
        if smallest is None:
            return None
        found.append((dealt, n, inner, smallest))
    if not found:
        return _one_row(view, view.source[at], whole)
    factor = found[0][3]
    if len(kinds) == 1:
        return where, factor
    # For each kind the split factors with this deal are a range: the ranges have a common factor
    # if and only if their largest start lies in all of them.
    for other in [kind[3] for kind in found[1:]] + [target[where] for target in whole]:
        factor = max(factor, other)
    for dealt, n, inner, smallest in found:
        if not is_same(factor, smallest) and deal(n, inner, factor, parts) != dealt:
            return None
    return where, factor


def _place_even(view: View, kinds: Kinds, cut: tuple[int, int], parts: int) -> Cut:
    """:func:`_place` where the dim is dealt in blocks of one size and some target dim has pieces
    of the same length: its blocks are then equal too. None if that is not known.
    """
    at, split_factor = view.position(cut[0]), cut[1]
    source, target = kinds[0]
    if parts == 1 or len(kinds) > 1 or not is_multiple(source[at], split_factor * parts):
        return None
    piece = source[at] // split_factor * prod(source[at + 1 :])
    dim, inner = dim_of(piece, target)
    reach = inner * target[dim]
    if dim < view.rank and is_multiple(reach, piece):
        factor = reach // piece
        if is_multiple(target[dim], factor * parts):
            return dim, factor
    return None


def _one_row(view: View, dim: int | None, whole: list[Sequence[int]]) -> Cut:
    """:func:`_place` where pieces have one row, so that device 0 keeps everything: any split factor
    of at least the local size will do.
    """
    home = view.home.get(dim, -1)  # type: ignore[arg-type]
    homes = range(view.rank) if home < 0 else (home,)
    return min(
        ((home, max(target[home] for target in whole)) for home in homes),
        key=lambda cut: cut[1],
        default=None,
    )


def _nearest(view: View, at: int) -> Cut:
    """The cut to report for a mesh dim of one device. Any dim is right; we take the one that starts
    where the source dim starts.
    """
    reach = prod(view.sizes[at:])
    best: Cut = None
    for dim in range(view.rank):
        if is_at_most(reach, prod(view.target[dim:])):
            best = (dim, 1)
    return best


def _divide(view: View, kinds: Kinds, cut: Cut, found: Cut, parts: int) -> Kinds:
    """The kinds of device after a mesh dim deals ``cut`` of the source and ``found`` of the target
    alike; kinds that hold nothing are left out.

    A kept dim has the same place among the other dims before and after. Its local size is a factor
    in all deals of the dims before it, so it cannot make two deals differ.
    """
    if cut is None or found is None or parts == 1:
        return kinds
    at, split_factor = view.position(cut[0]), cut[1]
    dim, factor = found
    if len(kinds) == 1 and is_multiple(kinds[0][0][at], split_factor * parts):
        alike, alike_target = map(list, kinds[0])
        alike[at] //= parts
        alike_target[dim] //= parts
        return [(alike, alike_target)]
    result: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for source, target in kinds:
        n, m = source[at], target[dim]
        for device in kinds_of_device(n, split_factor, parts):
            new_source, new_target = list(source), list(target)
            new_source[at] = local_size(n, split_factor, parts, device)
            new_target[dim] = local_size(m, factor, parts, device)
            if new_source[at]:
                result.setdefault((*new_source, *new_target), (new_source, new_target))
    return list(result.values())


# -- targets ---------------------------------------------------------------------------------------
# The cheapest placements of the input that make a view free.

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


# -- splits ----------------------------------------------------------------------------------------
# Why a view that splits a sharded dim into parts is not free.


def parts_that_do_not_divide(
    view: View, cuts: Sequence[Cut], mesh: Sequence[int], blocked: int
) -> str | None:
    """A sentence for people, if the view splits the cut dim into too few parts for the devices:
    into the heads of an attention, or into weights that one projection joins; None if something
    else blocks the view.

    Args:
        view, cuts, mesh: as in :func:`.views`; the sizes are numbers.
        blocked: the mesh dim that blocks the view.

    >>> from cute_sharding.relations.table import BY_OP
    >>> heads = BY_OP["Tensor.view"].view((4, 16, 32), (4, 16, 2, 16))
    >>> parts_that_do_not_divide(heads, [(2, 1)], (4,), 0).partition(": ")[2]
    'in attention, the heads do not divide by the mesh'
    >>> fused = BY_OP["Tensor.view"].view((4, 16, 192), (4, 16, 3, 4, 16))
    >>> parts_that_do_not_divide(fused, [(2, 1)], (4,), 0).partition(": ")[2]
    'if 3 weights are joined in the dim, shard each of them: _S(2,3) makes the view free'
    """
    cut = cuts[blocked]
    if cut is None:
        return None
    dim, pieces = cut
    parts = split = _split_of(view, dim)
    while pieces > 1 and len(parts) > 1 and pieces % parts[0] == 0:
        pieces, parts = pieces // parts[0], parts[1:]  # queries, keys and values in one projection
    devices = prod(n for other, n in zip(cuts, mesh) if other is not None and other[0] == dim)
    if pieces > 1 or len(parts) < 2 or parts[0] % devices == 0:
        return None
    shards = (dim, cut[1] * parts[0])
    of_each = [*cuts[:blocked], shards, *cuts[blocked + 1 :]]
    if len(parts) > 2 and carry(view, of_each, mesh).blocked is None:
        remedy = (
            f"if {parts[0]} weights are joined in the dim, shard each of them: {Shard(*shards)} "
            "makes the view free"
        )
    else:
        remedy = "in attention, the heads do not divide by the mesh"
    return (
        f"dim {dim} of {view.input_shape[dim]} is split into {' x '.join(map(str, split))}, and "
        f"{parts[0]} is no multiple of the {devices} devices that shard it: {remedy}"
    )


def _split_of(view: View, dim: int) -> list[int]:
    """The sizes above 1 of the output dims that the input dim is split into; empty if some of them
    take part of other input dims as well.
    """
    at = view.position(dim)
    start, n = prod(view.sizes[:at]), view.sizes[at]
    starts = [prod(view.target[:k]) for k in range(len(view.target))]
    found = [
        size
        for size, first in zip(view.target, starts)
        if size > 1 and start <= first and first * size <= start * n
    ]
    return found if prod(found) == n else []
