"""Where a language model communicates.

python examples/profile_model.py            # PyTorch alone
python examples/profile_model.py --on       # with cute_sharding

One process stands for four: the process group is a made-up one, which sends nothing, so values are
not right and seconds are not measured on a network. What is sent, and for which line, is right. In
a program of yours: the same ``with`` block around a step, on each rank.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding

RANKS, BATCH, TOKENS, WIDTH, HEADS, WORDS = 4, 2, 32, 64, 8, 256


class Block(nn.Module):
    """Attention with fused weights, and a gated layer with fused weights."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_and_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.reshape(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        y = (scores @ v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)
        x = x + self.out(y)
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


def shard(model, mesh):
    """Columns of the first weights of each pair, rows of the second."""
    for name, module in model.named_modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            columns = name.endswith(("qkv", "gate_and_up", "head"))
            rows = name.endswith(("out", "down"))
            placement = Shard(0) if columns else Shard(1) if rows else Replicate()
            whole = distribute_tensor(weight.detach(), mesh, [placement])
            setattr(module, key, nn.Parameter(whole))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--on", action="store_true", help="switch cute_sharding on")
    parser.add_argument("--save", metavar="FILE", help="a trace (.json) or a page (.html)")
    arguments = parser.parse_args()

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model()
    shard(model, mesh)
    ids = distribute_tensor(torch.randint(WORDS, (BATCH, TOKENS)), mesh, [Replicate()])
    if arguments.on:
        cute_sharding.enable(redistribution=True, movement=True)

    with cute_sharding.profile() as p:
        model(ids).float().logsumexp(-1).mean().backward()
    print(p.table(100))
    if arguments.save:
        p.save(arguments.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
