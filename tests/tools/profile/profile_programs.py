"""Drawn programs, forward and backward, on rank 0 of meshes of which the others are made up."""

import stranger_programs
import torch
from torch.distributed.tensor import DTensor, Shard


def distributed(full, mesh, placements):
    """Rank 0's part, of zeros."""
    shape = list(full.shape)
    for m, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // mesh.size(m))
    local = torch.zeros(shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    ).requires_grad_()


def run_as_far_as_it_goes(seed, meshes):
    """``meshes``: by their sizes. PyTorch refuses some ops."""
    sizes, shape, placements, rng = stranger_programs.draw_program(seed)
    mesh, full = meshes[sizes], torch.zeros(shape)
    try:
        y = distributed(full, mesh, placements)
        for _ in range(3):
            step = stranger_programs.draw_step(rng, tuple(y.shape))
            y = stranger_programs.run_step(
                y, step, lambda part, to: distributed(part, mesh, to[: mesh.ndim])
            )
        y.sum().full_tensor().backward()
    except (RuntimeError, IndexError, NotImplementedError):
        pass
