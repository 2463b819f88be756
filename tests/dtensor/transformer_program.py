"""A transformer as a new user of DTensor would write it, trained on four processes: fewer heads of
keys than devices, a fused gate, a tied embedding that is cut by the rows of a vocabulary which does
not divide, and a loss of the next token. What views do is up to the environment.

    torchrun --standalone --nproc-per-node=4 transformer_program.py heads|sequence eager|compiled

prints "trains as one device", or raises.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

WORDS, WIDTH, HEADS, KEYS, HIDDEN, STEPS = 257, 64, 8, 2, 96, 2
R = Replicate()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KEYS * WIDTH // HEADS, bias=False)
        self.v = nn.Linear(WIDTH, KEYS * WIDTH // HEADS, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        size = *x.shape[:2], -1, WIDTH // HEADS
        q, k, v = (f(x).view(size).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(HEADS // KEYS, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_and_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(each for _ in range(2) for each in (Attention(), Gated()))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        return self.head(self.norms[-1](x))


def next_token_loss(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def train(model, ids, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    shown = []
    for _ in range(STEPS):
        loss = loss_of(model, ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown += [whole(loss).item(), whole(norm).item()]
    return shown


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def distribute(model, mesh, by_sequence):
    cuts = {"q": Shard(0), "gate_and_up": Shard(0), "o": Shard(1), "down": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        cut = Shard(0) if owner == "words" else cuts.get(owner.rpartition(".")[2], R)
        distributed = nn.Parameter(distribute_tensor(parameter.data, mesh, [cut]))
        setattr(model.get_submodule(owner), last, distributed)
    model.head.weight = model.words.weight
    if by_sequence:
        for module in (model.words, *model.blocks):
            module.register_forward_hook(lambda _, x, y: y.redistribute(placements=[Shard(1)]))
        for module in (model.head, *model.blocks):
            module.register_forward_pre_hook(lambda _, x: x[0].redistribute(placements=[R]))


def main(by, how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (4,))
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(3))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Transformer())
    wanted = train(models[0], ids, next_token_loss)
    distribute(models[1], mesh, by == "sequence")
    loss_of = next_token_loss
    if how == "compiled":
        loss_of = torch.compile(next_token_loss, backend="aot_eager")
    found = train(models[1], distribute_tensor(ids, mesh, [R]), loss_of)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
    for parameter, want in zip(models[1].parameters(), models[0].parameters()):
        torch.testing.assert_close(parameter.full_tensor(), want, rtol=0, atol=1e-3)
    print("trains as one device")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
