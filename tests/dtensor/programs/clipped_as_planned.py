"""Training steps of a small language model, with clipped gradients and AdamW on lists."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import cute_sharding
from cute_sharding import planned

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WIDTH, HEADS, WORDS, ROWS, LONG = 16, 2, 24, 4, 6
# The cut of the second mesh dim.
WEIGHTS = {
    "words": ((WORDS, WIDTH), S0),
    "scale": ((WIDTH,), R),
    "shift": ((WIDTH,), R),
    "qkv": ((3 * WIDTH, WIDTH), S0),
    "out": ((WIDTH, WIDTH), S1),
    "up": ((4 * WIDTH, WIDTH), S0),
    "down": ((WIDTH, 4 * WIDTH), S1),
    "bias": ((WIDTH,), R),
}


def training(mesh):
    """On one device without a mesh."""
    drawn = torch.Generator().manual_seed(0)

    def placed(x, placements):
        return x if mesh is None else distribute_tensor(x, mesh, placements[-mesh.ndim :])

    weights = {
        name: torch.nn.Parameter(placed(torch.randn(shape, generator=drawn) / 4, (R, cut)))
        for name, (shape, cut) in WEIGHTS.items()
    }
    words, wanted = (
        placed(torch.randint(0, WORDS, (ROWS, LONG), generator=drawn), (S0, R)) for _ in "xy"
    )
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, foreach=True)

    def loss(w):
        x = F.embedding(words, w["words"])
        y = F.layer_norm(x, (WIDTH,), w["scale"], w["shift"])
        parts = F.linear(y, w["qkv"]).view(ROWS, LONG, 3, HEADS, WIDTH // HEADS).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + F.linear(y.transpose(1, 2).reshape(ROWS, LONG, WIDTH), w["out"])
        x = x + F.linear(F.gelu(F.linear(x, w["up"])), w["down"], w["bias"])
        return F.cross_entropy(F.linear(x, w["words"]).flatten(0, 1), wanted.flatten())

    def step():
        loss(weights).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    step.weights = weights
    return step


def compare(sizes, path):
    """Three steps on processes, beside one device; the third receives what the plan says."""
    alone = training(None)
    alone(), alone(), alone()
    with cute_sharding.enabled(redistribution=True, movement=True):
        step = training(init_device_mesh("cpu", sizes))
        plan = cute_sharding.StepPlan.load(path)
        with planned(plan):
            step(), step()
            with cute_sharding.profile() as sent:
                step()
        for name, x in alone.weights.items():
            assert_close(step.weights[name].detach().full_tensor(), x.detach(), msg=name)
    found = [one for line in sent.lines for one in line.collectives if one.op != "barrier"]
    total = plan.totals["planned"]
    assert len(found) == total.collectives
    assert sum(one.most * one.itemsize for one in found) == total.received
