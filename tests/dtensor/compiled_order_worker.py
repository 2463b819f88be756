"""Runs programs, compiled by Inductor, on gloo processes of which each collective is compared with
the others' (``TORCH_DISTRIBUTED_DEBUG=DETAIL``), and compares results and gradients with eager's.

For test_compiled_order.py; by itself, with options of torch._inductor.config behind: ``torchrun
--standalone --nproc-per-node=3 compiled_order_worker.py FIRST LAST static|automatic|dynamic
[NAME=VALUE ...]``.
"""

import json
import os
import sys
from datetime import timedelta

import ordered_programs
import torch
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import cute_sharding

DYNAMIC = {"static": False, "automatic": None, "dynamic": True}


def gathered(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def outcome(program, args):
    """What a program gives, and the gradients of what it is given."""
    results = program(*args)
    differentiable = [r for r in results if r.requires_grad]
    if differentiable:
        ones = [torch.ones_like(r.detach()) for r in differentiable]
        torch.autograd.backward(differentiable, ones)
    gradients = [x.grad for x in args if isinstance(x, torch.Tensor) and x.grad is not None]
    found = [gathered(x.detach()) for x in (*results, *gradients)]
    for x in args:
        if isinstance(x, torch.Tensor):
            x.grad = None
    return found


def run(seed, world, rank, mesh_of, dynamic):
    """Says what the program is, once it is right."""
    said, sizes, made = ordered_programs.draw(seed, world)
    program, args = made(mesh_of(sizes), rank)
    torch._dynamo.reset()
    try:
        wanted = outcome(program, args)
    except RuntimeError as error:
        return f"{said}: raises eagerly: {str(error)[:100]}"
    compiled = torch.compile(program, dynamic=DYNAMIC[dynamic])
    for _ in range(2):  # the second time nothing is compiled
        for found, full in zip(outcome(compiled, args), wanted, strict=True):
            torch.testing.assert_close(found, full, atol=1e-4, rtol=1e-4, equal_nan=True, msg=said)
    return said


def run_all(seeds, dynamic, is_on=True):
    if is_on:
        cute_sharding.enable(views=True, redistribution=True, movement=True)
    meshes = {}

    def mesh_of(sizes):
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes)
        return meshes[sizes]

    for seed in seeds:
        said = run(seed, dist.get_world_size(), dist.get_rank(), mesh_of, dynamic)
        if dist.get_rank() == 0:
            print(said, flush=True)
    dist.barrier()


def start(rank, world, rendezvous, seeds, dynamic):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )
    run_all(seeds, dynamic)
    dist.destroy_process_group()


def main():
    first, last, dynamic, *options = sys.argv[1:]
    for option in options:
        name, value = option.split("=")
        *path, name = name.split(".")
        owner = torch._inductor.config
        for part in path:
            owner = getattr(owner, part)
        if hasattr(owner, name):
            setattr(owner, name, json.loads(value))
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_all(range(int(first), int(last)), dynamic, is_on="stock=1" not in options)
    os._exit(0)


if __name__ == "__main__":
    main()
