"""All ranks of a DTensor program in one process, with local tensors cut by the reference instead of by torch."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from enumeration import devices, held
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes


def ranks_of(mesh):
    """A context in which the program runs on every rank of the mesh."""
    return LocalTensorMode(prod(mesh))


@lru_cache(None)
def mesh_of(sizes, names=None):
    return DeviceMesh("cpu", torch.arange(prod(sizes)).reshape(sizes), mesh_dim_names=names)


def plain():
    """A context for the reference itself: one device, and the speed of plain tensors, also where the program runs on every rank."""
    return _disable_current_modes()


def number(shape):
    """A tensor whose elements all differ."""
    with plain():
        return torch.arange(float(prod(shape))).reshape(shape)


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


def one(full):
    return full.reconcile() if isinstance(full, LocalTensor) else full.detach()


def locals_of(full, mesh, cuts):
    """What each rank is to hold of ``full``, which may be one tensor for all or, as a dict, one for each rank (whose contributions differ)."""
    everywhere = devices(mesh)
    fulls = [one(full[rank]) for rank in range(len(everywhere))] if isinstance(full, dict) else [one(full)] * len(everywhere)
    with plain():
        return {rank: f.reshape(-1)[torch.from_numpy(held(tuple(f.shape), mesh, cuts, device))] for rank, (f, device) in enumerate(zip(fulls, everywhere, strict=True))}


def distribute(full, mesh, placements, requires_grad=False):
    """``full`` as a DTensor; a mesh dim that is Partial gives each of its devices all of it (the values then mean the sum of the copies), or its own, as for locals_of."""
    parts = LocalTensor(locals_of(full, mesh, cuts_of(placements)))
    some = full[0] if isinstance(full, dict) else full
    meta = TensorMeta(torch.Size(some.shape), torch.empty(some.shape, device="meta").stride(), some.dtype)
    return DTensor(parts, DTensorSpec(mesh_of(mesh), tuple(placements), tensor_meta=meta), requires_grad=requires_grad)


def assert_holds(tensor, full):
    """Every rank of ``tensor`` holds its slice of ``full``, or of its own ``full``, as for locals_of."""
    assert tuple(tensor.shape) == tuple((full[0] if isinstance(full, dict) else full).shape)
    mesh = tuple(tensor.device_mesh.shape)
    local = tensor._local_tensor
    for rank, expected in locals_of(full, mesh, cuts_of(tensor.placements)).items():
        got = local._local_tensors[rank]
        assert got.shape == expected.shape, f"rank {rank} of {tensor.placements}: local shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        with plain():
            assert torch.equal(got, expected), f"rank {rank} of {tensor.placements} holds other elements than its own"


def is_partial(placement):
    return isinstance(placement, Partial)
