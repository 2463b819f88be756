"""Runs drawn programs, compiled by Inductor, on gloo processes that compare each collective with
the others (``TORCH_DISTRIBUTED_DEBUG=DETAIL``), and compares results and gradients with eager's:
``torchrun compiled_order_worker.py FIRST LAST DYNAMIC [NAME=VALUE ...]``, the latter options of
torch._inductor.config. Prints a line a program, as JSON; the first that fails is the last.

For test_compiled_order.py.
"""

import json
import os
import sys
from datetime import timedelta

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"

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


def attempt(seed, world, rank, dynamic):
    said, sizes, made = ordered_programs.draw(seed, world)
    mesh = MESHES.setdefault(sizes, init_device_mesh("cpu", sizes))
    program, args = made(mesh, rank)
    torch._dynamo.reset()
    try:
        wanted = outcome(program, args)
    except Exception as error:
        return f"{said}: eager raises {type(error).__name__}: {str(error)[:200]}", True
    compiled = torch.compile(program, dynamic=DYNAMIC[dynamic])
    try:
        for _ in range(2):  # the second time nothing is compiled
            found = outcome(compiled, args)
            if not all(
                torch.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True)
                for a, b in zip(found, wanted, strict=True)
            ):
                return f"{said}: WRONG", False
    except Exception as error:
        return f"{said}: RAISES {type(error).__name__}: {str(error)[:1500]}", False
    return f"{said}: right", True


MESHES = {}


def main():
    first, last, dynamic, *options = sys.argv[1:]
    for option in options:
        name, value = option.split("=")
        if name == "stock":
            continue
        *path, name = name.split(".")
        owner = torch._inductor.config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, json.loads(value))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if "stock=1" not in options:
        cute_sharding.enable(views=True, redistribution=True, movement=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(int(first), int(last)):
        said, is_right = attempt(seed, world, rank, dynamic)
        print(json.dumps({"rank": rank, "said": said, "right": is_right}), flush=True)
        if not is_right:
            os._exit(1)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
