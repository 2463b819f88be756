"""All ranks of a DTensor program in one process, with local tensors cut by the reference instead of by torch."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from enumeration import devices, held
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def ranks_of(mesh):
    """A context in which the program runs on every rank of the mesh."""
    return LocalTensorMode(prod(mesh))


@lru_cache(None)
def mesh_of(sizes, names=None):
    return DeviceMesh("cpu", torch.arange(prod(sizes)).reshape(sizes), mesh_dim_names=names)


def placement_of(cut):
    if cut is None:
        return Replicate()
    return Shard(cut[0]) if cut[1] == 1 else _StridedShard(cut[0], split_factor=cut[1])


def placements_of(cuts):
    return tuple(map(placement_of, cuts))


def cuts_of(placements):
    def cut(p):
        if isinstance(p, _StridedShard):
            return p.dim, p.split_factor
        return (p.dim, 1) if isinstance(p, Shard) else None

    return tuple(map(cut, placements))


def locals_of(full, mesh, cuts):
    """What each rank is to hold of ``full``."""
    flat = full.reshape(-1)
    return {rank: flat[torch.from_numpy(held(tuple(full.shape), mesh, cuts, device))] for rank, device in enumerate(devices(mesh))}


def distribute(full, mesh, placements):
    """``full`` as a DTensor; a mesh dim that is Partial gives each of its devices all of it (the values then mean the sum of the copies)."""
    parts = LocalTensor(locals_of(full, mesh, cuts_of(placements)))
    return DTensor.from_local(parts, mesh_of(mesh), placements, run_check=False, shape=full.shape, stride=full.stride())


def assert_holds(tensor, full):
    """Every rank of ``tensor`` holds its slice of ``full``."""
    assert tuple(tensor.shape) == tuple(full.shape)
    mesh = tuple(tensor.device_mesh.shape)
    local = tensor.to_local()
    for rank, expected in locals_of(full, mesh, cuts_of(tensor.placements)).items():
        got = local._local_tensors[rank]
        assert got.shape == expected.shape, f"rank {rank} of {tensor.placements}: local shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        assert torch.equal(got, expected), f"rank {rank} of {tensor.placements} holds other elements than its own"


def is_partial(placement):
    return isinstance(placement, Partial)
