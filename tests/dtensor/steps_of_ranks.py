"""Compiles drawn programs as one rank of four and prints the collectives of their graphs, as JSON:
``python steps_of_ranks.py RANK``, a line for each line ``FIRST LAST DYNAMIC WRITES`` that it reads:
seeds, whether for any sizes, and whether they write to slices in place (2: of what has a gradient)
or have more rows (3).
For test_ranks_in_step.py.
"""

import json
import random
import sys
from functools import cache

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from writing_programs import program_to_compile

import cute_sharding

MESHES = [(4,), (4,), (2, 2)]
FEW, MORE = (1, 2, 3, 4, 5, 8), (2, 3, 8, 9, 11, 13, 16)  # rows
MOVES = (
    "c10d_functional.all",
    "c10d_functional.reduce",
    "cute_sharding.exchange",
)


def draw_placements(rng, mesh, shape):
    def one():
        dim = rng.randrange(len(shape))
        return rng.choice([Replicate(), Shard(dim), Shard(dim), _StridedShard(dim, split_factor=2)])

    return [one() for _ in mesh]


def draw_step(rng, mesh, shape):
    """(what it is called, the step, the shape it gives)."""
    dim = rng.randrange(len(shape))
    n = shape[dim]

    def resized(size):
        return (*shape[:dim], size, *shape[dim + 1 :])

    first, last = sorted((rng.randint(0, n), rng.randint(0, n)))
    placements, by = draw_placements(rng, mesh, shape), rng.randint(1, 3)
    at = (slice(None),) * dim
    joined = f"cat of [{first}:] and [:{last}] in {dim}"
    padding = [0, 0] * (len(shape) - 1 - dim) + [by, 0]

    def join(x):
        return torch.cat([x[(*at, slice(first, None))], x[(*at, slice(0, last))]], dim)

    def turn_halves(x):
        upper, lower = x.split([n // 2, n - n // 2], dim)
        return torch.cat([lower.cos(), upper], dim)

    kinds = [
        (f"redistribute {placements}", lambda x: x.redistribute(placements=placements), shape),
        (
            f"slice {dim} {first}:{last}",
            lambda x: x[(*at, slice(first, last))],
            resized(last - first),
        ),
        (f"roll {dim} {by}", lambda x: x.roll(by, dim), shape),
        (f"flip {dim}", lambda x: x.flip(dim), shape),
        (joined, join, resized(n - first + last)),
        (f"halves of {dim} turned", turn_halves, shape),
        (f"pad {dim} {by}", lambda x: torch.nn.functional.pad(x, padding), resized(n + by)),
        (f"sum {dim}", lambda x: x.sum(dim, keepdim=True) + x, shape),
    ]
    return rng.choice(kinds)


def draw(seed, sizes):
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    shape = first = tuple(rng.choice(sizes) for _ in range(rng.choice((1, 2, 2, 3))))
    placements = draw_placements(rng, mesh, shape)
    steps = []
    for _ in range(rng.randint(1, 4)):
        name, step, shape = draw_step(rng, mesh, shape)
        steps.append((name, step))
    return mesh, first, placements, steps


def collectives(graph):
    """What goes over the wire: (op, group, receives, sends)."""
    found = []
    for node in graph.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and any(part in name for part in MOVES):
            sizes = node.args[1:3] if "all_to_all" in name else ()
            found.append((name, str(node.args[-1]), *map(tuple, sizes)))
    return found


@cache
def mesh_of(sizes):
    """One for all programs: torch's partitioner fails on a mesh that is equal to an earlier one."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(sizes))
    cute_sharding.prepare_groups(mesh)
    return mesh


def graphs_of(program, x, is_dynamic):
    """The collectives of the forward graph and of the backward graph."""
    torch._dynamo.reset()
    seen = []

    def keep(graph, _):
        seen.append(collectives(graph))
        return graph

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    out = torch.compile(program, backend=backend, dynamic=bool(is_dynamic))(x)
    if x.requires_grad:
        sum(part.sum() for part in out if part.requires_grad).backward()
    return seen


def movements(seed, sizes):
    """(what it is called, the program, its operand)."""
    mesh, shape, placements, steps = draw(seed, sizes)
    x = distribute_tensor(torch.randn(shape), mesh_of(mesh), placements, src_data_rank=None)

    def program(x):
        for _, step in steps:
            x = step(x.sin()) * 2
        return [x]

    said = f"{shape} on {mesh}, {placements}: {'; '.join(name for name, _ in steps)}"
    return said, program, x.requires_grad_()


def writes(seed, gradients):
    rng = random.Random(seed)
    full = torch.arange(rng.choice([5, 6, 7, 8, 9, 12]) * 3.0).reshape(-1, 3)
    program = program_to_compile(rng, full, gradients)
    x = distribute_tensor(full, mesh_of((4,)), [Shard(0)], src_data_rank=None)
    return f"writes to {tuple(full.shape)}", program, x.requires_grad_(gradients)


def attempt(seed, is_dynamic, which):
    if which in (1, 2):
        said, program, x = writes(seed, which == 2)
    else:
        said, program, x = movements(seed, MORE if which else FEW)
    try:
        graphs = graphs_of(program, x, is_dynamic)
    except Exception as error:
        graphs = f"{type(error).__name__}: {str(error)[:300]}"
    is_line = x.device_mesh.ndim == 1
    return {"program": f"seed {seed}: {said}", "is_line": is_line, "graphs": graphs}


def answers(first, last, is_dynamic, which):
    with cute_sharding.enabled(views=True, redistribution=True, movement=True):
        return [attempt(seed, is_dynamic, which) for seed in range(first, last)]


if __name__ == "__main__":
    dist.init_process_group("fake", rank=int(sys.argv[1]), world_size=4, store=FakeStore())
    for line in sys.stdin:
        print(json.dumps(answers(*map(int, line.split()))), flush=True)
    dist.destroy_process_group()
