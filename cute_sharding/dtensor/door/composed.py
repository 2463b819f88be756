"""The placements of a parameter that fully_shard shards once more, over tensor parallelism.

fully_shard takes chunks of each device's *local* tensor, so its mesh dim cuts what the mesh dims of
tensor parallelism left: the chain of cuts of the parameter, and one more at its end. It stands to
the left of those mesh dims, and DTensor's placements apply from left to right. torch labels it
``_StridedShard``, with the number of shards that tensor parallelism makes. That is right if these
are plain shards; it is not for a weight of fused parts, of which each device has a piece of every
part. With 12 rows, two parts and two devices on each mesh dim::

    tp=0 has rows 0 1 2 6 7 8       dp=0: 0 1 2   dp=1: 6 7 8       [Shard(0), Shard(0)]
    tp=1 has rows 3 4 5 9 10 11     dp=0: 3 4 5   dp=1: 9 10 11

The layout of these cuts, read back as placements, is exact where there are such placements. With
three parts, dp=0 has one part and a half: no placements say that, and the mesh dim is marked as one
that shards last (:func:`..replaced.tensor_specs.is_last`).
"""

from __future__ import annotations

from math import prod

from cute_sharding.dtensor.door.cuts import sizes_of_devices
from cute_sharding.dtensor.replaced import symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, StridedShard
from cute_sharding.dtensor.run.placements import chains_of_spec, hold_the_same, placement_of, text
from cute_sharding.layout import LayoutError
from cute_sharding.sharding import Sharding
from cute_sharding.sharding.digits import layout_of
from cute_sharding.sharding.rows import Chains

__all__ = ["sharded_again"]


def sharded_again(whole: DTensorSpec, composed: DTensorSpec, m: int, dim: int) -> DTensorSpec:
    """``composed``, torch's spec of a parameter whose local tensors under ``whole`` are taken in
    chunks of tensor dim ``dim`` over its mesh dim ``m``; with other placements if torch's are of
    other rows.

    Raises:
        NotImplementedError: the parameter is sharded in an order that no placements have; or its
            dim, which is not the first, does not divide on some device: torch raises there alone.
    """
    shape, mesh = tuple(whole.shape), tuple(composed.mesh.shape)
    if symints.is_symbolic(shape) or not tensor_specs.are_known(composed.placements):
        return composed
    uneven = [n for n in sizes_of_devices(whole)[dim] if dim and n % mesh[m]]
    if uneven:
        raise NotImplementedError(
            f"fully_shard cannot shard dim {dim} of a parameter of shape {shape} with placements "
            f"{text(whole.placements)}: some rank has a local size of {uneven[0]}, which "
            f"{mesh[m]} does not divide. Only dim 0 may be uneven"
        )
    chains = _chains(whole, composed, m, dim)
    for found in _described(composed, m, dim, chains):
        if hold_the_same(shape, mesh, chains_of_spec(found), chains):
            return found
    raise NotImplementedError(
        f"fully_shard cannot shard dim {dim} of a parameter of shape {shape} with placements "
        f"{text(whole.placements)}, because these are applied in another order than from left to "
        "right. Shard another dim, such as with shard_placement_fn=lambda p: Shard(1), or "
        "redistribute the parameter first"
    )


def _chains(whole: DTensorSpec, composed: DTensorSpec, m: int, dim: int) -> Chains:
    """The cuts of the parameter on the mesh of ``composed``."""
    names, of_whole = composed.mesh.mesh_dim_names, whole.mesh.mesh_dim_names
    assert names is not None and of_whole is not None  # torch joins the two meshes by their names
    chains = [[(names.index(of_whole[k]), f) for k, f in some] for some in chains_of_spec(whole)]
    if composed.mesh.shape[m] > 1:
        chains[dim].append((m, 1))
    return tuple(map(tuple, chains))


def _described(composed: DTensorSpec, m: int, dim: int, chains: Chains) -> list[DTensorSpec]:
    """Specs that may have these cuts: torch's own first, then one with placements that torch knows,
    then the one that marks the mesh dim as the last.
    """
    shape, mesh = tuple(composed.shape), tuple(composed.mesh.shape)
    cutting = [k for k, _ in chains[dim]]
    found = [composed]
    try:
        cuts = Sharding.read(layout_of(shape, chains, mesh), shape).cuts
    except LayoutError:
        pass
    else:
        read = dict(enumerate(composed.placements)) | {k: placement_of(cuts[k]) for k in cutting}
        found.append(DTensorSpec(composed.mesh, (*read.values(),), composed.tensor_meta))
    shards = prod(mesh[k] for k in cutting if k != m)
    last = list(composed.placements)
    last[m] = StridedShard(dim, split_factor=-shards)
    return [*found, DTensorSpec(composed.mesh, tuple(last), composed.tensor_meta)]
