"""Programs whose collectives are joined, for test_joined.py."""

import torch
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_sharding

R = Replicate()


def sharded(mesh, rows, columns):
    full = torch.arange(float(rows * columns), dtype=torch.float64).reshape(rows, columns)
    return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)


def weights_and_input(mesh):
    """Four small weights, sharded as FSDP does, and gathered for a batch."""
    x = distribute_tensor(
        torch.ones(1 << 14, 64, dtype=torch.float64), mesh, [Shard(0)], src_data_rank=None
    )
    made = [
        torch.arange(64.0 * 64, dtype=torch.float64).reshape(64, 64).sin() / (i + 8)
        for i in range(4)
    ]
    weights = [distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None) for w in made]

    def program(x, *weights):
        whole = [w.redistribute(placements=[R]) for w in weights]
        h = x.repeat(1, 4) @ torch.cat(whole)
        for w in whole:
            h = (h @ w).sin()
        return h

    return program, (x, *weights)


def sums(mesh):
    """Sums of what ranks have, of which none depends on another, and a chain of them."""
    x = sharded(mesh, 256, 64).cos()

    def program(x):
        h = (x @ x.redistribute(placements=[R]).t()).sin()
        a = x.sum(0).redistribute(placements=[R])
        b = (x * 2).sin().sum(0).redistribute(placements=[R])
        c = ((x - a) * b).sum(0).redistribute(placements=[R])
        d = ((x + b) * a).sum(0).redistribute(placements=[R])
        return h.sum(1), a, b, c, d

    return program, (x,)


def rolls(mesh):
    """Exchanges that stand there twice."""
    x = sharded(mesh, 32, 8)

    def program(x):
        y = x.redistribute(placements=[Shard(1)])
        return x.roll(1, 0) * 2, x.roll(1, 0) + 1, y.sin(), x.redistribute(placements=[Shard(1)])

    return program, (x,)


PROGRAMS = {"weights": weights_and_input, "sums": sums, "rolls": rolls}


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(name):
    """On processes: compiled results and gradients are the eager ones."""
    mesh = init_device_mesh("cpu", (4,))
    program, args = PROGRAMS[name](mesh)
    for x in args:
        x.requires_grad_()

    def outcome(program):
        results = program(*args)
        results = results if isinstance(results, tuple) else (results,)
        sum(full(result).sum() for result in results).backward()
        gradients = [full(x.grad) for x in args]
        for x in args:
            x.grad = None
        return [*[full(result.detach()) for result in results], *gradients]

    with cute_sharding.enabled(redistribution=True, movement=True):
        wanted = outcome(program)
        torch._dynamo.reset()
        asked = config.patch("aten_distributed_optimizations.collective_bucketing", True)
        with asked:
            compiled = outcome(torch.compile(program))
        for found, whole in zip(compiled, wanted, strict=True):
            torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
