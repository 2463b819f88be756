"""Programs of DTensor ops, most of them beside views, for comparing how they compile: each with
inputs for two sizes, which say what the program is called with one call after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from simulation import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
LINE, SQUARE = (4,), (2, 2)
SIZES = ((8, 12), (16, 20), (12, 8))
UNEVEN = ((7, 5), (10, 6), (9, 13))


class Program(NamedTuple):
    """``run(*inputs(a, b))``, for each (a, b) of ``sizes``."""

    run: Callable[..., Any]
    inputs: Callable[[int, int], tuple[Any, ...]]
    sizes: tuple[tuple[int, int], ...] = SIZES
    gradients: bool = True


def t(*shape: int) -> torch.Tensor:
    """Values that all differ, of about 1."""
    return (torch.arange(float(torch.Size(shape).numel())).reshape(shape) * 0.37).sin() + 1.5


def d(full: torch.Tensor | tuple[int, ...], *placements: Any, grad: bool = True) -> DTensor:
    full = full if isinstance(full, torch.Tensor) else t(*full)
    result = distribute_tensor(
        full, mesh_of(LINE if len(placements) == 1 else SQUARE), placements, src_data_rank=None
    ).detach()
    return result.requires_grad_(grad and full.is_floating_point())


def ids(n: int, most: int, *placements: Any) -> DTensor:
    return d(torch.arange(n) * 5 % most, *placements)


def redistributed(x: Any, *placements: Any) -> Any:
    return x.redistribute(placements=placements)


def local(x: Any) -> Any:
    return x.to_local()


def as_dtensor(x: Any, placement: Any, like: Any = None) -> Any:
    return DTensor.from_local(
        x, mesh_of(LINE) if like is None else like.device_mesh, [placement], run_check=False
    )


def slice_of_a_buffer(a: int, b: int, at: int = 3) -> DTensor:
    """Local tensors are parts of one flat buffer, as fully_shard has them."""
    return as_dtensor(t(at * 7 + a * b)[at * 7 :].view(a, b), S0)


def adam(parameters: Any, gradients: Any, firsts: Any, seconds: Any) -> Any:
    with torch.no_grad():
        torch._foreach_lerp_(firsts, gradients, 0.1)
        torch._foreach_mul_(seconds, 0.99)
        torch._foreach_addcmul_(seconds, gradients, gradients, 0.01)
        steps = torch._foreach_add(torch._foreach_sqrt(seconds), 1e-3)
        torch._foreach_addcdiv_(parameters, firsts, steps, -0.1)
    return list(parameters)


def attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    batch, length, _ = x.shape
    q, k, v = (F.linear(x, w).view(batch, length, 4, -1).transpose(1, 2) for w in (wq, wk, wv))
    weights = torch.softmax(q @ k.transpose(-2, -1) / 3.0, -1)
    return F.linear((weights @ v).transpose(1, 2).reshape(batch, length, -1), wo)


def parallel_mlp() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(t(*parameter.shape) - 1.5)
    return parallelize_module(
        model, mesh_of(LINE), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


class Nested(nn.Module):
    """Modules in modules, with parameters and a buffer that are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("scale", d((8,), R, grad=False))
        for module in (self.norm, *self.inner):
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(d(tuple(parameter.shape), R)))

    def forward(self, x: Any) -> Any:
        x = self.norm(x)
        for layer in self.inner:
            x = x + torch.tanh(layer(x)) * self.scale
        return x


def module(make: Callable[[], nn.Module]) -> Callable[..., Any]:
    """Made at its first use, when there is a process group."""
    made: list[nn.Module] = []

    def run(*inputs: Any) -> Any:
        return made[0](*inputs)

    def prepare() -> None:
        if not made:
            made.append(make())

    run.prepare = prepare  # type: ignore[attr-defined]
    return run


def branch(x: Any) -> Any:
    return x * x if x.size(0) <= 12 else x + x


def mutate(x: Any) -> Any:
    x.add_(1)
    x.mul_(2)
    return x.sum(1)


def write(x: Any, y: Any) -> Any:
    x.copy_(y * 2)
    return y + 1


PROGRAMS = {
    # pointwise
    "square": Program(lambda x: x * x + 2, lambda a, b: (d((a, b), S0),)),
    "square, uneven": Program(lambda x: x * x + 2, lambda a, b: (d((a, b), S0),), UNEVEN),
    "square, two mesh dims": Program(lambda x: x * x + 2, lambda a, b: (d((a, b), S0, S1),)),
    "add": Program(lambda x, y: x + y, lambda a, b: (d((a, b), S0), d((a, b), S0))),
    "add, other placements": Program(
        lambda x, y: x + y, lambda a, b: (d((a, b), S0), d((a, b), S1))
    ),
    "add, a replica": Program(
        lambda x, y: x + y, lambda a, b: (d((a, b), S1), d((a, b), R)), UNEVEN
    ),
    "add a row": Program(lambda x, y: x + y, lambda a, b: (d((a, b), S0), d((b,), R))),
    "add a pending sum": Program(
        lambda x, y: (x @ y) + 1, lambda a, b: (d((a, b), S1), d((b, 4), S0))
    ),
    "swish": Program(lambda x, y: F.silu(x) * y, lambda a, b: (d((a, b), S1), d((a, b), S1))),
    "where": Program(
        lambda x, y: torch.where(x > 1.5, x, y), lambda a, b: (d((a, b), S0), d((a, b), S0))
    ),
    "mask": Program(
        lambda x, m: x.masked_fill(m, 0.0), lambda a, b: (d((a, b), S0), d(t(a, b) > 1.5, S0))
    ),
    "clamp and cast": Program(
        lambda x: x.clamp(1, 2).to(torch.float64), lambda a, b: (d((a, b), S1),)
    ),
    "dropout that is off": Program(
        lambda x: F.dropout(x, 0.5, training=False) * 2, lambda a, b: (d((a, b), S0),)
    ),
    "a scalar and a plain number": Program(
        lambda x, n: x.sum() * n, lambda a, b: (d((a, b), R), 3)
    ),
    "sizes as numbers": Program(
        lambda x: x * x.shape[0] + x.shape[1], lambda a, b: (d((a, b), S0),)
    ),
    "branch on a size": Program(branch, lambda a, b: (d((a, b), S0),)),
    # products
    "mm, rows": Program(torch.mm, lambda a, b: (d((a, b), S0), d((b, 4), R))),
    "mm, columns": Program(torch.mm, lambda a, b: (d((a, b), R), d((b, 8), S1))),
    "mm, pending": Program(torch.mm, lambda a, b: (d((a, b), S1), d((b, 8), S0))),
    "mm, replicas": Program(torch.mm, lambda a, b: (d((a, b), R), d((b, 8), R))),
    "mm, two mesh dims": Program(torch.mm, lambda a, b: (d((a, b), S0, R), d((b, 8), R, S1))),
    "mm, uneven": Program(torch.mm, lambda a, b: (d((a, b), S0), d((b, 4), R)), UNEVEN),
    "linear": Program(F.linear, lambda a, b: (d((a, b, 8), S0), d((4, 8), R), d((4,), R))),
    "linear, columns": Program(
        F.linear, lambda a, b: (d((a, b, 8), R), d((8, 8), S0), d((8,), S0))
    ),
    "addmm": Program(torch.addmm, lambda a, b: (d((4,), R), d((a, b), S0), d((b, 4), R))),
    "bmm": Program(torch.bmm, lambda a, b: (d((a, b, 6), S0), d((a, 6, 3), S0))),
    "einsum": Program(
        lambda x, y: torch.einsum("ab,bc->ac", x, y), lambda a, b: (d((a, b), S0), d((b, 8), R))
    ),
    "product with its transpose": Program(lambda x: x @ x.t(), lambda a, b: (d((a, b), S0),)),
    # reductions and norms
    "sum of rows": Program(lambda x: x.sum(0), lambda a, b: (d((a, b), S0),)),
    "mean": Program(lambda x: x.mean(), lambda a, b: (d((a, b), S0),)),
    "mean and variance": Program(
        lambda x: (x.mean(1), x.var(1)), lambda a, b: (d((a, b), S0),), UNEVEN
    ),
    "greatest": Program(lambda x: (x.amax(1), x.argmax(1)), lambda a, b: (d((a, b), S0),)),
    "softmax": Program(lambda x: torch.softmax(x, 1), lambda a, b: (d((a, b), S0),)),
    "softmax along the shards": Program(
        lambda x: torch.log_softmax(x, 1), lambda a, b: (d((a, b), S1),)
    ),
    "layer norm": Program(
        lambda x, w, c: F.layer_norm(x, (8,), w, c),
        lambda a, b: (d((a, b, 8), S1), d((8,), R), d((8,), R)),
    ),
    "root mean square norm": Program(
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
        lambda a, b: (d((a, b, 8), S0), d((8,), R)),
    ),
    "norm": Program(lambda x: torch.linalg.vector_norm(x), lambda a, b: (d((a, b), S0),)),
    "cumsum": Program(lambda x: x.cumsum(1), lambda a, b: (d((a, b), S0),)),
    "topk": Program(lambda x: torch.topk(x, 2, 1), lambda a, b: (d((a, b), S0),)),
    # losses, lookups, attention
    "cross entropy": Program(F.cross_entropy, lambda a, b: (d((a, b), S0), ids(a, b, S0))),
    "mean squares": Program(F.mse_loss, lambda a, b: (d((a, b), S0), d((a, b), S0))),
    "embedding": Program(
        lambda i, w: F.embedding(i, w), lambda a, b: (ids(a, 8, S0), d((8, b), R))
    ),
    "embedding, rows sharded": Program(
        lambda i, w: redistributed(F.embedding(i, w), R), lambda a, b: (ids(a, 8, R), d((8, b), S0))
    ),
    "attention by hand": Program(
        attention, lambda a, b: (d((a, b, 8), S0), *(d((8, 8), R) for _ in range(4)))
    ),
    # joining and parting
    "cat": Program(lambda x, y: torch.cat([x, y], 1), lambda a, b: (d((a, b), S0), d((a, 4), S0))),
    "cat along the shards": Program(
        lambda x, y: torch.cat([x, y], 0), lambda a, b: (d((a, b), S0), d((4, b), S0))
    ),
    "stack": Program(lambda x, y: torch.stack([x, y]), lambda a, b: (d((a, b), S0), d((a, b), S0))),
    "split": Program(
        lambda x: [y * 2 for y in torch.split(x, 2, 1)], lambda a, b: (d((a, b), S0),)
    ),
    "chunk": Program(lambda x: [y * 2 for y in x.chunk(2, 1)], lambda a, b: (d((a, b), S0),)),
    "slice": Program(lambda x: x[:, 1:3] * 2, lambda a, b: (d((a, b), S0),)),
    "slice of the shards": Program(lambda x: x[1:5] * 2, lambda a, b: (d((a, b), S0),)),
    "rows by number": Program(
        lambda x, i: torch.index_select(x, 1, i), lambda a, b: (d((a, b), S0), ids(3, 4, R))
    ),
    "gather": Program(
        lambda x, i: torch.gather(x, 1, i),
        lambda a, b: (d((a, b), S0), d(torch.arange(a * 2).reshape(a, 2) % 4, S0)),
    ),
    "unbind": Program(lambda x: [y + 1 for y in torch.unbind(x, 1)], lambda a, b: (d((a, 3), S0),)),
    "triangle": Program(lambda x: torch.tril(x), lambda a, b: (d((2, a, b), S0),)),
    "flip and roll": Program(lambda x: x.flip(1) * 2, lambda a, b: (d((a, b), S0),)),
    # views
    "flatten": Program(lambda x: x.view(-1, x.shape[-1]) * 2, lambda a, b: (d((a, b, 3), S0),)),
    "transpose": Program(lambda x: x.t() * 2, lambda a, b: (d((a, b), S0),)),
    "a view of an input": Program(lambda x: x.transpose(0, 1), lambda a, b: (d((a, b), S0),)),
    "an input": Program(lambda x: x, lambda a, b: (d((a, b), S0),)),
    "expand": Program(
        lambda x: x.unsqueeze(1).expand(-1, 3, -1) * 2, lambda a, b: (d((a, b), S0),)
    ),
    # mutation
    "in place": Program(lambda x: (x * 2).add_(1).relu_(), lambda a, b: (d((a, b), S0),)),
    "mutation of an input": Program(mutate, lambda a, b: (d((a, b), S0, grad=False),)),
    "writing to an input": Program(write, lambda a, b: (d((a, b), S0, grad=False), d((a, b), S0))),
    "a step of Adam": Program(
        adam,
        lambda a, b: tuple([d((a, b), S0, grad=False), d((b,), R, grad=False)] for _ in range(4)),
    ),
    "norms of a list": Program(
        lambda xs: torch.stack([x.full_tensor() for x in torch._foreach_norm(xs)]),
        lambda a, b: ([d((a, b), S0), d((b,), S0)],),
    ),
    # local tensors, redistributions
    "from local": Program(
        lambda x, y: local(as_dtensor(x, S0, y) * 2),
        lambda a, b: (t(a, b).requires_grad_(), d((4,), R)),
    ),
    "to local": Program(lambda x: local(x * 2) + 1, lambda a, b: (d((a, b), S0),)),
    "to local, uneven": Program(lambda x: local(x * 2) + 1, lambda a, b: (d((a, b), S0),), UNEVEN),
    "redistribution": Program(
        lambda x: redistributed(x * 2, S1) + 1, lambda a, b: (d((a, b), S0),)
    ),
    "gathered": Program(lambda x: redistributed(x * 2, R) + 1, lambda a, b: (d((a, b), S0),)),
    "gathered, uneven": Program(
        lambda x: redistributed(x * 2, R) + 1, lambda a, b: (d((a, b), S0),), UNEVEN
    ),
    "scattered": Program(
        lambda x: redistributed(x, S0) * 2, lambda a, b: (as_dtensor(t(a, b), P),)
    ),
    "redistribution, two mesh dims": Program(
        lambda x: redistributed(x * 2, R, S0) + 1, lambda a, b: (d((a, b), S0, S1),)
    ),
    "whole": Program(lambda x: (x * 2).full_tensor(), lambda a, b: (d((a, b), S0),)),
    "from local, and another": Program(
        lambda x, y: local(as_dtensor(x, S0, y) @ y),
        lambda a, b: (t(a, b).requires_grad_(), d((b, 4), R)),
    ),
    # inputs and outputs
    "local tensors of inputs that are views": Program(
        lambda x: local(x * x), lambda a, b: (as_dtensor(t(a, b).requires_grad_(), S0),)
    ),
    "slices of one buffer": Program(lambda x: x * 2, lambda a, b: (slice_of_a_buffer(8, 12, a),)),
    "local tensors with gaps": Program(
        lambda x: x * 2, lambda a, b: (as_dtensor(t(b, a).t(), S0),)
    ),
    "two placements": Program(
        lambda x, y: (x * 2, y * 3), lambda a, b: (d((a, b), S0), d((a, b), S1))
    ),
    "several outputs": Program(
        lambda x: (x * 2, x.sum(), local(x), x.shape[0]), lambda a, b: (d((a, b), S0),)
    ),
    "dict of outputs": Program(
        lambda x: {"a": x * 2, "b": [x.detach(), None]}, lambda a, b: (d((a, b), S0),)
    ),
    "with plain tensors": Program(
        lambda x, y: (x * 2, y * 2), lambda a, b: (d((a, b), S0), t(b, a))
    ),
    "empty": Program(lambda x: x * 2, lambda a, b: (d((a, b), S0),), ((8, 4), (0, 4), (12, 4))),
    "one row": Program(
        lambda x: x * 2 + x.sum(1, keepdim=True),
        lambda a, b: (d((a, b), S1),),
        ((1, 8), (4, 8), (1, 12)),
    ),
    "fewer rows than devices": Program(
        lambda x: x * 2, lambda a, b: (d((a, b), S0),), ((3, 4), (2, 4), (5, 4))
    ),
    "detached": Program(lambda x: x.detach() * x, lambda a, b: (d((a, b), S0),)),
    "like": Program(
        lambda x: torch.zeros_like(x) + torch.ones_like(x) * x, lambda a, b: (d((a, b), S0),)
    ),
    "modules": Program(module(Nested), lambda a, b: (d((a, b, 8), S0),), gradients=False),
    "parallel modules": Program(module(parallel_mlp), lambda a, b: (t(a, 8),)),
    # ops on what only views make
    "product with strided columns": Program(
        lambda x, w: (x @ w.view(w.shape[0], -1)).relu(),
        lambda a, b: (d((a, b), R), d((b, 3, 8), S2)),
    ),
    "softmax of strided rows": Program(
        lambda x: x.view(-1, x.shape[-1]).softmax(1), lambda a, b: (d((3, a, b), S1),)
    ),
}
