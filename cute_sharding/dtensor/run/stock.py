"""What torch's own redistribution can be trusted with. (What it would do and cost is a report:
:mod:`..reports.stock`.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cute_sharding.dtensor.replaced import process_groups, tensor_specs
from cute_sharding.dtensor.run.placements import Cuts, cut_of
from cute_sharding.redistribution.suggestions import divides_where_it_moves


def moves_rightly(spec: tensor_specs.DTensorSpec, target: Cuts) -> bool:
    """Whether torch takes ``spec`` to ``target`` rightly, into local tensors that a view can follow
    on.

    - A spec that a user makes with _StridedShard placements is read as a shard order; split factors
      that no order has give wrong data (:func:`tensor_specs.decodes_to_shard_order`).
    - On a mesh of several dims torch plans each rank by the rank's own sizes. With _StridedShard
      placements, sizes that do not divide and mesh dims that share a tensor dim, ranks take
      different paths, and raise or wait for one another.
    - Its all-to-all leaves a local tensor that cannot be viewed where it had to pad.
    """
    source = tuple([cut_of(p) for p in spec.placements])
    mesh = tuple(spec.mesh.shape)
    if source == target:
        return True
    if len(mesh) > 1 and not tensor_specs.decodes_to_shard_order(spec):
        return False
    strided = any(cut is not None and cut[1] > 1 for cut in (*source, *target))
    wary = strided and (len(mesh) > 2 or (len(mesh) == 2 and (_nested(source) or _nested(target))))
    return all(
        divides_where_it_moves(spec.shape, cuts, source, target, mesh, everywhere=wary)
        for cuts in (source, target)
    )


def is_torchs(spec: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch is to move ``spec`` to ``target``, by itself: all that a program without our
    views may come to, but for what torch is known to get wrong; and what it gets right of the rest.
    """
    strided = tensor_specs.split_factors(spec) or tensor_specs.split_factors(target)
    if not strided and process_groups.is_ascending(spec.mesh):
        return True  # by far the most redistributions
    return _is_torchs(spec.mesh, tuple(spec.shape), *(_key(s) for s in (spec, target)))


def is_torchs_alone(current: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch does it rightly and without a message, so that a rank may leave it to torch by
    itself. Of what is replicated torch cuts the local tensor, whatever the spec says of its shape:
    programs that shard a local tensor over one more mesh dim (torchtitan's SimpleFSDP) rely on it.
    """
    cuts = [tensor_specs.cut_of(placement) for placement in target.placements]
    dims = [cut[0] for cut in cuts if cut is not None]
    # A dim that is cut over several mesh dims may have to be dealt anew.
    return is_torchs(current, target) and all(
        before == after or (before.is_replicate() and (cut is None or dims.count(cut[0]) == 1))
        for before, after, cut in zip(current.placements, target.placements, cuts)
    )


def _key(spec: tensor_specs.DTensorSpec) -> tuple[Any, ...]:
    return (
        spec.mesh,
        tuple(spec.placements),
        spec.use_strided_shard_as_shard_order,
        spec.shard_order,
    )


@lru_cache(maxsize=1 << 12)
def _is_torchs(
    mesh: Any, shape: tuple[int, ...], source: tuple[Any, ...], target: tuple[Any, ...]
) -> bool:
    specs = []
    for on, placements, as_order, order in (source, target):
        spec = tensor_specs.DTensorSpec(on, placements, None, order, as_order)
        if on != mesh or tensor_specs.says_an_order(spec):
            return True
        specs.append(tensor_specs.with_shape(spec, shape))
    if not process_groups.is_ascending(mesh):
        return False
    made_here = any(
        tensor_specs.split_factors(spec) and not spec.use_strided_shard_as_shard_order
        for spec in specs
    )
    if len(mesh.shape) > 1 and not all(map(tensor_specs.decodes_to_shard_order, specs)):
        return source == target
    if made_here:
        return moves_rightly(specs[0], tuple([cut_of(p) for p in specs[1].placements]))
    return True


def _nested(cuts: Cuts) -> bool:
    dims = [cut[0] for cut in cuts if cut is not None]
    return len(dims) != len(set(dims))
