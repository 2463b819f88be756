"""Redistributions with the view flag alone on a mesh of which a program has flattened some dims."""

import random
from itertools import combinations
from math import prod

import pytest
import torch
from simulation import assert_holds, distribute, is_partial, number, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import cute_sharding


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_plain_placements(mesh):
    """torch runs one collective on the flattened mesh in place of one for each of its mesh dims."""
    rng, terms = random.Random(f"flattened {mesh}"), 72
    with ranks_of(mesh):
        ranks, named = torch.arange(prod(mesh)).reshape(mesh), tuple("xyz"[: len(mesh)])
        flattened = DeviceMesh("cpu", ranks, mesh_dim_names=named)
        for k in range(2, len(mesh) + 1):
            for names in combinations(flattened.mesh_dim_names, k):
                flattened[names]._flatten("_".join(names))
        with cute_sharding.enabled():
            for _ in range(60):
                shape = rng.choice([(5, 3), (4, 6), (0, 3), (1, 1), (8, 12), (7, 9)])
                reduction = rng.choice(["sum", "avg", "max"])
                before, after = (
                    [
                        rng.choice([Replicate(), Shard(0), Shard(0), Shard(1), *pending])
                        for _ in mesh
                    ]
                    for pending in ([Partial(reduction)], [])
                )
                parts = prod(
                    n for n, p in zip(mesh, before) if reduction == "sum" and is_partial(p)
                )
                x = distribute(number(shape) * terms / parts, mesh, before)
                x = DTensor(
                    x._local_tensor,
                    DTensorSpec(flattened, tuple(before), x._spec.tensor_meta),
                    requires_grad=False,
                )
                assert_holds(x.redistribute(placements=after), number(shape) * terms)
