"""Tensors whose _StridedShard placements encode an order of mesh dims that is not left to right."""

from simulation import distribute
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

MESH = (4, 2)
PLACEMENTS = [_StridedShard(0, split_factor=2), Shard(0)]  # mesh dim 1 first, then mesh dim 0


def laid(full):
    """As fully_shard over tensor parallelism lays it out."""
    return distribute(full, MESH, PLACEMENTS)
