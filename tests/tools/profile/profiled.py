"""A program whose communication is known, for tests of what is said of it."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

ON = {"redistribution": True, "movement": True}


def tensor(mesh, shape, dim):
    local = list(shape)
    local[dim] //= 4
    return DTensor.from_local(torch.ones(local), mesh, [Shard(dim)])


def program(x):
    y = x.redistribute(placements=[Replicate()])  # asked for
    z = x[1:5]  # a slice of the sharded dim
    v = x.view(48)  # a view that is free with views, and in PyTorch
    return y, z, v
