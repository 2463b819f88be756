"""Tensors whose _StridedShard placements can be read in two ways."""

from itertools import product

import torch
from simulation import distribute, mesh_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cute_sharding.sharding.meeting import rows

MESH = (4, 2)
PLACEMENTS = [
    _StridedShard(0, split_factor=2),
    Shard(0),
]  # read as an order: mesh dim 1 first, then mesh dim 0


def laid(full, by_order):
    """What fully_shard over tensor parallelism lays out (mesh dim 1, then 0), or distribute_tensor
    (left to right).
    """
    if not by_order:
        return distribute(full, MESH, PLACEMENTS)
    parts = {}
    for rank, (a, b) in enumerate(product(range(4), range(2))):
        parts[rank] = torch.cat(
            [full[start:stop] for start, stop in rows(len(full), [(1, 2, b), (1, 4, a)])]
            or [full[:0]]
        )
    return DTensor.from_local(
        LocalTensor(parts),
        mesh_of(MESH),
        PLACEMENTS,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
