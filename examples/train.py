import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cute_sharding

WIDTH, HEADS, HIDDEN, WORDS, LENGTH = 256, 8, 512, 2000, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores + scores.new_full((LENGTH, LENGTH), -torch.inf).triu(1)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLACES = {"qkv": Shard(0), "gate_up": Shard(0), "head.weight": Shard(0), "words": Shard(0)}
PLACES |= {"out.weight": Shard(1), "down.weight": Shard(1)}


def parallelize(model, mesh):
    """Tensor parallelism over tp, by columns and then rows; FSDP over dp."""
    for name, weight in list(model.named_parameters()):
        place = next((p for part, p in PLACES.items() if part in name), Replicate())
        module, _, key = name.rpartition(".")
        weight = nn.Parameter(distribute_tensor(weight.data, mesh["tp"], [place]))
        setattr(model.get_submodule(module), key, weight)
    # Each rank has some words, so their vectors are Partial. PyTorch alone needs them summed here.
    whole = [Replicate()]
    model.words.register_forward_hook(lambda *args: args[-1].redistribute(placements=whole))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"])


def training_step(mesh=None):
    """A step on the mesh, or on one device."""
    torch.manual_seed(0)
    model = Model()
    tokens = torch.arange(4 * LENGTH).reshape(4, LENGTH) % WORDS
    if mesh:
        parallelize(model, mesh)
        tokens = distribute_tensor(tokens, mesh["tp"], [Replicate()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main(plan=None):
    dist.init_process_group("gloo")
    step = training_step(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    with cute_sharding.planned(plan) if plan else nullcontext():
        losses = [step()]
        with cute_sharding.profile() as sent:
            losses.append(step())
    losses = " ".join(f"{loss.full_tensor().item():.4f}" for loss in losses)
    if dist.get_rank() == 0:
        received = sum(line.received for line in sent.lines)
        print(f"losses {losses}; {received:,} bytes in {len(sent.collectives)} collectives")
        print(sent.table(100, 3))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
