"""A training step of three small models that cut what they move: windows that are shifted over rows
of an image, a causal convolution over a sequence, attention with fused projections and a
next-token loss. Each is compared with one device.

    torchrun --nproc-per-node=4 examples/movement_models.py

By torch what they cut is gathered, and one raises; with USE_CUTE_MOVEMENT=1 (and
USE_CUTE_REDISTRIBUTION=1) they exchange halos.

The models are plain PyTorch, and know nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

# -- the models ------------------------------------------------------------------------------------


def shifted_windows(image: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Attention within windows of 4 by 4, shifted by 2: (images, rows, columns, channels)."""
    n, rows, columns, channels = image.shape
    x = image.roll((-2, -2), (1, 2))
    x = x.view(n, rows // 4, 4, columns // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, rows // 4, columns // 4, 16, channels)
    q, k, v = (x @ qkv).chunk(3, -1)
    x = (q @ k.transpose(-1, -2) / channels**0.5).softmax(-1) @ v
    x = x.view(n, rows // 4, columns // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, rows, columns, channels).roll((2, 2), (1, 2))
    return ((image + x @ out) ** 2).sum()


def causal_convolution(
    sequence: torch.Tensor, kernel: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """Each channel over the last four steps, gated: (sequences, steps, channels)."""
    windows = F.pad(sequence, (0, 0, 3, 0)).unfold(1, 4, 1)
    mixed = (windows * kernel).sum(-1)
    return ((F.silu(mixed) * (sequence @ gate)) ** 2).sum()


def next_tokens(
    tokens: torch.Tensor, words: torch.Tensor, qkv: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    """Attention with one projection for queries, keys and values, and what comes next: tokens of
    (sequences, steps).
    """
    x = F.embedding(tokens, words)
    q, k, v = (x @ qkv).chunk(3, -1)
    steps = x.shape[1]
    scores = q @ k.transpose(-1, -2) / x.shape[2] ** 0.5
    x = x + torch.exp(scores - scores.detach().amax(-1, keepdim=True)).tril() @ v / steps
    logits = x @ head
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(0, 1), reduction="sum"
    )


class Model(NamedTuple):
    """A model, its tensors, and how they are placed."""

    name: str
    loss: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    placements: tuple[Placement, ...]


def models() -> list[Model]:
    draw = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) / shape[-1] ** 0.5

    tokens = torch.randint(0, 32, (2, 16), generator=draw)
    everywhere = Replicate()
    return [
        Model(
            "shifted windows, cut by rows",
            shifted_windows,
            (values(2, 16, 8, 8), values(8, 24), values(8, 8)),
            (Shard(1), everywhere, everywhere),
        ),
        Model(
            "causal convolution, cut by steps",
            causal_convolution,
            (values(2, 18, 8), values(8, 4), values(8, 8)),
            (Shard(1), everywhere, everywhere),
        ),
        Model(
            "next tokens, cut by steps",
            next_tokens,
            (tokens, values(32, 8), values(8, 24), values(8, 32)),
            (Shard(1), everywhere, everywhere, everywhere),
        ),
    ]


# -- a step of each --------------------------------------------------------------------------------


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in tensors if x.is_floating_point()]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: Model, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loss and the gradients, whole."""
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    loss = model.loss(*given)
    gradients = torch.autograd.grad(loss, leaves(given))
    return [whole(x.detach()) for x in (loss, *gradients)]


def run(model: Model, mesh: DeviceMesh) -> str:
    wanted = step(model, list(model.tensors))
    pairs = zip(model.tensors, model.placements, strict=True)
    tensors = [distribute_tensor(x, mesh, [placement]) for x, placement in pairs]
    try:
        with CommDebugMode() as communication:
            found = step(model, tensors)
    except (RuntimeError, NotImplementedError) as error:
        return f"raises: {str(error).splitlines()[0][:60]}"
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted))
    what = "as on one device" if close else "NOT as on one device"
    return f"{what}, {communication.get_total_counts()} collectives"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for model in models():
        said = run(model, mesh)
        if dist.get_rank() == 0:
            print(f"{model.name}: {said}", flush=True)
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
