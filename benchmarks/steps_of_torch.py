"""The training steps of :mod:`benchmarks.training_steps` as programs of DTensors. Each function
computes a loss from its operands by name, and called with a mesh it makes a step for ``estimate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from benchmarks.training_steps import RATE, STEPS, Operand, Step

Tensor = torch.Tensor

STEP_OF = {step.name: step for step in STEPS}


class Training:
    """A training step on any mesh.

    Attributes:
        loss: computes the loss from the operands by name.
        step: the operands and their shardings.
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss = loss
        self.step: Step = STEP_OF[loss.__name__]
        self.__module__, self.__qualname__ = loss.__module__, loss.__qualname__

    def __call__(self, mesh: DeviceMesh) -> Callable[[], Tensor]:
        """The step with SGD, on any numbers."""
        return self.once(self.operands_on(mesh))

    sgd = __call__

    def adamw(self, mesh: DeviceMesh) -> Callable[[], Tensor]:
        """The step with AdamW, on any numbers."""
        return self.once(self.operands_on(mesh), torch.optim.AdamW)

    def operands_on(
        self, mesh: DeviceMesh, numbers: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The operands on a mesh, of these numbers or any; weights have gradients."""
        made = {}
        for name, operand in self.step.operands.items():
            x = drawn(operand) if numbers is None else numbers[name]
            x = distribute_tensor(x, mesh, placements(operand, mesh))
            made[name] = torch.nn.Parameter(x) if name in self.step.weights else x
        return made

    def once(
        self, operands: Mapping[str, Tensor], optimizer_class: Any = torch.optim.SGD
    ) -> Callable[[], Tensor]:
        """A function that runs the step, also of plain tensors, and returns the loss."""
        weights = [operands[name] for name in self.step.weights]
        optimizer = optimizer_class(weights, lr=RATE)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(**operands)
            loss.backward()
            optimizer.step()
            found = loss.detach()
            return found.full_tensor() if hasattr(found, "full_tensor") else found

        return step


def drawn(operand: Operand) -> Tensor:
    if operand.below is not None:
        return torch.randint(0, operand.below, operand.shape)
    return torch.randn(operand.shape)


def placements(operand: Operand, mesh: DeviceMesh) -> list[Placement]:
    names = mesh.mesh_dim_names or ()
    found: list[Placement] = [Replicate()] * mesh.ndim
    for d, over in enumerate(operand.over):
        for name in over:
            if name in names:
                found[names.index(name)] = Shard(d)
    return found


# -- parts -----------------------------------------------------------------------------------------


def square_error(x: Tensor, target: Tensor) -> Tensor:
    return ((x - target) ** 2).mean()


def heads(x: Tensor, n: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Of heads; the result has the heads side by side."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    x = scores.softmax(-1) @ v
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def block(
    x: Tensor,
    scale1: Tensor,
    shift1: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    scale2: Tensor,
    shift2: Tensor,
    up: Tensor,
    down: Tensor,
    causal: bool,
) -> Tensor:
    y = F.layer_norm(x, (256,), scale1, shift1)
    q, k, v = (heads(F.linear(y, w), 8) for w in (wq, wk, wv))
    x = x + F.linear(attention(q, k, v, causal), wo)
    y = F.layer_norm(x, (256,), scale2, shift2)
    return x + F.linear(F.gelu(F.linear(y, up), approximate="tanh"), down)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def convolved(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w, padding=1), None, None, scale, shift, True)


# -- steps -----------------------------------------------------------------------------------------


@Training
def diffusion_block(
    x: Tensor,
    c: Tensor,
    target: Tensor,
    modulation: Tensor,
    bias: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    up: Tensor,
    down: Tensor,
) -> Tensor:
    change = F.linear(F.silu(c), modulation, bias).unsqueeze(1)
    shift1, scale1, gate1, shift2, scale2, gate2 = change.chunk(6, -1)
    y = F.layer_norm(x, (256,)) * (1 + scale1) + shift1
    q, k, v = (heads(F.linear(y, w), 8) for w in (wq, wk, wv))
    x = x + gate1 * F.linear(attention(q, k, v), wo)
    y = F.layer_norm(x, (256,)) * (1 + scale2) + shift2
    x = x + gate2 * F.linear(F.gelu(F.linear(y, up), approximate="tanh"), down)
    return square_error(x, target)


@Training
def language_model(
    tokens: Tensor,
    labels: Tensor,
    embedding: Tensor,
    head: Tensor,
    scale3: Tensor,
    shift3: Tensor,
    **weights: Tensor,
) -> Tensor:
    x = block(F.embedding(tokens, embedding), **weights, causal=True)
    logits = F.linear(F.layer_norm(x, (256,), scale3, shift3), head)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@Training
def vocabulary_loss(x: Tensor, labels: Tensor, head: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, head), labels)


@Training
def sequence_block(x: Tensor, target: Tensor, **weights: Tensor) -> Tensor:
    return square_error(block(x, **weights, causal=False), target)


@Training
def norm_linear(
    x: Tensor, target: Tensor, scale: Tensor, shift: Tensor, w: Tensor, b: Tensor
) -> Tensor:
    return square_error(F.linear(F.layer_norm(x, (512,), scale, shift), w, b), target)


@Training
def convolutions(
    x: Tensor, target: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    x = F.relu(F.conv2d(x, w1, b1, padding=1))
    x = F.relu(F.conv2d(x, w2, b2, padding=1))
    return square_error(F.max_pool2d(x, 2), target)


@Training
def experts(x: Tensor, target: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    share = F.linear(x, gate).softmax(-1)
    y = torch.einsum("td,edh->eth", x, up).relu()
    y = torch.einsum("eth,ehd->etd", y, down)
    return square_error(torch.einsum("te,etd->td", share, y), target)


@Training
def fused_mlp(x: Tensor, target: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, y = F.linear(x, up).chunk(2, -1)
    return square_error(F.linear(F.silu(gate) * y, down), target)


@Training
def fused_attention(x: Tensor, target: Tensor, qkv: Tensor, wo: Tensor) -> Tensor:
    q, k, v = (heads(y, 8) for y in F.linear(x, qkv).chunk(3, -1))
    return square_error(F.linear(attention(q, k, v), wo), target)


@Training
def gpt2(
    tokens: Tensor,
    labels: Tensor,
    embedding: Tensor,
    positions: Tensor,
    scale1: Tensor,
    shift1: Tensor,
    qkv: Tensor,
    qkv_bias: Tensor,
    wo: Tensor,
    wo_bias: Tensor,
    scale2: Tensor,
    shift2: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    scale3: Tensor,
    shift3: Tensor,
) -> Tensor:
    x = F.embedding(tokens, embedding) + positions
    y = F.layer_norm(x, (256,), scale1, shift1)
    q, k, v = (heads(z, 8) for z in F.linear(y, qkv, qkv_bias).split(256, -1))
    x = x + F.linear(attention(q, k, v, causal=True), wo, wo_bias)
    y = F.layer_norm(x, (256,), scale2, shift2)
    x = x + F.linear(F.gelu(F.linear(y, up, up_bias), approximate="tanh"), down, down_bias)
    logits = F.linear(F.layer_norm(x, (256,), scale3, shift3), embedding)
    return F.cross_entropy(logits.view(-1, 2048), labels.view(-1))


@Training
def residual_mlps(x: Tensor, target: Tensor, **weights: Tensor) -> Tensor:
    for i in range(4):
        x = x + F.linear(F.relu(F.linear(x, weights[f"up{i}"])), weights[f"down{i}"])
    return square_error(x, target)


@Training
def cross_attention(
    x: Tensor, context: Tensor, target: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor
) -> Tensor:
    q, k, v = heads(F.linear(x, wq), 8), *(heads(F.linear(context, w), 8) for w in (wk, wv))
    return square_error(F.linear(attention(q, k, v), wo), target)


@Training
def llama_block(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    target: Tensor,
    scale1: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    scale2: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
) -> Tensor:
    y = F.rms_norm(x, (256,), scale1, 1e-6)
    q = rotated(heads(F.linear(y, wq), 16), cos, sin)
    k, v = rotated(heads(F.linear(y, wk), 8), cos, sin), heads(F.linear(y, wv), 8)
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    x = x + F.linear(attention(q, k, v, causal=True), wo)
    y = F.rms_norm(x, (256,), scale2, 1e-6)
    x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    return square_error(x, target)


@Training
def residual_network(
    x: Tensor,
    target: Tensor,
    w1: Tensor,
    scale1: Tensor,
    shift1: Tensor,
    w2: Tensor,
    scale2: Tensor,
    shift2: Tensor,
) -> Tensor:
    y = F.relu(convolved(x, w1, scale1, shift1))
    return square_error(F.relu(x + convolved(y, w2, scale2, shift2)), target)


@Training
def recurrent(
    x: Tensor, start: Tensor, target: Tensor, w: Tensor, u: Tensor, b: Tensor, head: Tensor
) -> Tensor:
    h = start
    for each in x.unbind(1):
        h = torch.tanh(F.linear(each, w, b) + F.linear(h, u))
    return square_error(F.linear(h, head), target)


@Training
def two_losses(
    x: Tensor,
    target: Tensor,
    labels: Tensor,
    up: Tensor,
    down: Tensor,
    scale: Tensor,
    shift: Tensor,
    regression: Tensor,
    classes: Tensor,
) -> Tensor:
    trunk = x + F.linear(F.relu(F.linear(x, up)), down)
    trunk = F.layer_norm(trunk, (128,), scale, shift)
    error = square_error(F.linear(trunk, regression), target)
    return error + F.cross_entropy(F.linear(trunk, classes), labels)
