"""Tensor parallelism of a block with fused weights and a modulation, by one change after another.

    torchrun --standalone --nproc-per-node=4 examples/tensor_parallel.py

Each change is profiled over one training step, with PyTorch alone and with cute_sharding, and the
losses are compared with one device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_sharding

BATCH, TOKENS, WIDTH, HEADS = 4, 16, 64, 8

# -- the model, which knows nothing of meshes ------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS)
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP; a condition gives the shift, scale and gate of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.mlp = MLP()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH), requires_grad=False)
        self.block = Block()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.block(self.embed(x) + self.positions, condition)


# -- the changes, each on top of those before ------------------------------------------------------

AS_IT_IS, MODULATION, PARTS, OUTPUTS, GRADIENTS = CHANGES = (
    "columns, then rows",
    "modulation gathered once",
    "parts of fused weights",
    "outputs reduced once",
    "gradients reduced once",
)


def placement(layer: str, key: str, of_parts: bool) -> Placement:
    """Columns of the first weight of each pair, rows of the second."""
    if layer.endswith("qkv") and of_parts:
        return _StridedShard(0, split_factor=3)  # of queries, of keys, of values
    if layer.endswith(("qkv", "up", "modulation")):
        return Shard(0)
    if layer.endswith(("out", "down")) and key == "weight":
        return Shard(1)
    return Replicate()


def shard(model: Model, mesh: DeviceMesh, of_parts: bool) -> None:
    """Only what is trained: the frozen parameter stays a plain tensor."""
    for name, module in model.named_modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if weight.requires_grad:
                whole = distribute_tensor(weight.detach(), mesh, [placement(name, key, of_parts)])
                setattr(module, key, nn.Parameter(whole))


class WholeGradient(torch.autograd.Function):
    """Reduces the gradient, here, once."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:
        return gradient.redistribute(placements=[Replicate()])


def whole_output(module: nn.Module, args: tuple, output: DTensor) -> DTensor:
    return output.redistribute(placements=[Replicate()])


def whole_gradient(module: nn.Module, args: tuple) -> tuple:
    return (WholeGradient.apply(args[0]),)


def redistribute(model: Model, changes: tuple[str, ...]) -> None:
    for name, module in model.named_modules():
        if OUTPUTS in changes and name.endswith(("out", "down")):
            module.register_forward_hook(whole_output)
        if GRADIENTS in changes and name.endswith(("attention", "mlp")):
            module.register_forward_pre_hook(whole_gradient)
        if MODULATION in changes and name.endswith("modulation"):
            module.register_forward_hook(whole_output)


def training_step(
    mesh: DeviceMesh | None, changes: tuple[str, ...] = CHANGES
) -> Callable[[], Tensor]:
    """Without a mesh, on one device."""
    torch.manual_seed(0)
    model = Model()
    x, condition = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, WIDTH)
    if mesh is not None:
        shard(model, mesh, PARTS in changes)
        redistribute(model, changes)
        x, condition = (distribute_tensor(each, mesh, [Replicate()]) for each in (x, condition))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def step() -> Tensor:
        with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            loss = model(x, condition).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


# -- what each change does -------------------------------------------------------------------------


class Outcome(NamedTuple):
    """Of one training step: bytes that the busiest rank received, and collectives."""

    received: int
    collectives: int

    def __str__(self) -> str:
        return f"{self.received / 1000:.0f} kB in {self.collectives}"


def outcome(mesh: DeviceMesh, changes: tuple[str, ...], expected: list[Tensor]) -> Outcome | str:
    """Or the error of PyTorch, on all ranks. The losses are compared with those of one device."""
    step = training_step(mesh, changes)
    try:
        losses = [step()]
        with cute_sharding.profile() as p:
            losses.append(step())
    except RuntimeError as error:
        return f"{error.__cause__ or error}"
    torch.testing.assert_close([loss.full_tensor() for loss in losses], expected)
    profile = p.to_dict()
    return Outcome(profile["received_bytes"], profile["collectives"])


def outcomes(mesh: DeviceMesh) -> dict[str, tuple[Outcome | str, Outcome | str]]:
    """With PyTorch alone and with cute_sharding, after each change."""
    one_device, found = training_step(None), {}
    expected = [one_device(), one_device()]
    for n, change in enumerate(CHANGES, 1):
        alone = outcome(mesh, CHANGES[:n], expected)
        with cute_sharding.enabled(redistribution=True, movement=True):
            found[change] = alone, outcome(mesh, CHANGES[:n], expected)
    return found


def only_as_written(mesh: DeviceMesh) -> None:
    """With all changes, what communicates is a ``redistribute`` of this file, or this raises."""
    with cute_sharding.enabled(redistribution=True, movement=True):
        step = training_step(mesh)
        with cute_sharding.no_communication(allow_explicit=True):
            step()


def main() -> None:
    if cute_sharding.is_enabled():
        sys.exit(
            "a flag is on, and PyTorch alone would be measured with it: run this without flags"
        )
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows = outcomes(mesh)
    only_as_written(mesh)
    if dist.get_rank() == 0:
        print(f"{'':26}{'PyTorch':17}cute_sharding")
        for change, row in rows.items():
            cells = ["raises" if isinstance(each, str) else str(each) for each in row]
            print(f"{change:26}{cells[0]:17}{cells[1]}")
        print(*dict.fromkeys(e for row in rows.values() for e in row if isinstance(e, str)))
        print("With all changes, only calls of redistribute communicate.")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
