"""Steps that tests plan, in a process of their own."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def few_rows(mesh):
    """Two large weights that each device has whole, and few rows of which it has a part."""

    def weight(*shape):
        x = distribute_tensor(torch.randn(shape), mesh, [Replicate()])
        return torch.nn.Parameter(x)

    up, down = weight(64, 16), weight(16, 64)
    optimizer = torch.optim.AdamW([up, down])
    x = distribute_tensor(torch.randn(4, 16), mesh, [Shard(0)])

    def step():
        F.linear(F.gelu(F.linear(x, up)), down).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def many_weights(mesh):
    """Data parallel: each gradient is pending until AdamW reads them all, as lists on GPUs."""

    def weight(*shape):
        x = distribute_tensor(torch.randn(shape), mesh, [Replicate()])
        return torch.nn.Parameter(x)

    layers = [weight(16, 16) for _ in range(6)]
    optimizer = torch.optim.AdamW(layers)
    x = distribute_tensor(torch.randn(64, 16), mesh, [Shard(0)])

    def step():
        h = x
        for layer in layers:
            h = h + F.gelu(F.linear(h, layer))
        h.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def no_step(mesh):
    few_rows(mesh)()
