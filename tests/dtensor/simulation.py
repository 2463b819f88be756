"""All ranks of a DTensor program in one process, with local tensors cut by the reference instead of
by torch.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from enumeration import devices, held_by_a_dtensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

import cute_sharding
from benchmarks.received import position
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.redistribute import planned_for
from cute_sharding.layout.layout import row_major


def ranks_of(mesh):
    """A context in which the program runs on every rank of the mesh."""
    return LocalTensorMode(prod(mesh))


def mesh_of(sizes, names=None):
    """A mesh with groups of all its dims together, so that whatever changes is one exchange."""
    return _mesh_of(sizes, names, dist.group.WORLD)


@lru_cache(None)
def _mesh_of(sizes, names, world):
    """Of one process group: its groups end with it."""
    mesh = DeviceMesh("cpu", torch.arange(prod(sizes)).reshape(sizes), mesh_dim_names=names)
    cute_sharding.prepare_groups(mesh)
    return mesh


def zeros_of(mesh, shape, placements):
    """A tensor of which this rank has zeros, of the sizes that torch gives its part."""
    local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    return DTensor.from_local(
        torch.zeros(local),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def plain():
    """A context for the reference itself: one device, and the speed of plain tensors, also where
    the program runs on every rank.
    """
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
    """What each rank is to hold of ``full``, which may be one tensor for all or, as a dict, one for
    each rank (whose contributions differ).
    """
    everywhere = devices(mesh)
    fulls = (
        [one(full[rank]) for rank in range(len(everywhere))]
        if isinstance(full, dict)
        else [one(full)] * len(everywhere)
    )
    with plain():
        indices = [
            torch.from_numpy(held_by_a_dtensor(tuple(f.shape), mesh, cuts, device))
            for f, device in zip(fulls, everywhere, strict=True)
        ]
        return {rank: f.reshape(-1)[index] for rank, (f, index) in enumerate(zip(fulls, indices))}


def distribute(full, mesh, placements, requires_grad=False):
    """``full`` as a DTensor, cut as for locals_of.

    A mesh dim that is Partial gives each of its devices all of it (the values then mean the sum of
    the copies), or its own.
    """
    parts = LocalTensor(locals_of(full, mesh, cuts_of(placements)))
    some = full[0] if isinstance(full, dict) else full
    meta = TensorMeta(
        torch.Size(some.shape), torch.empty(some.shape, device="meta").stride(), some.dtype
    )
    return DTensor(
        parts,
        DTensorSpec(mesh_of(mesh), tuple(placements), tensor_meta=meta),
        requires_grad=requires_grad,
    )


def planned(mesh, shape, before, after):
    """What redistributes such a tensor."""
    meta = TensorMeta(torch.Size(shape), row_major(shape), torch.float32)
    return planned_for(*[DTensorSpec(mesh, some, meta) for some in (before, after)])


def finished(tensor):
    """The tensor after what is pending has been reduced."""
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def assert_holds(tensor, full):
    """Every rank of ``tensor`` holds its slice of ``full``, or of its own ``full``, as for
    locals_of.
    """
    assert tuple(tensor.shape) == tuple((full[0] if isinstance(full, dict) else full).shape)
    mesh = tuple(tensor.device_mesh.shape)
    local = tensor._local_tensor
    for rank, expected in locals_of(full, mesh, cuts_of(tensor.placements)).items():
        got = local._local_tensors[rank]
        assert got.shape == expected.shape, (
            f"rank {rank} of {tensor.placements}: local shape {tuple(got.shape)}, not "
            f"{tuple(expected.shape)}"
        )
        with plain():
            assert torch.equal(got, expected), (
                f"rank {rank} of {tensor.placements} holds other elements than its own"
            )


@lru_cache(None)
def ranks_in(mesh):
    with torch.inference_mode(False):
        return mesh.mesh.flatten().tolist()


def assert_close(actual, expected, case):
    """Every rank holds its part of what is expected; what is pending is reduced before."""
    assert isinstance(actual, DTensor) and actual.shape == expected.shape, case
    if any(map(is_partial, actual.placements)):
        reduced = [Replicate() if is_partial(p) else p for p in actual.placements]
        with cute_sharding.enabled(redistribution=True):
            actual = actual.redistribute(placements=reduced)
    local = communication.wait_for(actual.to_local())
    mesh, ranks = tuple(actual.device_mesh.shape), ranks_in(actual.device_mesh)
    for at, part in locals_of(expected, mesh, cuts_of(actual.placements)).items():
        got = local._local_tensors[ranks[at]] if isinstance(local, LocalTensor) else local
        with plain():
            is_close = got.shape == part.shape and torch.allclose(
                got.detach(), part, rtol=1e-4, atol=1e-5, equal_nan=True
            )
            assert is_close, f"{case}: rank {ranks[at]} of {actual.placements}: {got} is not {part}"
        if got is local:
            break  # this rank alone


def is_partial(placement):
    return isinstance(placement, Partial)


@contextmanager
def watched_wire(monkeypatch):
    """For each exchange, the dtype on the wire and the elements of it that every rank is sent by
    others.
    """
    wire, all_to_all, all_gather = [], communication.all_to_all, communication.all_gather

    def from_others(ints, rank, group):
        """Of one int for each rank of the group, those of the others. The group at hand is that of
        rank 0; on a row-major mesh the others lie as it does, elsewhere.
        """
        me = position(rank, dist.get_process_group_ranks(group))
        return sum(
            n if isinstance(n, int) else n.node._local_ints[rank]
            for i, n in enumerate(ints)
            if i != me
        )

    def watched_all_to_all(buffer, receives, sends, group, **how):
        wire.append(
            (buffer.dtype, {rank: from_others(receives, rank, group) for rank in buffer._ranks})
        )
        return all_to_all(buffer, receives, sends, group, **how)

    def watched_all_gather(buffer, group, dim=0, **how):
        parts = dist.get_world_size(group)
        wire.append(
            (
                buffer.dtype,
                {
                    rank: from_others([part.numel()] * parts, rank, group)
                    for rank, part in buffer._local_tensors.items()
                },
            )
        )
        return all_gather(buffer, group, dim, **how)

    with monkeypatch.context() as patch:
        patch.setattr(communication, "all_to_all", watched_all_to_all)
        patch.setattr(communication, "all_gather", watched_all_gather)
        yield wire


def most_received(wire):
    """By the busiest rank, of all the exchanges."""
    totals = Counter()
    for _, received in wire:
        totals.update(received)
    return max(totals.values(), default=0)


def of_wrong_shape(mesh, local, full, placements):
    """The same local tensor on every rank, of a shape that is not what its placements make of
    ``full``.
    """
    parts = LocalTensor(dict.fromkeys(range(prod(mesh)), local))
    return DTensor.from_local(
        parts, mesh_of(mesh), placements, run_check=False, shape=full.shape, stride=full.stride()
    )
