"""Programs of ops of every kind, drawn one op after the other, and what they do: the placements
that each op gives, what is sent, and the values that each rank has.
"""

import hashlib
import random
from math import prod

import torch
import torch.nn.functional as F
from simulation import distribute, mesh_of, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

MESHES = [(2,), (3,), (4,), (2, 2)]
SHAPES = [(6, 4), (7, 3), (4, 6, 2), (2, 6, 4), (3, 5), (8, 4), (1, 6), (12,), (5, 2, 3)]


def reshaped(rng, shape):
    """A shape of as many elements."""
    n = prod(shape)
    found, left = [], n
    while left > 1 and len(found) < 3:
        f = rng.choice([d for d in range(1, left + 1) if left % d == 0])
        found.append(f)
        left //= f
    return (*found, left) if left > 1 or not found else tuple(found)


def along(d, a, b):
    return (*[slice(None)] * d, slice(a, b))


def written(x, d, a, b):
    y = x.clone()
    y[along(d, a, b)].mul_(3.0)
    y.narrow(d, 0, 1).add_(1.0)
    return y


# By name, of a tensor x, a dim d of it, rows from a to b, and a shape of as many elements.
STEPS = {
    "pointwise": lambda x, d, a, b, shape: (x * 2 + 1).sin(),
    "clone": lambda x, d, a, b, shape: x.clone(),
    "loss": lambda x, d, a, b, shape: x.pow(2).mean(),
    "view": lambda x, d, a, b, shape: x.view(shape),
    "reshape": lambda x, d, a, b, shape: x.reshape(shape),
    "permute": lambda x, d, a, b, shape: x.permute(*reversed(range(x.dim()))),
    "transpose": lambda x, d, a, b, shape: x.transpose(0, -1),
    "slice": lambda x, d, a, b, shape: x[along(d, a, b)],
    "narrow": lambda x, d, a, b, shape: x.narrow(d, a, b - a),
    "select": lambda x, d, a, b, shape: x.select(d, 0),
    "flip": lambda x, d, a, b, shape: x.flip(d),
    "roll": lambda x, d, a, b, shape: x.roll(a, d),
    "cat": lambda x, d, a, b, shape: torch.cat([x, x.flip(d)], d),
    "chunk": lambda x, d, a, b, shape: sum(y.sum(d, keepdim=True) for y in x.chunk(2, d)),
    "pad": lambda x, d, a, b, shape: F.pad(x, (a, 1)),
    "written": lambda x, d, a, b, shape: written(x, d, a, b),
    "softmax": lambda x, d, a, b, shape: x.softmax(d),
    "cumsum": lambda x, d, a, b, shape: x.cumsum(d),
    "sort": lambda x, d, a, b, shape: x.sort(d)[0],
    "sum": lambda x, d, a, b, shape: x.sum(d),
    "sum, kept": lambda x, d, a, b, shape: x.sum(d, keepdim=True),
    "amax": lambda x, d, a, b, shape: x.amax(d),
    "argmax": lambda x, d, a, b, shape: x.argmax(d).float(),
    "any": lambda x, d, a, b, shape: (x > 0).any(d).float(),
    "norm": lambda x, d, a, b, shape: torch.linalg.vector_norm(x, dim=d),
    "centred": lambda x, d, a, b, shape: x - x.mean(d, keepdim=True),
    "layer_norm": lambda x, d, a, b, shape: F.layer_norm(x, x.shape[-1:]),
    "matmul": lambda x, d, a, b, shape: x.transpose(-1, -2) @ x,
    "dropout": lambda x, d, a, b, shape: F.dropout(x, 0.5),
    "uniform": lambda x, d, a, b, shape: x + torch.rand_like(x),
}
OF_MATRICES = ("layer_norm", "matmul", "product", "transpose")
OF_NUMBERS = ("pointwise", "clone", "reshape", "loss")


def draw_step(rng, shape):
    """(name, d, a, b, shape, the kind of placement) of an op on a tensor of that shape."""
    ndim = len(shape)
    names = [
        name
        for name in (*STEPS, "view", "redistribute", "product", "product")
        if (ndim or name in OF_NUMBERS) and (ndim > 1 or name not in OF_MATRICES)
    ]
    d = rng.randrange(ndim) if ndim else 0
    a, b = sorted([rng.randint(0, shape[d] if ndim else 1) for _ in range(2)])
    return rng.choice(names), d, a, b, reshaped(rng, shape), rng.randrange(3)


def run_step(x, step, distribute):
    """The result; ``distribute(full, placements)`` makes DTensors, of what a step needs beside."""
    name, d, a, b, shape, kind = step
    if name == "redistribute":
        if not isinstance(x, DTensor):
            return x
        placements = [[Replicate(), Shard(d), Shard(0)][kind], Replicate()]
        return x.redistribute(placements=placements[: x.device_mesh.ndim])
    if name == "product":
        w = torch.linspace(-1, 1, x.shape[-1] * 3).reshape(x.shape[-1], 3)
        return x @ distribute(w, [[Replicate(), Shard(0), Shard(1)][kind], Replicate()])
    return STEPS[name](x, d, a, b, shape)


def draw_program(seed):
    """(mesh, shape, placements, the random numbers of its steps)"""
    rng = random.Random(f"stranger {seed}")
    mesh, shape = rng.choice(MESHES), rng.choice(SHAPES)
    kinds = [Replicate(), Partial()] + [Shard(d) for d in range(len(shape))] * 2
    return mesh, shape, [rng.choice(kinds) for _ in mesh], rng


class Sent(TorchDispatchMode):
    """Notes each collective and what rank 0 gives to it."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("_c10d_functional", "_dtensor", "c10d") and "wait" not in func.name():
            first = args[0][0] if isinstance(args[0], list) else args[0]
            local = getattr(first, "_local_tensors", {0: first})[0]
            self.events.append(f"sends {func._opname} {tuple(local.shape)} {local.dtype}")
        return func(*args, **(kwargs or {}))


def told(x):
    """What a result is: shape, placements, and a digest of what each rank has."""
    if not isinstance(x, DTensor):
        return repr(type(x))
    local = x._local_tensor
    digest = hashlib.sha1(usedforsecurity=False)
    for _, part in sorted(getattr(local, "_local_tensors", {0: local}).items()):
        digest.update(repr((part.shape, part.stride(), part.tolist())).encode())
    placements = " ".join(map(str, x.placements))
    return f"{tuple(x.shape)} {placements} {digest.hexdigest()[:12]}"


def events_of(seed, between=lambda: None):
    """What the program does, in order; ``between`` is called before each op."""
    mesh, shape, placements, rng = draw_program(seed)
    with ranks_of(mesh), Sent() as sent:
        events = sent.events
        torch.manual_seed(seed)
        mesh_of(mesh)
        full = (torch.arange(float(prod(shape))) * 7 % 11 - 5).reshape(shape)
        leaf = x = distribute(full, mesh, placements, requires_grad=Partial() not in placements)
        made = lambda full, cuts: distribute(full, mesh, cuts[: len(mesh)])  # noqa: E731
        for _ in range(rng.randint(2, 6)):
            step = draw_step(rng, tuple(x.shape))
            between()
            try:
                x = run_step(x, step, made)
            except Exception as error:
                events.append(f"{step[0]} raises {type(error).__name__}")
                break
            events.append(f"{step[0]} {told(x)}")
        between()
        try:
            if leaf.requires_grad and x.requires_grad:
                (grad,) = torch.autograd.grad(x.float().pow(2).sum(), leaf)
                events.append(f"gradient {told(grad)}")
        except Exception as error:
            events.append(f"backward raises {type(error).__name__}")
    return events
