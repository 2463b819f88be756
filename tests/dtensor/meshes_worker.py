"""What the processes of test_meshes.py run: training steps of parameters on several meshes, and
numbers of ranks that have none.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_

import cute_sharding

# of the optimizers, those that take a list at once and those that do not
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd one by one": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def train():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = grid["dp", "tp"]._flatten("all")
    where = [
        ((6, 4), grid["dp"], [Shard(0)]),
        ((5, 3), grid["tp"], [Shard(1)]),
        ((7,), grid["dp"], [Replicate()]),
        ((8, 4), grid, [Shard(0), Shard(1)]),
        ((8, 4), flat, [Shard(0)]),
    ]
    for flags in ({}, {"movement": True, "redistribution": True}):
        with cute_sharding.enabled(**flags):
            for name, made in OPTIMIZERS.items():
                steps(made, where, name, grid, clip_grad_norm_)
            clip = torch.compile(clip_grad_norm_, backend="aot_eager")
            steps(OPTIMIZERS["sgd"], where, "compiled", grid, clip)


def steps(made, where, case, grid, clip):
    """Three steps; the last gradient is on another mesh than its parameter."""
    torch.manual_seed(0)
    full = [torch.nn.Parameter(torch.randn(shape)) for shape, _, _ in where]
    gradients = [torch.randn(shape) for shape, _, _ in where]
    sharded = [
        torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, placements))
        for p, (_, mesh, placements) in zip(full, where, strict=True)
    ]
    optimizers = made(full), made(sharded)
    on = [each[1:] for each in where[:-1]] + [(grid, [Shard(0), Shard(0)])]
    for _ in range(3):
        for one, many, gradient, at in zip(full, sharded, gradients, on, strict=True):
            one.grad = gradient.clone()
            many.grad = distribute_tensor(gradient.clone(), *at)
        wanted, total = clip_grad_norm_(full, 1.0), clip(sharded, 1.0)
        torch.testing.assert_close(total.full_tensor(), wanted, msg=case)
        for optimizer in optimizers:
            optimizer.step()
    for one, many in zip(full, sharded, strict=True):
        torch.testing.assert_close(many.detach().full_tensor(), one.detach(), msg=case)


def numbers_of_other_ranks():
    """Ranks of the one mesh that are not on the other have no such number."""
    few, every = (DeviceMesh("cpu", torch.arange(n)) for n in (2, 4))
    with cute_sharding.enabled():
        a, b = (distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum() for mesh in (few, every))
        product = a * b  # all ranks of the one are on the other
        assert product.device_mesh == few
        assert dist.get_rank() > 1 or product.to_local() == 16
        tensor = distribute_tensor(torch.ones(4), every, [Replicate()])
        norm = torch._foreach_norm([distribute_tensor(torch.ones(4), every, [Shard(0)])])[0]
        assert any(p.is_partial() for p in norm.placements)
        for refused in (lambda: tensor * a, lambda: a * norm):
            try:
                refused()
            except RuntimeError as error:
                assert "mesh" in str(error)
            else:
                raise AssertionError("it was taken")
