"""A trainer of FSDP2 x TP on four processes, and an engine on two others whose ranks load their own
part of each weight, as vLLM's layers do: fused queries, keys and values with fewer heads of keys
than of queries, gate and up in one, a padded vocabulary. After each of twenty steps the weights go
from the trainer's shards into the engine's tensors, by a plan of the engine's own loader.

    python examples/engine.py                          # starts six processes
    torchrun --nproc-per-node=6 examples/engine.py

At every step the engine's logits are compared with those of one device.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cute_sharding import TransferPlan, plan_load

STEPS, LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, VOCABULARY = 20, 2, 4, 2, 4, 24, 13
WIDTH = HEADS * HEAD
TRAINERS, ENGINES = (0, 1, 2, 3), (4, 5)
RANKS = len(ENGINES)
Weights = Mapping[str, torch.Tensor]


# -- the trainer's model ---------------------------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, of (sequences, tokens, heads of any number times their size)."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    done = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return done.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv = KV_HEADS * HEAD
        shapes = {"q_proj": (WIDTH, WIDTH), "k_proj": (WIDTH, kv), "v_proj": (WIDTH, kv)}
        shapes |= {"o_proj": (WIDTH, WIDTH), "down_proj": (HIDDEN, WIDTH)}
        shapes |= dict.fromkeys(("gate_proj", "up_proj"), (WIDTH, HIDDEN))
        for name, (inside, outside) in shapes.items():
            self.add_module(name, nn.Linear(inside, outside, bias=False, dtype=torch.float64))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.o_proj(attention(self.q_proj(y), self.k_proj(y), self.v_proj(y)))
        y = self.norms[1](x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def sharded(model: Model, mesh: DeviceMesh) -> Model:
    """By tensor parallelism within a layer, then by ``fully_shard``."""
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    ways = {name: ColwiseParallel() for name in columns}
    ways |= {name: RowwiseParallel() for name in ("o_proj", "down_proj")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], ways)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


# -- the engine ------------------------------------------------------------------------------------


class Engine:
    """What one rank of the engine has, and how it loads it from whole tensors."""

    def __init__(self, rank: int) -> None:
        self.rank, self.rows = rank, -(-VOCABULARY // RANKS)
        heads, kv, hidden = (n // RANKS for n in (WIDTH, KV_HEADS * HEAD, HIDDEN))
        self.sizes = [heads, kv, kv]
        shapes = {"embed_tokens": (VOCABULARY, WIDTH), "lm_head": (self.rows, WIDTH)}
        for i in range(LAYERS):
            shapes[f"{i}.qkv_proj"] = (sum(self.sizes), WIDTH)
            shapes[f"{i}.o_proj"], shapes[f"{i}.down_proj"] = (WIDTH, heads), (WIDTH, hidden)
            shapes[f"{i}.gate_up_proj"] = (2 * hidden, WIDTH)
            shapes |= {f"{i}.norms.{k}": (WIDTH,) for k in range(2)}
        self.weights = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}

    def load_weights(self, whole: Weights) -> None:
        w = self.weights
        w["embed_tokens"].copy_(whole["embed_tokens.weight"])
        mine = whole["lm_head.weight"][self.rank * self.rows :][: self.rows]
        w["lm_head"].zero_()
        w["lm_head"][: len(mine)] = mine
        for i in range(LAYERS):
            of = {n.split(f"layers.{i}.")[-1]: x for n, x in whole.items() if f"layers.{i}." in n}
            for into, names in (("qkv_proj", "q k v"), ("gate_up_proj", "gate up")):
                start = 0
                for name in names.split():
                    part = self.part(of[f"{name}_proj.weight"], 0)
                    w[f"{i}.{into}"].narrow(0, start, len(part)).copy_(part)
                    start += len(part)
            for name in ("o_proj", "down_proj"):
                w[f"{i}.{name}"].copy_(self.part(of[f"{name}.weight"], 1))
            for k in range(2):
                w[f"{i}.norms.{k}"].copy_(of[f"norms.{k}.weight"])

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        size = x.shape[dim] // RANKS
        return x.narrow(dim, self.rank * size, size)

    def logits(self, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """All logits, of which each rank works out its part."""
        w, group = self.weights, mesh.get_group()

        def added(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=group)
            return x

        x = w["embed_tokens"][tokens]
        for i in range(LAYERS):
            y = F.rms_norm(x, (WIDTH,), w[f"{i}.norms.0"])
            q, k, v = (y @ w[f"{i}.qkv_proj"].mT).split(self.sizes, -1)
            x = x + added(attention(q, k, v) @ w[f"{i}.o_proj"].mT)
            y = F.rms_norm(x, (WIDTH,), w[f"{i}.norms.1"])
            gate, up = (y @ w[f"{i}.gate_up_proj"].mT).chunk(2, -1)
            x = x + added((F.silu(gate) * up) @ w[f"{i}.down_proj"].mT)
        parts = [torch.empty(*x.shape[:-1], self.rows, dtype=x.dtype) for _ in range(RANKS)]
        dist.all_gather(parts, x @ w["lm_head"].mT, group=group)
        return torch.cat(parts, -1)[..., :VOCABULARY]


# -- the loop --------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def loop() -> None:
    rank = dist.get_rank()
    trainer = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    mesh = DeviceMesh("cpu", list(ENGINES))
    torch.manual_seed(0)
    model, trains = Model(), rank in TRAINERS
    alone = torch.optim.SGD(model.parameters(), lr=0.5)  # on one device, for comparison
    if trains:
        model = sharded(model, trainer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = plan_load(source=model.state_dict())
    else:
        engine = Engine(rank - ENGINES[0])
        plan = plan_load(engine.load_weights, engine.weights)
    furthest = 0.0
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(step))
        if trains:
            train(model, optimizer, tokens)
            plan.run(model.state_dict())
            continue
        train(model, alone, tokens)
        plan.run()
        with torch.no_grad():
            found, expected = engine.logits(tokens, mesh), model(tokens)
        furthest = max(furthest, float((found - expected).abs().max()))
        # Sums of tensor parallelism have another order: the last digits, and no more.
        if not torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
            raise SystemExit(f"step {step}: the engine's logits are not those of one device")
    if rank == ENGINES[0]:
        report(plan, model, furthest)


def report(plan: TransferPlan, model: nn.Module, furthest: float) -> None:
    whole = sum(x.nbytes for x in model.state_dict().values())
    print(
        f"{STEPS} steps: logits as on one device (to {furthest:.0e}); each time, an engine's rank "
        f"receives {plan.received_bytes:,} bytes of the {whole:,} of whole tensors"
    )


def start(rank: int, rendezvous: str) -> None:
    """One of the processes; of torchrun's, rank and rendezvous are in the environment."""
    torch.set_num_threads(1)
    where = {"init_method": rendezvous, "rank": rank, "world_size": 6} if rendezvous else {}
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
        multiprocessing.spawn(start, (rendezvous,), nprocs=6)


if __name__ == "__main__":
    main()
