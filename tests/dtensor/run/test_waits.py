"""A rank reads what a collective brings after it has arrived: on a group whose results come late,
from threads, and are not a number until then. (Where all ranks are in one process, nothing is ever
late.)
"""

from itertools import product

import pytest
import torch
from late_group import late_meshes, ones
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

KINDS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), Partial()]


@pytest.fixture(scope="module")
def meshes():
    return late_meshes()


def assert_arrived(x, case):
    """As an op reads it, and not only a program that asks for a plain tensor."""
    local = getattr(x._local_tensor, "elem", x._local_tensor)
    is_late = local is not x._local_tensor
    assert is_late or bool((local.detach() == 1).all()), case
    assert bool((x.to_local().detach() + 0 == 1).all()), case


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dims", [1, 2])
def test_redistributions(meshes, dims):
    mesh = meshes[dims - 1]
    with cute_sharding.enabled(redistribution=True, movement=True):
        for before, after in product(KINDS, KINDS):
            if isinstance(after, Partial):
                continue
            rest = [Replicate()] * (dims - 1)
            x = ones(mesh, [before, *rest])
            assert_arrived(x.redistribute(placements=[after, *rest]), (before, after))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x[1:],
        lambda x: x.roll(1, 0),
        lambda x: x.reshape(4, 16),
        lambda x: x * x.T,
        lambda x: torch.cat([x, x]),
    ],
    ids=["slice", "roll", "view", "operands", "cat"],
)
def test_ops(meshes, op, dims):
    mesh = meshes[dims - 1]
    with cute_sharding.enabled(redistribution=True, movement=True):
        for placement in KINDS[1:4]:
            x = ones(mesh, [placement, *[Shard(1)] * (dims - 1)])
            assert_arrived(op(x), placement)
