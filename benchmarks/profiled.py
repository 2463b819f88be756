"""What recording costs: a training step inside of ``cute_sharding.profile()`` against the same step
outside of it, and against one under a dispatch mode of PyTorch's that does nothing.

    python -m benchmarks.profiled [--rounds 300]

Steps of a small MLP and of a transformer block, on the package and on PyTorch alone. One process
poses as one rank of four, with tensors so small that nearly all of a step's time is Python's and
the dispatcher's: the overhead is at its largest. Each round runs the three in turn, and counts
processor time of this process, as others run as well; the mean of the fastest fifth of all rounds
is printed. The report is made when the block ends, and is timed alone.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sharding
from cute_sharding.tools.profile import causes
from cute_sharding.tools.profile.recorder import Recorder

RANKS, BATCH, TOKENS, WIDTH, HEADS = 4, 2, 16, 32, 8


class Empty(TorchDispatchMode):
    """Runs each op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a gated layer, both with fused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_and_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (y.reshape(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for y in parts)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        gate, up = self.gate_and_up(self.after(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Columns of the first weights of each pair, rows of the second."""
    for name, module in list(model.named_modules()):
        for key, weight in list(module.named_parameters(recurse=False)):
            columns = name in ("qkv", "gate_and_up", "up")
            rows = name in ("out", "down") and key == "weight"
            placement = Shard(0) if columns else Shard(1) if rows else Replicate()
            whole = distribute_tensor(weight.detach(), mesh, [placement])
            setattr(module, key, nn.Parameter(whole))
    return model


def steps() -> dict[str, Callable[[], None]]:
    """Forward, backward and optimizer."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(BATCH, TOKENS, WIDTH), mesh, [Replicate()])

    def of(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        "MLP": of(nn.Sequential(*(sharded(MLP(), mesh) for _ in range(2)))),
        "transformer block": of(sharded(Block(), mesh)),
    }


def processor_time(step: Callable[[], None], context: Any) -> float:
    with context:
        start = time.process_time()
        step()
        return time.process_time() - start


def measure(step: Callable[[], None], rounds: int) -> tuple[float, float, float, float]:
    """Seconds: the step alone, recorded, under a mode that does nothing; and of one report."""
    seconds: list[list[float]] = [[], [], []]
    gc.disable()
    for _ in range(rounds):
        recorder = Recorder()
        for some, context in zip(seconds, (nullcontext(), recorder, Empty())):
            some.append(processor_time(step, context))
    gc.enable()
    alone, recorded, empty = (mean(sorted(some)[: max(rounds // 5, 1)]) for some in seconds)
    start = time.process_time()
    causes.recorded(recorder, None)
    return alone, recorded, empty, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    rounds = arguments.rounds
    print(f"torch {torch.__version__}; processor time of a step, the fastest fifth of {rounds}")
    print(f"{'':34}{'alone':>10}{'recorded':>10}{'ratio':>8}{'empty mode':>12}{'report':>10}")
    for is_on in (False, True):
        for name, step in steps().items():
            on = cute_sharding.enabled(redistribution=True, movement=True)
            with on if is_on else nullcontext():
                for _ in range(5):
                    step()
                alone, recorded, empty, reported = measure(step, arguments.rounds)
            print(
                f"{name + (', package on' if is_on else ', PyTorch alone'):34}{alone * 1e3:7.2f} ms"
                f"{recorded * 1e3:7.2f} ms{recorded / alone:8.2f}{empty / alone:12.2f}"
                f"{reported * 1e3:7.1f} ms"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
