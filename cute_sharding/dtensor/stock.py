"""What torch's own redistribution can be trusted with: an error must not suggest what would go wrong."""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.placements import Cuts, cut_of
from cute_sharding.sharding.deal import local_size


def moves_rightly(spec: compat.DTensorSpec, target: Cuts) -> bool:
    """Whether torch takes ``spec`` to ``target`` rightly, into local tensors that a view can follow on.

    - A spec that a user makes with _StridedShard placements is read as a shard order; split factors that no order has give wrong data
      (:func:`compat.decodes_to_shard_order`).
    - On a mesh of several dims torch plans each rank by the rank's own sizes. With _StridedShard placements, sizes that do not divide and mesh dims that
      share a tensor dim, ranks take different paths, and raise or wait for one another.
    - Its all-to-all leaves a local tensor that cannot be viewed where it had to pad.
    """
    source = tuple([cut_of(p) for p in spec.placements])
    mesh = tuple(spec.mesh.shape)
    if source == target:
        return True
    if len(mesh) > 1 and not compat.decodes_to_shard_order(spec):
        return False
    strided = any(cut is not None and cut[1] > 1 for cut in (*source, *target))
    wary = strided and (len(mesh) > 2 or (len(mesh) == 2 and (_nested(source) or _nested(target))))
    return all(_evenly_enough(spec.shape, cuts, source, target, mesh, wary) for cuts in (source, target))


def _nested(cuts: Cuts) -> bool:
    dims = [cut[0] for cut in cuts if cut is not None]
    return len(dims) != len(set(dims))


def _evenly_enough(shape: Sequence[int], cuts: Cuts, source: Cuts, target: Cuts, mesh: Sequence[int], wary: bool) -> bool:
    """Whether sizes divide under ``cuts`` where they must: everywhere if ``wary``, and where a mesh dim goes from one dim to another."""
    sizes = list(shape)
    for cut, before, after, parts in zip(cuts, source, target, mesh, strict=True):
        if before is not None and after is not None and before != after and (sizes[before[0]] % parts or sizes[after[0]] % parts):
            return False
        if cut is not None:
            if wary and sizes[cut[0]] % (cut[1] * parts):
                return False
            sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], parts, 0)
    return True
