"""Views that are refused, and what their errors suggest."""

from math import prod

import pytest
from simulation import distribute, mesh_of, placements_of, ranks_of
from torch import arange
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


def refuse(shape, target, mesh, cuts, names=None):
    with ranks_of(mesh):
        tensor = distribute(arange(float(prod(shape))).reshape(shape), mesh, placements_of(cuts))
        if names:
            tensor = type(tensor).from_local(
                tensor.to_local(),
                mesh_of(mesh, names),
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        refusing = cute_sharding.enabled(implicit_redistribution="error")
    with refusing, pytest.raises(RuntimeError) as error:
        tensor.view(target)
    return str(error.value)


def suggestions(message):
    known = {
        "Shard": Shard,
        "_StridedShard": _StridedShard,
        "Replicate": Replicate,
        "Partial": Partial,
    }
    lines = [
        line.split(".redistribute(placements=")[1].split(")  then")[0]
        for line in message.splitlines()
        if ".redistribute(placements=" in line
    ]
    return [eval(line, known) for line in lines]
