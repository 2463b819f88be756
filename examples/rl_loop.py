"""A trainer and a generator of one model, as in reinforcement learning: ranks 0 and 1 train under
``fully_shard``; ranks 2 and 3 generate under tensor parallelism, with fused weights of other names.
After each step the new weights go from the shards of the one to the shards of the other, by a plan
that is made once.

    python examples/rl_loop.py                          # starts four processes
    torchrun --nproc-per-node=4 examples/rl_loop.py

The generator writes sequences, the trainer learns to make those likelier that repeat their tokens,
and at every step the logits of both are compared: another weight would be another number.
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cute_sharding import RefitPlan, Spec, plan_refit

STEPS, LAYERS, HEADS, WIDTH, HIDDEN, VOCABULARY = 20, 2, 4, 16, 24, 12
SEQUENCES, LENGTH = 16, 6
TRAINERS, GENERATORS = (0, 1), (2, 3)
Weights = dict[str, torch.Tensor]


# -- the trainer's model ---------------------------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal, of (sequences, tokens, width)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH))
        shapes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        for name, (inside, outside) in shapes.items():
            self.add_module(name, nn.Linear(inside, outside, bias=False, dtype=torch.float64))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.wo(attention(self.wq(y), self.wk(y), self.wv(y), HEADS))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


# -- the generator's weights, and its part of the model --------------------------------------------


def fused(w: Weights) -> Weights:
    """The generator's weights of the trainer's: queries, keys and values in one, and both
    projections into the hidden dim, for each rank its own rows together.
    """

    def by_rank(weights: list[torch.Tensor]) -> torch.Tensor:
        parts = [weight.unflatten(0, (len(GENERATORS), -1)) for weight in weights]
        return torch.cat(parts, 1).flatten(0, 1)

    new = {"embed_tokens": w["embedding.weight"], "lm_head": w["output.weight"]}
    for i in range(LAYERS):
        qkv = [w[f"layers.{i}.{name}.weight"] for name in ("wq", "wk", "wv")]
        new[f"{i}.qkv_proj"] = by_rank(qkv)
        new[f"{i}.o_proj"] = w[f"layers.{i}.wo.weight"]
        new[f"{i}.gate_up_proj"] = by_rank([w[f"layers.{i}.{n}.weight"] for n in ("gate", "up")])
        new[f"{i}.down_proj"] = w[f"layers.{i}.down.weight"]
        for k in (0, 1):
            new[f"{i}.norms.{k}"] = w[f"layers.{i}.norms.{k}.weight"]
    return new


def placed(name: str) -> list[Placement]:
    """How the generator cuts a weight."""
    if name.endswith(("o_proj", "down_proj")):
        return [Shard(1)]
    return [Shard(0)] if name.endswith(("_proj", "lm_head")) else [Replicate()]


def generators_logits(w: Weights, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All logits, of which each rank works out its part."""

    def added(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=mesh.get_group())
        return x

    x = w["embed_tokens"][tokens]
    for i in range(LAYERS):
        y = F.rms_norm(x, (WIDTH,), w[f"{i}.norms.0"])
        q, k, v = (y @ w[f"{i}.qkv_proj"].mT).chunk(3, -1)
        x = x + added(attention(q, k, v, HEADS // mesh.size()) @ w[f"{i}.o_proj"].mT)
        y = F.rms_norm(x, (WIDTH,), w[f"{i}.norms.1"])
        gate, up = (y @ w[f"{i}.gate_up_proj"].mT).chunk(2, -1)
        x = x + added((F.silu(gate) * up) @ w[f"{i}.down_proj"].mT)
    return DTensor.from_local(x @ w["lm_head"].mT, mesh, [Shard(2)]).full_tensor()


def generate(w: Weights, mesh: DeviceMesh, step: int) -> torch.Tensor:
    """Sequences drawn from the generator's logits; the same on all of its ranks."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=random)
    for _ in range(LENGTH - 1):
        shares = generators_logits(w, tokens, mesh)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=random)], 1)
    return tokens


# -- the loop --------------------------------------------------------------------------------------


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """Of each sequence, how often a token is the one before it."""
    return (tokens[:, 1:] == tokens[:, :-1]).double().mean(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """One step, on this rank's half of the sequences: what was rewarded more becomes likelier."""
    advantage = reward(tokens) - reward(tokens).mean()
    mine = slice(dist.get_rank(), None, len(TRAINERS))
    logits = model(tokens[mine, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[mine, 1:], reduction="none")
    (loss.mean(1) * advantage[mine]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def plan_of(trainer: DeviceMesh, generator: DeviceMesh) -> RefitPlan:
    """The same on all ranks, from the names and shapes of a model without data."""
    with torch.device("meta"):
        whole = Model().state_dict()
    source = {name: Spec(x.shape, trainer, [Shard(0)], x.dtype) for name, x in whole.items()}
    return plan_refit(fused, source, lambda name, tensor: (generator, placed(name)))


def loop() -> None:
    rank = dist.get_rank()
    trainer, generator = (DeviceMesh("cpu", list(ranks)) for ranks in (TRAINERS, GENERATORS))
    plan = plan_of(trainer, generator)
    trains, rewards, furthest = rank in TRAINERS, [], 0.0
    torch.manual_seed(0)
    model = Model()
    if trains:
        for layer in model.layers:
            fully_shard(layer, mesh=trainer)
        fully_shard(model, mesh=trainer)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        plan.send(model.state_dict())
    else:
        weights = plan.receive()  # what the generator runs on, and is written to at each step
        local = {name: x.to_local() for name, x in weights.items()}
    for step in range(STEPS):
        tokens = torch.empty(SEQUENCES, LENGTH, dtype=torch.int64)
        tokens = tokens if trains else generate(local, generator, step)
        dist.broadcast(tokens, src=GENERATORS[0])
        logits = torch.empty(SEQUENCES, LENGTH, VOCABULARY, dtype=torch.float64)
        if trains:
            train(model, optimizer, tokens)
            plan.send(model.state_dict())
            with torch.no_grad():
                logits = model(tokens)
        else:
            plan.receive(into=weights)
        dist.broadcast(logits, src=TRAINERS[0])
        if not trains:
            found = generators_logits(local, tokens, generator)
            furthest = max(furthest, float((found - logits).abs().max()))
            # Sums of tensor parallelism have another order: the last digits, and no more.
            if not torch.allclose(found, logits, rtol=1e-9, atol=1e-12):
                raise SystemExit(f"step {step}: the generator's logits are not the trainer's")
        rewards.append(float(reward(tokens).mean()))
    if rank == GENERATORS[0]:
        print(
            f"{STEPS} steps, {plan.received_bytes} bytes to a generator's rank at each: its logits "
            f"are the trainer's (to {furthest:.0e}); reward {rewards[0]:.2f} -> {rewards[-1]:.2f}"
        )


def start(rank: int, rendezvous: str) -> None:
    """One of the processes; of torchrun's, rank and rendezvous are in the environment."""
    torch.set_num_threads(1)
    where = {"init_method": rendezvous, "rank": rank, "world_size": 4} if rendezvous else {}
    dist.init_process_group("gloo", timeout=timedelta(minutes=2), **where)
    loop()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), "")
        return
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        multiprocessing.spawn(start, (rendezvous,), nprocs=4)


if __name__ == "__main__":
    main()
