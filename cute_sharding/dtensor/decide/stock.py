"""Which redistributions torch itself does rightly. (Reports say what it does and what that costs:
:mod:`..reports.stock`.)
"""

from __future__ import annotations

from math import prod

from cute_sharding.dtensor.replaced import process_groups, symints, tensor_specs


def is_torchs(spec: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch runs the redistribution of ``spec`` to ``target``: all those that a program
    without our views may reach, except those that torch is known to get wrong.

    It does not if several mesh dims shard a dim that they do not divide. If a program has flattened
    these mesh dims, torch runs one collective in place of one for each, as if the flattened mesh
    sharded the dim: 5 rows on (2, 2) are blocks of 2, 1, 1, 1 rows, and on 4 devices 2, 2, 1, 0.
    And it asks each rank's own sizes whether it may. (Whether there is such a mesh does not count
    here: it is not what a program says of the tensor.)

    It does not with _StridedShard placements, or an order of shards. For those torch searches steps
    among states that an earlier search in this process has left, which other ranks may not have; by
    each rank's own sizes, if they do not divide; and it misreads split factors that encode no
    order.
    """
    plain = symints.are_without_factors(spec.placements + target.placements)
    if not plain or tensor_specs.says_an_order(spec) or tensor_specs.says_an_order(target):
        return spec.placements == target.placements and spec.shard_order == target.shard_order
    return process_groups.is_ascending(spec.mesh) and _nests_evenly(spec) and _nests_evenly(target)


def _nests_evenly(spec: tensor_specs.DTensorSpec) -> bool:
    """Whether each dim that several mesh dims shard divides by all of these together."""
    parts: dict[int, list[int]] = {}
    for placement, n in zip(spec.placements, spec.mesh.shape):
        if isinstance(placement, tensor_specs.Shard) and n > 1:
            parts.setdefault(placement.dim, []).append(n)
    return all(
        len(some) == 1 or symints.is_truly(spec.shape[d] % prod(some) == 0)
        for d, some in parts.items()
    )


def is_torchs_alone(current: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch redistributes rightly and without a message, so that one rank alone may leave
    it to torch. torch slices the local tensor of a replica, whatever shape the spec has; programs
    that shard a local tensor over one more mesh dim (torchtitan's SimpleFSDP) rely on it.
    """
    cuts = [tensor_specs.cut_of(placement) for placement in target.placements]
    dims = [cut[0] for cut in cuts if cut is not None]
    # If several mesh dims shard a dim, its rows may have to move.
    return is_torchs(current, target) and all(
        before == after or (before.is_replicate() and (cut is None or dims.count(cut[0]) == 1))
        for before, after, cut in zip(current.placements, target.placements, cuts)
    )
