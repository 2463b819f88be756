"""Drawn programs of several parts that communicate and depend on nothing of one another, for
test_compiled_order.py: what compilers move as they like.
"""

import random

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13)


def _placed(y, rng, mesh_dims):
    kinds = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
    return [rng.choice(kinds) for _ in range(mesh_dims)]


def blocks(y, w):
    """Checkpointed blocks, one behind the other, the last with an op between."""

    def block(y):
        whole = [Replicate()] * y.device_mesh.ndim
        h = (y * y.redistribute(placements=whole).sum(0, keepdim=True)).tanh()
        return (h - h.sum(0).redistribute(placements=whole)).sin()

    for between in (False, True):
        y = checkpoint(block, y.cos() if between else y, use_reentrant=False)
    return checkpoint(block, y, use_reentrant=False)


def there_and_back(y, w):
    """What is kept of the checkpointed region is its own result, and what comes of it alone."""
    there, back = [Shard(1)] * y.device_mesh.ndim, y.placements

    def region(y):
        return y.redistribute(placements=there).redistribute(placements=back).log_softmax(1)

    return checkpoint(region, y, use_reentrant=False)


def parts(rng, rows, columns, mesh_dims):
    """The parts there are, by name: each from (y, w, a plain tensor) to a tensor."""
    to, back = _placed(None, rng, mesh_dims), [Replicate()] * mesh_dims
    other = [Shard(1)] * mesh_dims
    by, first = rng.randint(1, 3), rng.randint(0, max(rows - 1, 0))
    last = rng.randint(first, rows)
    return {
        "cat": lambda y, w: torch.cat([y, y.flip(0)], 0).abs(),
        "move": lambda y, w: y.redistribute(placements=other) * 2,
        "place": lambda y, w: y.redistribute(placements=to).tanh(),
        "sum": lambda y, w: y.sum(0).redistribute(placements=back).cos(),
        "product": lambda y, w: (y @ w).redistribute(placements=back).relu(),
        "gram": lambda y, w: (y.t() @ y).redistribute(placements=back).sin(),
        "roll": lambda y, w: y.roll(by, 0) * y,
        "slice": lambda y, w: y[first:last].exp(),
        "ends": lambda y, w: torch.cat([y[first:], y[:last]], 0).sin(),
        "pad": lambda y, w: F.pad(y, [0, 0, by, 0]).cos(),
        "flat": lambda y, w: y.view(-1).redistribute(placements=back).sin(),
        "halves": lambda y, w: y.unsqueeze(0).view(1, rows * columns).sin(),
        "mean": lambda y, w: (y - y.mean(0, keepdim=True)).sin(),
        "loss": lambda y, w: F.mse_loss(y.redistribute(placements=back), torch.ones_like(y) * 2),
        "classes": lambda y, w: F.cross_entropy(
            y.redistribute(placements=back), y.redistribute(placements=back).softmax(1)
        ),
        "softmax": lambda y, w: y.softmax(0),
        "blocks": blocks,
        "there and back": there_and_back,
        "columns": lambda y, w: y.redistribute(placements=other).softmax(1).sum(1),
    }


# Programs whose ranks once waited for one another: rows, columns, columns of w, and the parts.
WAITED = (
    ((12, 4, 5), ("cat", "move", "sum")),
    ((7, 9, 2), ("cat", "product")),
    ((5, 7, 5), ("sum", "cat", "move")),
)


def waited(case, world):
    """One of those, as :func:`draw` gives it."""
    (rows, columns, k), names = WAITED[case]
    found = parts(random.Random(0), rows, columns, 1)

    def made(mesh, rank):
        full = torch.arange(float(rows * columns)).reshape(rows, columns) / 7
        x = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        w = distribute_tensor(torch.ones(columns, k), mesh, [Replicate()], src_data_rank=None)

        def program(x, w):
            return [found[name]((x * (j + 1)).sin(), w) for j, name in enumerate(names)]

        return program, (x, w)

    return ", ".join(names), (world,), made


def draw(seed, world):
    """What it is called; the mesh; a function of it to (the program, its arguments). Below 0 one of
    WAITED.
    """
    if seed < 0:
        return waited(-1 - seed, world)
    rng = random.Random(seed)
    mesh_sizes = rng.choice([(world,), (world,), (world,)] + ([(2, 2)] if world == 4 else []))
    rows, columns, k = rng.choice(ROWS), rng.randint(1, 9), rng.randint(1, 6)
    kind = rng.choice([Shard(0), Shard(0), Shard(1), _StridedShard(0, split_factor=2)])
    placements = [kind] + [rng.choice([Shard(0), Shard(1), Replicate()])] * (len(mesh_sizes) - 1)
    found = parts(rng, rows, columns, len(mesh_sizes))
    names = [rng.choice(sorted(found)) for _ in range(rng.randint(2, 6))]
    has_gradients, is_heavy = rng.random() < 0.5, rng.random() < 0.3
    again = [rng.random() < 0.2 for _ in names]

    def made(mesh, rank):
        full = torch.arange(float(rows * columns)).reshape(rows, columns) / 7 - 1
        x = distribute_tensor(full, mesh, placements, src_data_rank=None)
        whole = [Replicate()] * len(mesh_sizes)
        weights = torch.arange(float(columns * k)).reshape(columns, k) / 5 - 1
        w = distribute_tensor(weights, mesh, whole, src_data_rank=None)
        # One rank alone computes ten times as much, and holds it.
        plain = torch.ones(4 * (10 if rank == 1 else 1), 16) if is_heavy else None

        def program(x, w, plain):
            results = []
            for j, name in enumerate(names):
                part, y = found[name], (x * (j + 1)).sin()
                if again[j] and has_gradients:
                    results.append(checkpoint(part, y * y, w, use_reentrant=False))
                else:
                    results.append(part(y, w))
            if plain is not None:
                held = [(plain * (i + 1)).exp() @ plain.t() for i in range(3)]
                results.append(sum(held[::-1]))
            return results

        x.requires_grad_(has_gradients)
        w.requires_grad_(has_gradients)
        return program, (x, w, plain)

    said = f"seed {seed}: ({rows}, {columns}) @ {k}, {placements} on {mesh_sizes}: " + ", ".join(
        name + "*" * (twice and has_gradients) for name, twice in zip(names, again)
    )
    return said + (", with gradients" if has_gradients else ""), mesh_sizes, made
