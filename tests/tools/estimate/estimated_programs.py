"""Programs of which a step is estimated, and measured over gloo: functions that get a mesh, and
return one step. On a mesh of one dim that dim is of tensor parallelism; of two the last one.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, KEYS, HIDDEN, WORDS, BATCH, LENGTH = 32, 8, 4, 40, 37, 4, 10
R = Replicate()


def at_last(mesh, placement, others=R):
    """The placement on the last mesh dim, the other one before."""
    return [others] * (mesh.ndim - 1) + [placement]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_and_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_and_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.sizes = [HEADS * head, KEYS * head, KEYS * head]
        self.qkv = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            each.view(b, s, -1, WIDTH // HEADS).transpose(1, 2)
            for each in self.qkv(x).split(self.sizes, -1)
        )
        k, v = (y.repeat_interleave(HEADS // KEYS, 1) for y in (k, v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.gated = Attention(), Gated()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.gated(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(mesh):
    """Two fused layers, whose widths do not divide by every mesh; the batch is sharded."""
    model = nn.Sequential(Gated(), nn.LayerNorm(WIDTH), Gated())
    cuts = {"gate_and_up": Shard(0), "down": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        cut = at_last(mesh, cuts.get(owner.rpartition(".")[2], R))
        made = nn.Parameter(distribute_tensor(parameter.data, mesh, cut))
        setattr(model.get_submodule(owner), last, made)
    x = distribute_tensor(torch.randn(BATCH, LENGTH, WIDTH), mesh, at_last(mesh, R, Shard(0)))

    def step():
        y = model(x)
        y[:, 1:].flip(1).reshape(-1, WIDTH).square().mean().backward()

    return step


def parallelize(model, mesh):
    """Tensor and sequence parallelism on a mesh of one dim."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(R,))
    column = ColwiseParallel(use_local_output=False)
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    norm = SequenceParallel(use_local_output=False)
    words = RowwiseParallel(input_layouts=R, output_layouts=Shard(1), use_local_output=False)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"words": words, "norm": norm, "head": head})
    for block in model.blocks:
        plan = {
            "norm1": norm,
            "norm2": norm,
            "attention": whole,
            "gated": whole,
            "attention.qkv": column,
            "attention.out": row,
            "gated.gate_and_up": column,
            "gated.down": row,
        }
        parallelize_module(block, mesh, plan)


def transformer(mesh, layers=1):
    """Tensor and sequence parallelism, the loss of the next word; on two mesh dims the batch is
    sharded as well.
    """
    model = Transformer(layers)
    cuts = {"qkv": Shard(0), "gate_and_up": Shard(0), "head": Shard(0), "words": Shard(0)}
    cuts |= {"out": Shard(1), "down": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        cut = at_last(mesh, cuts.get(owner.rpartition(".")[2], R))
        made = nn.Parameter(distribute_tensor(parameter.data, mesh, cut))
        setattr(model.get_submodule(owner), last, made)
    by_sequence, whole = (at_last(mesh, p, Shard(0)) for p in (Shard(1), R))
    for module in (model.words, *(m for b in model.blocks for m in (b.attention, b.gated))):
        module.register_forward_hook(lambda _, x, y: y.redistribute(placements=by_sequence))
    for module in (model.head, *(m for b in model.blocks for m in (b.attention, b.gated))):
        module.register_forward_pre_hook(lambda _, x: x[0].redistribute(placements=whole))
    ids = distribute_tensor(torch.randint(0, WORDS, (BATCH, LENGTH)), mesh, whole)

    def step():
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))
        loss.backward()

    return step


def sharded(mesh, layers=2):
    """FSDP, on two mesh dims with tensor parallelism; an optimizer, and clipped gradients."""
    model = Transformer(layers)
    by_data = mesh
    if mesh.ndim == 2:
        by_data = mesh[mesh.mesh_dim_names[0]]
        parallelize(model, mesh[mesh.mesh_dim_names[1]])
    for block in model.blocks:
        fully_shard(block, mesh=by_data)
    fully_shard(model, mesh=by_data)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(0, WORDS, (BATCH // by_data.size(), LENGTH))

    def step():
        logits = model(ids)
        labels = ids
        if isinstance(logits, DTensor):
            labels = DTensor.from_local(ids, logits.device_mesh, [R], run_check=False)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


MODELS = (mlp, transformer, sharded)


# What does not run without elements, and what runs the step itself.


def reads_a_value(mesh):
    x = distribute_tensor(torch.randn(8), mesh, at_last(mesh, Shard(0)))
    return lambda: x.sum().item()


def runs_by_itself(mesh):
    x = DTensor.from_local(torch.randn(8), mesh, at_last(mesh, Shard(0)), run_check=False)
    x.redistribute(placements=at_last(mesh, R))


def takes_an_op_apart(mesh):
    """Of this loss torch has no rule: it finds one for the ops that it is made of."""
    x, y = (distribute_tensor(torch.zeros(8), mesh, [Shard(0), Replicate()]) for _ in range(2))

    def step():
        torch.nn.functional.binary_cross_entropy_with_logits(x, y).full_tensor()

    return step


def has_a_frozen_parameter(mesh):
    """As adapters are trained: a weight without a gradient, which a later step trains."""
    frozen, trained = (
        torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, at_last(mesh, Shard(0))))
        for _ in range(2)
    )
    model = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    model[0].weight, model[1].weight = frozen.requires_grad_(False), trained
    model = torch.nn.Sequential(*model)
    x = distribute_tensor(torch.randn(8, 8), mesh, at_last(mesh, R))

    def step():
        model(x).square().mean().backward()
        assert (frozen.grad is None) != frozen.requires_grad and trained.grad is not None
        frozen.requires_grad_(True)

    return step


def makes_a_mesh(mesh):
    """Another mesh of the same ranks, inside the function."""
    other = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.randn(8), other, [Shard(0)], run_check=False)
    return lambda: x.redistribute(placements=[R])


def raises(mesh):
    raise ValueError("there is no such model")


def grows_unevenly(mesh, layers):
    """Each layer sends more than the one before."""
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])

    def step():
        for _ in range(layers * layers):
            x.redistribute(placements=[R])

    return step


def weights_alone(mesh):
    """Weights that are in no module, of a norm for which GPUs have a kernel."""
    scale, up = (
        distribute_tensor(torch.ones(shape), mesh, [p]).requires_grad_()
        for shape, p in (((WIDTH,), R), ((WIDTH, WIDTH), Shard(0)))
    )
    x = distribute_tensor(torch.ones(BATCH, WIDTH), mesh, [R])
    optimizer = torch.optim.AdamW([scale, up])

    def step():
        F.linear(F.rms_norm(x, (WIDTH,), scale), up).sum().backward()
        optimizer.step()

    return step
