"""What torch's own redistribution can be trusted with. (What it would do and cost is a report:
:mod:`..reports.stock`.)
"""

from __future__ import annotations

from cute_sharding.dtensor.replaced import process_groups, tensor_specs
from cute_sharding.dtensor.run.placements import Cuts, cut_of
from cute_sharding.propagation.suggestions import divides_where_it_moves


def moves_rightly(spec: tensor_specs.DTensorSpec, target: Cuts) -> bool:
    """Whether a redistribution of ``spec`` to ``target`` that is left to torch where it can be
    (:func:`is_torchs`) gives local tensors that a view can follow on: torch's all-to-all leaves one
    that cannot be viewed where it had to pad.
    """
    source = tuple([cut_of(p) for p in spec.placements])
    mesh = tuple(spec.mesh.shape)
    strided = any(cut is not None and cut[1] != 1 for cut in (*source, *target))
    return (
        source == target
        or (len(mesh) > 1 and strided)
        or all(
            divides_where_it_moves(spec.shape, cuts, source, target, mesh)
            for cuts in (source, target)
        )
    )


def is_torchs(spec: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch is to move ``spec`` to ``target``, by itself: all that a program without our
    views may come to, but for what torch is known to get wrong.

    With _StridedShard placements, or an order of shards, on a mesh of several dims it is not.
    torch searches there for its steps, among states that an earlier search of this process has
    left, which other ranks may not have; by each rank's own sizes, where these do not divide; and
    it misreads split factors that encode no order.
    """
    specs = spec, target
    strided = any(map(tensor_specs.split_factors, specs))
    if spec.mesh.ndim > 1 and (strided or any(map(tensor_specs.says_an_order, specs))):
        return spec.placements == target.placements and spec.shard_order == target.shard_order
    if not process_groups.is_ascending(spec.mesh):
        return False
    made_here = strided and any(
        tensor_specs.split_factors(some) and not some.use_strided_shard_as_shard_order
        for some in specs
    )
    return not made_here or moves_rightly(spec, tuple([cut_of(p) for p in target.placements]))


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
