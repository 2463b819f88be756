"""DTensors of local tensors that are the shards of the shape they are given, or not."""

import random
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


def drawn_shards(count):
    """Each refused by all four ranks, or read by all."""
    meshes = [init_device_mesh("cpu", sizes) for sizes in ((4,), (2, 2), (1, 4))]
    with cute_sharding.enabled():
        for seed in range(count):
            rng = random.Random(seed)
            mesh = rng.choice(meshes)
            shape = (rng.randint(1, 9), rng.randint(1, 5))
            placements = [placement(rng) for _ in range(mesh.ndim)]
            whole = torch.arange(float(prod(shape))).reshape(shape)
            local = part_of(whole, placements, mesh)
            wrong = rng.choice([None, "rows", "a rank's rows", "a rank's shape"])
            odd = dist.get_rank() == rng.randrange(4)
            given = whole
            if wrong == "rows" or (wrong == "a rank's rows" and odd):
                local = torch.cat([local, local.new_zeros(1, local.shape[1])])
            elif wrong == "a rank's shape" and odd:
                given = torch.zeros(shape[0] + 1, shape[1])
            found = None
            try:
                x = DTensor.from_local(
                    local,
                    mesh,
                    placements,
                    run_check=True,
                    shape=given.shape,
                    stride=given.stride(),
                )
            except ValueError as error:
                found = "divided as by torch.chunk" in str(error) or "same shape=" in str(error)
            every = [None] * 4
            dist.all_gather_object(every, found)
            assert every == [True if wrong else None] * 4, (seed, shape, placements, wrong, every)
            if not wrong:
                assert torch.equal(x.full_tensor(), whole), (seed, shape, placements)


def placement(rng):
    dim = rng.randrange(2)
    return rng.choice([Replicate(), Shard(dim), Shard(dim), _StridedShard(dim, split_factor=3)])


def part_of(whole, placements, mesh):
    for m, p in enumerate(placements):
        if not isinstance(p, Replicate):
            k, factor = mesh.get_coordinate()[m], getattr(p, "split_factor", 1)
            parts = []
            for piece in torch.chunk(whole, factor, p.dim):
                some = torch.chunk(piece, mesh.size(m), p.dim)
                parts.append(some[k] if k < len(some) else piece.narrow(p.dim, 0, 0))
            whole = torch.cat(parts, p.dim)
    return whole.contiguous()
