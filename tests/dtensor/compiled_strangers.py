"""Stranger programs that are compiled: how they are drawn, and what they give on gloo. For
test_no_history.py and compiled_history_worker.py.
"""

import json
import random
import types
from functools import cache
from math import prod
from pathlib import Path

import stranger_programs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_sharding


@cache
def mesh_of(sizes):
    return DeviceMesh("cpu", torch.arange(prod(sizes)).reshape(sizes))


def draw(seed, meshes):
    """(mesh, shape, placements, whether it is compiled for any sizes, whether by Inductor, steps)
    of what a single device can do, and of no random numbers.
    """
    rng = random.Random(f"compiled {seed}")
    mesh, shape = rng.choice(meshes), rng.choice(stranger_programs.SHAPES)
    kinds = [Replicate(), *[Shard(d) for d in range(len(shape))] * 2]
    placements = [rng.choice(kinds) for _ in mesh]
    for_any_sizes, by_inductor = rng.random() < 0.5, rng.random() < 0.2
    steps, full = [], torch.zeros(shape)
    for _ in range(rng.randint(2, 5)):
        step = stranger_programs.draw_step(rng, tuple(full.shape))
        if step[0] in ("dropout", "uniform"):
            continue
        try:
            full = stranger_programs.run_step(full, step, lambda full, _: full)
        except RuntimeError:  # strides that do not fit a view
            continue
        steps.append(step)
    return mesh, shape, placements, for_any_sizes, by_inductor, steps


def whole(shape):
    return (torch.arange(float(prod(shape))) * 7 % 11 - 5).reshape(shape)


def distributed(full, mesh, placements):
    return distribute_tensor(full, mesh_of(mesh), placements[: len(mesh)], src_data_rank=None)


def program_of(seed, mesh, shape, steps):
    """The program: a function of a tensor, of code of its own, which the compiler knows it by. What
    it multiplies by it has from outside.
    """
    weights = []

    def keep(full, placements):
        weights.append(placements and distributed(full, mesh, placements))
        return full

    full = whole(shape)
    for step in steps:
        full = stranger_programs.run_step(full, step, keep)

    def program(x):
        found = iter(weights)
        for step in steps:
            x = stranger_programs.run_step(x, step, lambda *_: next(found))
        return x * 2

    code = program.__code__.replace(co_name=f"program_{seed}")
    closure = program.__closure__
    return types.FunctionType(code, program.__globals__, f"program_{seed}", None, closure)


def called(program, x):
    """What it gives, and the gradient of what it is given."""
    result = program(x)
    if not result.requires_grad:
        return [result]
    return [result, *torch.autograd.grad(result.float().pow(2).sum(), x)]


def told(x):
    if not isinstance(x, DTensor):
        return repr(type(x))
    return f"{tuple(x.shape)} {x.stride()} {x.placements} {tuple(x.to_local().shape)}"


def values(seeds, settings, file):
    """What each program gives on this rank, compiled, in that order; and that it is what it gives
    eagerly, where it is compiled for any sizes in placements that may be others. In the file, with
    the rank behind.
    """
    mesh, found = (dist.get_world_size(),), {}
    for seed in seeds:
        _, shape, placements, for_any_sizes, _, steps = draw(seed, [mesh])
        with cute_sharding.enabled(**settings):
            x = distributed(whole(shape), mesh, placements).requires_grad_()
            program = program_of(seed, mesh, shape, steps)
            compiled = torch.compile(program, backend="aot_eager", dynamic=for_any_sizes)
            try:
                results = called(compiled, x)
            except RuntimeError as error:  # what torch refuses to trace
                found[seed] = [type(error).__name__]
                continue
            for actual, expected in zip(results, called(program, x), strict=True):
                torch.testing.assert_close(actual.full_tensor(), expected.full_tensor())
                if not for_any_sizes:
                    assert actual.placements == expected.placements
                    torch.testing.assert_close(actual.to_local(), expected.to_local())
        found[seed] = [f"{told(x)} {x.to_local().tolist()}" for x in results]
    Path(f"{file}-{dist.get_rank()}").write_text(json.dumps(found))
