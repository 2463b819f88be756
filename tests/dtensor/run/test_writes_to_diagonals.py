"""Writes to diagonals that are copies, of matrices cut in any way: what they are of has them."""

import itertools
import random

import pytest
import torch
from simulation import assert_holds, distribute, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

DRAWN = 12


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (4,)], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (4, 4), (7, 3), (3, 5, 4), (8, 8)], ids=str)
def test_a_diagonal_is_written_to(shape, mesh):
    kinds = [Replicate()]
    for d in range(len(shape)):
        kinds += [Shard(d), _StridedShard(d, split_factor=2)]
    cases = [*itertools.product(itertools.product(kinds, repeat=len(mesh)), (0, 1, -1))]
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for placements, offset in random.Random(f"{shape} {mesh}").sample(
        cases, min(DRAWN, len(cases))
    ):
        expected = full.clone()
        expected.diagonal(offset).add_(100.0)
        with ranks_of(mesh), cute_sharding.enabled(redistribution=True, movement=True):
            x = distribute(full, mesh, placements)
            diagonal = x.diagonal(offset)
            everywhere = [Replicate()] * len(mesh)
            assert_holds(diagonal.redistribute(placements=everywhere), full.diagonal(offset))
            diagonal.add_(100.0)
            assert_holds(x.redistribute(placements=everywhere), expected)
            assert_holds(diagonal.redistribute(placements=everywhere), expected.diagonal(offset))
