"""Residual networks drawn at random: what one rank receives in a step of each, by PyTorch alone or
by the rules that an environment switches on. PyTorch alone runs in a process that never imports the
package.

    python residual_programs.py MESH FIRST LAST     # e.g. 2,2 0 50: a line of JSON for each seed

As a module it gives the same networks on any tensors, for a comparison with one device.
"""

from __future__ import annotations

import json
import random
import sys

import torch
import torch.nn.functional as F
from recording_group import Recording, recording_mesh, size
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, placement_types

R = Replicate()


class Network:
    """One drawn network: its sizes, its parts, and how each of its tensors lies.

    Attributes:
        placements: of each tensor by its name, on a mesh of so many dims.
        by_width: whether the stream that blocks add to may be sharded along its last dim. A layer
            norm then moves the shards to another dim, for less; a later op may gather them.
    """

    def __init__(self, seed, ndim, *, by_width=False):
        rng = random.Random(f"residual {seed} {ndim}")
        w_too = "w" if by_width else ""
        self.rng, self.ndim = rng, ndim
        self.batch = rng.choice((2, 4, 8))
        self.tokens = rng.choice((4, 8, 16, 32))
        self.width = rng.choice((8, 16, 32, 64))
        self.words = rng.choice((16, 32, 96, 257))
        self.hidden = rng.choice((8, 16, 64, 128))
        self.heads = rng.choice((1, 2, 4, 8))
        self.placements, self.shapes = {}, {}
        self.start = rng.choice(("embedding", "embedding", "embedding", "given"))
        self.is_tied = rng.random() < 0.5
        self.with_positions = rng.random() < 0.6
        self.scale = rng.choice((None, None, self.width**0.5))
        self.loss = rng.choice(("squares", "entropy", "entropy", "none"))
        self.passes = rng.choice((1, 1, 2))
        # On a mesh of two dims, the first shards the batch or nothing.
        self.by_batch = ndim > 1 and rng.random() < 0.6
        b, t, w, v = self.batch, self.tokens, self.width, self.words
        if self.start == "embedding":
            self.tensor("table", (v, w), "vvr" + w_too)
            self.tensor("ids", (b, t), "r", integers=v)
        else:
            self.tensor("given", (b, t, w), "r" + w_too)
        if self.with_positions:
            self.tensor("positions", (t, w), "rrrv" + w_too)
        self.by_width = by_width
        self.blocks = [self.block(i) for i in range(rng.choice((1, 2, 3)))]
        if self.loss == "entropy":
            self.tensor("targets", (b, t), "r", integers=v)
            if not (self.is_tied and self.start == "embedding"):
                self.tensor("head", (v, w), "vr" + w_too)

    def tensor(self, name, shape, kinds, integers=0):
        """Each kind is a dim that the last mesh dim shards, v: 0, w: the last; or r: none."""
        kind = self.rng.choice(kinds)
        own = {"v": Shard(0), "w": Shard(len(shape) - 1), "r": R}[kind]
        of_batch = name in ("ids", "given", "targets") and self.by_batch
        first = [Shard(0) if of_batch else R] * (self.ndim - 1)
        self.placements[name] = [*first, own]
        self.shapes[name] = shape, integers

    def block(self, i):
        """A block: a list of branches, each (kind, options), and how they are joined."""
        rng = self.rng
        form = rng.choice(("before", "before", "after", "parallel", "parallel"))
        count = 2 if form == "parallel" else rng.choice((1, 2))
        norm = rng.choice(("layer", "layer", "own", "own", "none"))
        if norm != "none":
            for k in range(count):
                self.tensor(f"norm{i}.{k}", (self.width,), "r")
        return form, norm, [self.branch(f"{i}.{k}") for k in range(count)]

    def branch(self, name):
        rng, w, f = self.rng, self.width, self.hidden
        kind = rng.choice(("mlp", "mlp", "gated", "square", "attention", "short", "picked"))
        options = {
            "act": rng.choice(("relu", "gelu", "silu")),
            "bias": rng.random() < 0.3,
            "dropout": rng.random() < 0.2,
            "gamma": rng.random() < 0.25,
            "factor": rng.choice((None, None, 0.5)),
        }
        styles = [("v", "w"), ("v", "w"), ("r", "r"), ("w", "r"), ("r", "w"), ("v", "r")]
        up, down = rng.choice([*styles, ("w", "v")] if self.by_width else styles)
        if kind == "square":
            self.tensor(f"a{name}", (w, w), rng.choice((up, down) if self.by_width else "wr"))
        elif kind in ("mlp", "gated"):
            self.tensor(f"a{name}", (f, w), up)
            self.tensor(f"b{name}", (w, f), down)
            if kind == "gated":
                self.tensor(f"g{name}", (f, w), up)
        elif kind == "picked":
            self.tensor(f"table{name}", (self.words, w), "vrw" if self.by_width else "vr")
            self.tensor(f"ids{name}", (self.tokens,), "r", integers=self.words)
        else:
            for each in "qkv":
                self.tensor(f"{each}{name}", (w, w), up)
            self.tensor(f"o{name}", (w, w), down)
        if options["bias"] and kind != "picked":
            self.tensor(f"bias{name}", (w,), "r")
        if options["gamma"]:
            self.tensor(f"gamma{name}", (w,), "rrw" if self.by_width else "r")
        return kind, name, options

    # -- values ------------------------------------------------------------------------------------

    def values(self):
        """The tensors, on one device."""
        generator = torch.Generator().manual_seed(1)

        def value(shape, integers):
            if integers:
                return torch.randint(integers, shape, generator=generator)
            return torch.randn(shape, generator=generator) / max(shape[-1], 1) ** 0.5

        return {name: value(*some) for name, some in self.shapes.items()}

    def step(self, given):
        """Run the network forward and backward on its tensors; return what it computes last, and
        the gradients.
        """
        learned = [x for name, x in given.items() if x.is_floating_point()]
        for x in learned:
            x.requires_grad_()
        for _ in range(self.passes):
            result = self.forward(given)
            if self.loss != "none":
                result.backward()
            result = result.full_tensor() if isinstance(result, DTensor) else result.detach()
        return result, {name: x.grad for name, x in given.items() if x.is_floating_point()}

    def forward(self, given):
        h = F.embedding(given["ids"], given["table"]) if "table" in given else given["given"]
        if self.scale is not None:
            h = h * self.scale
        if self.with_positions:
            h = h + given["positions"]
        for i, (form, norm, branches) in enumerate(self.blocks):
            if form == "parallel":
                x = self.normed(given, norm, f"norm{i}.0", h)
                for branch in branches:
                    h = h + self.branched(given, branch, x)
            elif form == "before":
                for k, branch in enumerate(branches):
                    x = self.normed(given, norm, f"norm{i}.{k}", h)
                    h = h + self.branched(given, branch, x)
            else:
                for k, branch in enumerate(branches):
                    h = self.normed(
                        given, norm, f"norm{i}.{k}", h + self.branched(given, branch, h)
                    )
        if self.loss == "none":
            return h.relu()
        if self.loss == "squares":
            return (h * h).sum()
        head = given["head"] if "head" in given else given["table"]
        logits = F.linear(F.layer_norm(h, (self.width,)), head)
        return F.cross_entropy(logits.flatten(0, 1), given["targets"].flatten())

    def normed(self, given, norm, name, h):
        if norm == "none":
            return h
        weight = given[name]
        if norm == "layer":
            return F.layer_norm(h, (self.width,), weight)
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))

    def branched(self, given, branch, x):
        kind, name, options = branch
        act = getattr(F, options["act"])
        last = given.get(f"bias{name}")
        if kind == "square":
            y = act(F.linear(x, given[f"a{name}"], last))
        elif kind == "mlp":
            y = F.linear(act(F.linear(x, given[f"a{name}"])), given[f"b{name}"], last)
        elif kind == "gated":
            y = act(F.linear(x, given[f"g{name}"])) * F.linear(x, given[f"a{name}"])
            y = F.linear(y, given[f"b{name}"], last)
        elif kind == "picked":
            y = F.embedding(given[f"ids{name}"], given[f"table{name}"]) * x
        else:
            q, k, v = (F.linear(x, given[each + name]) for each in "qkv")
            y = self.attended(kind, q, k, v)
            y = F.linear(y, given[f"o{name}"], last)
        if options["factor"] is not None:
            y = y * options["factor"]
        if options["gamma"]:
            y = given[f"gamma{name}"] * y
        if options["dropout"]:
            y = F.dropout(y, 0.0)
        return y

    def attended(self, kind, q, k, v):
        if kind == "short":  # one head
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v
        b, t, w = self.batch, self.tokens, self.width
        q, k, v = (y.view(b, t, self.heads, w // self.heads).transpose(1, 2) for y in (q, k, v))
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return y.transpose(1, 2).reshape(b, t, w)


def distributed(network, mesh):
    return {
        name: distribute_tensor(x, mesh, network.placements[name])
        for name, x in network.values().items()
    }


def exchange_blocks(x, gather_dim, shard_dim, mesh, mesh_dim):
    """In place of PyTorch's all-to-all, which on CPUs gathers everything: as on accelerators."""
    n = mesh.size(mesh_dim)
    whole = torch.cat([x] * n, gather_dim)
    Recording.events.append(("all-to-all", size(x) // n * (n - 1)))
    return whole.chunk(n, shard_dim)[mesh.get_local_rank(mesh_dim)].contiguous()


def main(mesh, first, last, only=None):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = tuple(map(int, mesh.split(",")))
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    on = recording_mesh(*sizes)
    placement_types.shard_dim_alltoall = exchange_blocks
    for seed in range(int(first), int(last)):
        network = Network(seed, len(sizes))
        try:
            given = distributed(network, on)
            Recording.events.clear()
            network.step(given)
            found = {"bytes": sum(n for _, n in Recording.events), "count": len(Recording.events)}
        except Exception as error:  # PyTorch alone refuses some
            if only:
                raise
            found = {"error": f"{type(error).__name__}: {error}"[:160]}
        print(json.dumps({"seed": seed, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
