"""A language model in the sizes of examples/models/, as a program would write it: tensor and
sequence parallelism over the mesh dim "tp", FSDP over "dp", a fused projection of queries, keys and
values, a fused gate, grouped heads. What a step of it costs, without a device:

    python -m cute_sharding estimate examples/language_model.py:dense_8b --mesh dp=64,tp=8 \\
        --layers 32

``python examples/language_model.py`` estimates a small one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

HEAD, SEQUENCE = 128, 8192


class Sizes(NamedTuple):
    layers: int
    width: int
    keys: int
    hidden: int
    words: int

    @classmethod
    def of(cls, name: str) -> Sizes:
        """Those of a file of examples/models/."""
        file = Path(__file__).parent / "models" / f"{name}.json"
        found = json.loads(file.read_text())["sizes"]
        return cls(*(found[key] for key in ("layers", "d", "kv", "ff", "v")))


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.widths = [sizes.width, sizes.keys, sizes.keys]
        self.qkv = nn.Linear(sizes.width, sum(self.widths), bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, -1, HEAD).transpose(1, 2)
            for each in self.qkv(x).split(self.widths, -1)
        )
        k, v = (y.repeat_interleave(q.size(1) // y.size(1), 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.gated = Attention(sizes), Gated(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.gated(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism over "tp", then FSDP over "dp"."""
    column: Any = ColwiseParallel(use_local_output=False)
    row: Any = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    norm: Any = SequenceParallel(use_local_output=False)
    whole: Any = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    outer = {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "norm": norm,
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    inner = {
        "norm1": norm,
        "attention": whole,
        "attention.qkv": column,
        "attention.out": row,
        "norm2": norm,
        "gated": whole,
        "gated.gate_and_up": column,
        "gated.down": row,
    }
    parallelize_module(model, mesh["tp"], outer)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], inner)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def step_of(
    sizes: Sizes, mesh: DeviceMesh, length: int = SEQUENCE, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], None]:
    """One step of training, on two sequences for each rank of "dp"."""
    model = LanguageModel(sizes).to(dtype)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(2, length, dtype=torch.long)
    labels = DTensor.from_local(ids, mesh["tp"], [Replicate()], run_check=False)

    def step() -> None:
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, sizes.words), labels[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def dense_8b(mesh: DeviceMesh, layers: int = 32) -> Callable[[], None]:
    return step_of(Sizes.of("dense_8b")._replace(layers=layers), mesh)


def dense_405b(mesh: DeviceMesh, layers: int = 126) -> Callable[[], None]:
    return step_of(Sizes.of("dense_405b")._replace(layers=layers), mesh)


def small(mesh: DeviceMesh) -> Callable[[], None]:
    return step_of(Sizes(2, 1024, 512, 2048, 5000), mesh, 256)


if __name__ == "__main__":
    from cute_sharding import estimate

    print(estimate(small, mesh={"dp": 2, "tp": 4}, settings=("PyTorch", "all")))
