"""Why a view is not free, and to which placements its input could be redistributed first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from cute_sharding.propagation.carry import carry, unblocked
from cute_sharding.propagation.targets import Target, free_targets, target_of
from cute_sharding.relations.view import View
from cute_sharding.sharding.chains import Cut
from cute_sharding.sharding.deal import local_size
from cute_sharding.sharding.placement import Shard

MOST = 3


def suggested_targets(
    view: View,
    cuts: Sequence[Cut],
    mesh: Sequence[int],
    *,
    fixed: Sequence[int] = (),
    unsharded: Sequence[int] = (),
    allowed: Callable[[tuple[Cut, ...]], bool] = lambda source: True,
) -> list[Target]:
    """Up to ``MOST`` cuts of the input under which ``view`` is free; at least one. The arguments
    are those of :func:`.free_targets`.

    The cuts have no split factors, and torch's own redistribution can reach them, so suggestions do
    not depend on settings.

    First come the cuts that cost least later, which may not be those that receive the least now:

    1. The input with the mesh dims that block the view replicated and the others kept. Devices that
       hold all rows receive nothing, whatever cut an op needs later. It is the view's default too.
    2. Of the others, those with blocks of equal size, then those whose output has no split factors,
       then those with new cuts only on dims that the view leaves whole, such as the batch: an
       attention or a linear layer that follows computes on these as they are. Then those that
       change fewer mesh dims, that receive less, that cut the leading dims.

    >>> from cute_sharding.relations.table import BY_OP
    >>> heads = BY_OP["Tensor.view"].view((4, 16, 32), (4, 16, 2, 16))  # 2 heads, on 4 devices
    >>> [(target.source, target.received) for target in suggested_targets(heads, [(2, 1)], (4,))]
    [((None,), 1536), (((0, 1),), 384), (((1, 1),), 384)]
    """
    cuts, mesh = tuple(cuts), tuple(mesh)

    def is_plain(source: tuple[Cut, ...]) -> bool:
        return (
            all(cut is None or cut[1] == 1 for cut in source)
            and all(
                divides_where_it_moves(view.input_shape, some, cuts, source, mesh)
                for some in (cuts, source)
            )
            and allowed(source)
        )

    found = free_targets(
        view, cuts, mesh, fixed=fixed, unsharded=unsharded, allowed=is_plain, most=None
    )
    first = unblocked(view, cuts, mesh, unsharded)
    found = sorted(found, key=lambda target: _cost_later(view, cuts, mesh, target))
    if is_plain(first):
        replicated = target_of(view, cuts, mesh, first, carry(view, first, mesh).cuts)
        found = [replicated, *(target for target in found if target.source != first)]
    return found[:MOST]


def divides_where_it_moves(
    shape: Sequence[int],
    cuts: Sequence[Cut],
    source: Sequence[Cut],
    target: Sequence[Cut],
    mesh: Sequence[int],
) -> bool:
    """Whether sizes divide evenly, in ``cuts`` (those of ``source`` or of ``target``), where a mesh
    dim moves from one tensor dim to another.

    Where they do not, torch's all-to-all pads, and its local tensor cannot be viewed.

    >>> divides_where_it_moves((7, 4), [(0, 1)], [(0, 1)], [(1, 1)], (3,))
    False
    """
    sizes = list(shape)
    for cut, before, after, parts in zip(cuts, source, target, mesh, strict=True):
        if (
            before is not None
            and after is not None
            and before != after
            and (sizes[before[0]] % parts or sizes[after[0]] % parts)
        ):
            return False
        if cut is not None:
            sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], parts, 0)
    return True


def _cost_later(
    view: View, cuts: tuple[Cut, ...], mesh: tuple[int, ...], target: Target
) -> tuple[object, ...]:
    """The sort key of :func:`suggested_targets`."""
    new = [cut for cut, before in zip(target.source, cuts) if cut not in (None, before)]
    return (
        _has_blocks_of_two_sizes(view.output_shape, target.output, mesh),
        sum(cut is not None and cut[1] > 1 for cut in target.output),
        sum(cut is not None and cut[0] not in view.kept for cut in new),
        target.cost.changed,
        target.cost,
        [-1 if cut is None else cut[0] for cut in target.source],
    )


def _has_blocks_of_two_sizes(
    shape: Sequence[int], cuts: Sequence[Cut], mesh: tuple[int, ...]
) -> bool:
    """Whether some device has fewer rows of a dim than another."""
    return any(
        n % prod(parts for cut, parts in zip(cuts, mesh) if cut is not None and cut[0] == d)
        for d, n in enumerate(shape)
    )


def parts_that_do_not_divide(
    view: View, cuts: Sequence[Cut], mesh: Sequence[int], blocked: int
) -> str | None:
    """A sentence for the error, if the view splits the cut dim into too few parts for the devices:
    into the heads of an attention, or into weights that one projection joins; None if something
    else blocks the view.

    Args:
        view, cuts, mesh: as in :func:`suggested_targets`; the sizes are numbers.
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
