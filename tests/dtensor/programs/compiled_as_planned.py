"""Training steps whose loss may be compiled."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import cute_sharding
from cute_sharding import planned

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WIDTH = 32


def mlp(h, up, down):
    return F.linear(F.gelu(F.linear(h, up)), down)


def modulated(x, condition, scales, up, down):
    """A block of a diffusion transformer: what is small and sharded meets what is large."""
    scale, shift, gate = F.linear(F.silu(condition), scales).unsqueeze(1).chunk(3, -1)
    h = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
    return (x + gate * mlp(h, up, down)).square().mean()


def checkpointed(x, condition, scales, up, down):
    """A residual that is run again for the gradient."""
    h = F.layer_norm(x + condition.unsqueeze(1), (WIDTH,))
    y = checkpoint(mlp, h, up, down, use_reentrant=False)
    return (y / (1 + y.norm(dim=-1, keepdim=True)) * scales.mean()).sum()


BODIES = [modulated, checkpointed]
# Shape and placements of inputs and of weights; of weights the cut of the second mesh dim.
GIVEN = [((8, 4, WIDTH), (S0, R)), ((8, WIDTH), (S0, R))]
WEIGHTS = [((3 * WIDTH, WIDTH), S0), ((4 * WIDTH, WIDTH), S0), ((WIDTH, 4 * WIDTH), S1)]


def elements(shape):
    drawn = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=drawn) / shape[-1] ** 0.5


def step_of(body, backend=None, dynamic=None):
    """A step of AdamW, as ``plan_step`` takes it. ``step.weights`` are the weights."""
    loss_of = body
    if backend is not None:
        loss_of = torch.compile(body, backend=backend, fullgraph=True, dynamic=dynamic)

    def made(mesh):
        def placed(shape, placements):
            x = elements(shape)
            return x if mesh is None else distribute_tensor(x, mesh, list(placements))

        given = [placed(*each) for each in GIVEN]
        weights = [torch.nn.Parameter(placed(shape, (R, cut))) for shape, cut in WEIGHTS]
        optimizer = torch.optim.AdamW(weights, lr=1e-2)

        def step():
            loss_of(*given, *weights).backward()
            optimizer.step()
            optimizer.zero_grad()

        step.weights = weights
        return step

    return made


def compare(name, backend, path):
    """Four steps, compiled and planned, on processes, beside one device: three in one block, and
    one in another.
    """
    body = next(body for body in BODIES if body.__name__ == name)
    alone = step_of(body)(None)
    for _ in range(4):
        alone()
    with cute_sharding.enabled(redistribution=True, movement=True):
        step = step_of(body, backend)(init_device_mesh("cpu", (2, 2)))
        with planned(path):
            step(), step(), step()
        with planned(path):
            step()
        for found, wanted in zip(step.weights, alone.weights):
            assert_close(found.detach().full_tensor(), wanted.detach(), rtol=1e-4, atol=1e-5)
