"""Why a view that splits a sharded dim into parts is not free."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cute_sharding.propagation.carry import carry
from cute_sharding.relations.view import View
from cute_sharding.sharding.chains import Cut
from cute_sharding.sharding.placement import Shard


def parts_that_do_not_divide(
    view: View, cuts: Sequence[Cut], mesh: Sequence[int], blocked: int
) -> str | None:
    """A sentence for people, if the view splits the cut dim into too few parts for the devices:
    into the heads of an attention, or into weights that one projection joins; None if something
    else blocks the view.

    Args:
        view, cuts, mesh: as in :func:`.carry`; the sizes are numbers.
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
