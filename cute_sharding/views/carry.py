"""Carrying shardings through a view, mesh dim by mesh dim, exactly.

Let a view read the same elements, in the same order, under another shape. Every device's elements are in ascending order of
their index, before and after, so placements of the output are right if and only if each device's *set* of elements is. And after the first t mesh
dims, the set held by the devices that share t coordinates is the union over the rest: if the whole is right, so is every prefix. Hence:

- mesh dims can be decided one by one, left to right, with no way back: what a prefix holds does not depend on how it was said;
- given an equal prefix, mesh dim t divides the same local tensor, once under the local input shape and once under the local output shape.
  So its two divisions are equal exactly when their *deals* are (cute_sharding/sharding/deal.py), and the dim and split factor are read off the deal.

Devices differ only in their local shapes, of which there are few (at most five a mesh dim, one where sizes divide), whatever the number of devices.
The outcome is complete: where :func:`carry` finds no placements, none exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding.sharding.deal import deal, dim_of, kinds_of_device, local_size, split_factors
from cute_sharding.views.view import View

# What a mesh dim does to a tensor: (dim, split factor), or None where it leaves the tensor whole (Replicate, Partial).
Cut: TypeAlias = "tuple[int, int] | None"

# The local (source shape, target shape) of the devices of each kind.
Kinds: TypeAlias = list[tuple[list[int], list[int]]]


class Carried(NamedTuple):
    """The cuts of the output, one a mesh dim; or the first mesh dim that cannot be carried, and the cuts of those before it."""

    cuts: tuple[Cut, ...]
    blocked: int | None = None
    traced: bool = False  # sizes do not divide: proved for each kind of device


def carry(view: View, cuts: Sequence[Cut], mesh: Sequence[int]) -> Carried:
    """The cuts of the view's output that hold, on every device, exactly the elements that ``cuts`` of its input hold.

    Args:
        view: the view.
        cuts: one for each mesh dim, on the view's input dims.
        mesh: the mesh's sizes.
    """
    kept = view.kept
    for cut in cuts:
        if cut is not None and cut[0] not in kept:
            break
    else:  # every sharded dim is left whole: nothing to decide
        return Carried(tuple([None if cut is None else (kept[cut[0]], cut[1]) for cut in cuts]))

    if not prod(view.target):
        return _carry_nothing(view, cuts, mesh)

    kinds = kinds_of(view)
    carried: list[Cut] = []
    traced = False
    for mesh_dim, (cut, parts) in enumerate(zip(cuts, mesh, strict=True)):
        if cut is not None:
            traced = traced or kinds[0][0][view.position[cut[0]]] % (cut[1] * parts) != 0
        step = carry_one(view, kinds, cut, parts)
        if step is None:
            return Carried(tuple(carried), mesh_dim, traced)
        found, kinds = step
        carried.append(found)
    return Carried(tuple(carried), None, traced)


def kinds_of(view: View) -> Kinds:
    """The kinds of device before any mesh dim: one, that holds the whole tensor."""
    return [(list(view.sizes), list(view.target))]


def carry_one(view: View, kinds: Kinds, cut: Cut, parts: int) -> tuple[Cut, Kinds] | None:
    """Carry one more mesh dim, of ``parts`` devices: its cut of the output and the kinds of device after it, or None where it cannot be carried.

    ``kinds`` are those that the mesh dims before it leave; the view has elements.
    """
    if cut is None:
        return None, kinds
    dim, split_factor = cut
    at = view.position[dim]
    found: Cut
    if dim in view.kept:
        found = (view.kept[dim], split_factor)
    elif parts == 1:
        found = _nearest(view, at)
    else:
        found = _place(view, kinds, at, split_factor, parts)
        if found is None:
            return None
    return found, kinds if found is None or parts == 1 else _divided(kinds, at, split_factor, *found, parts)


def _carry_nothing(view: View, cuts: Sequence[Cut], mesh: Sequence[int]) -> Carried:
    """:func:`carry` for a tensor without elements: every placement is right, but local shapes must still be those that the local op makes.

    A reshape is told its local shape, so any dim will do. A dim kept stays as it is, and one that is repeated or broadcast in place is carried by itself.
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
            carried.append((min(view.position[dim], view.rank - 1) if home is None else home, 1))
        else:
            n = view.input_shape[dim]
            if dim not in alone:
                single = View((n,), (None, 0), (view.target[home] // n, n), (view.target[home],), {}, {0: 0})
                alone[dim] = single, kinds_of(single)
            single, kinds = alone[dim]
            step = carry_one(single, kinds, (0, split_factor), parts)
            if step is None:
                return Carried(tuple(carried), mesh_dim)
            alone[dim] = single, step[1]
            carried.append(None if step[0] is None else (home, step[0][1]))
    return Carried(tuple(carried))


def _place(view: View, kinds: Kinds, at: int, split_factor: int, parts: int) -> Cut:
    """The output dim and split factor that deal as source dim ``at`` does, on every kind of device."""
    where = -1
    first, last = 1, None
    whole: list[list[int]] = []  # local target shapes of the kinds that device 0 holds whole
    for source, target in kinds:
        dealt = deal(source[at], prod(source[at + 1 :]), split_factor, parts)
        if dealt is None:
            whole.append(target)
            continue
        dim = dim_of(dealt, target)
        if where not in (-1, dim) or dim >= view.rank:
            return None
        where = dim
        factors = split_factors(dealt, target[dim], prod(target[dim + 1 :]), parts)
        if factors is None:
            return None
        first = max(first, factors[0])
        last = factors[1] if last is None else min(last, factors[1])
    if whole:
        # Device 0 keeps everything where pieces have one row: a split factor of at least the local size.
        if where < 0:
            home = view.home.get(view.source[at], -1)  # type: ignore[arg-type]
            if home >= 0:
                return home, max(target[home] for target in whole)
            return min(((dim, max(target[dim] for target in whole)) for dim in range(view.rank)), key=lambda cut: cut[1], default=None)
        first = max(first, *(target[where] for target in whole))
    if last is not None and first > last:
        return None
    return where, first


def _nearest(view: View, at: int) -> Cut:
    """Where to say that a mesh dim of one device shards: anywhere is right; the dim that starts where the source dim starts reads best."""
    reach = prod(view.sizes[at:])
    best: Cut = None
    for dim in range(view.rank):
        if prod(view.target[dim:]) >= reach:
            best = (dim, 1)
    return best


def _divided(kinds: Kinds, at: int, split_factor: int, dim: int, factor: int, parts: int) -> Kinds:
    """The kinds of device after a mesh dim deals source dim ``at`` and target dim ``dim`` out alike; kinds that hold nothing are left out."""
    result: Kinds = []
    for source, target in kinds:
        n, m = source[at], target[dim]
        for device in kinds_of_device(n, split_factor, parts):
            new_source, new_target = source.copy(), target.copy()
            new_source[at] = local_size(n, split_factor, parts, device)
            new_target[dim] = local_size(m, factor, parts, device)
            if new_source[at] and (new_source, new_target) not in result:
                result.append((new_source, new_target))
    return result
