"""Loading a mixture of experts from a trainer's shards into an engine: what planning takes and what
is received, beside whole tensors.

    python -m benchmarks.loads [--layers 94] [--experts 128] [--trainer 4] [--engine 2]

The trainer has FSDP's shards on processes of its own, the engine tensor parallelism; hidden sizes
are small, as planning does not depend on them. Planning is timed in CPU seconds of the busiest
rank, beside the loader's own on the same whole tensors without data; a run beside gathering each
tensor on all ranks and loading it.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cute_sharding import plan_load

HIDDEN, EXPERT, HEADS = 16, 16, 32
DTYPE = torch.bfloat16


def shapes_of(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """The weights of a checkpoint, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        below = f"model.layers.{layer}"
        for expert in range(experts):
            for part in ("gate_proj", "up_proj"):
                found[f"{below}.mlp.experts.{expert}.{part}.weight"] = EXPERT, HIDDEN
            found[f"{below}.mlp.experts.{expert}.down_proj.weight"] = HIDDEN, EXPERT
        for part, rows in (("q", HEADS), ("k", HEADS // 2), ("v", HEADS // 2)):
            found[f"{below}.self_attn.{part}_proj.weight"] = rows, HIDDEN
        found[f"{below}.self_attn.o_proj.weight"] = HIDDEN, HEADS
        for part in ("input_layernorm", "post_attention_layernorm", "gate"):
            found[f"{below}.{part}.weight"] = (HIDDEN,)
    return found


def engine_of(layers: int, experts: int, ranks: int, rank: int) -> tuple[Any, Callable[..., None]]:
    """An engine's tensors on one of its ranks, and its loader."""
    into: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        into[f"{layer}.w13"] = torch.zeros(experts, 2 * EXPERT // ranks, HIDDEN, dtype=DTYPE)
        into[f"{layer}.w2"] = torch.zeros(experts, HIDDEN, EXPERT // ranks, dtype=DTYPE)
        into[f"{layer}.qkv"] = torch.zeros(2 * HEADS // ranks, HIDDEN, dtype=DTYPE)
        into[f"{layer}.o"] = torch.zeros(HIDDEN, HEADS // ranks, dtype=DTYPE)
        for part in ("input_layernorm", "post_attention_layernorm", "gate"):
            into[f"{layer}.{part}"] = torch.zeros(HIDDEN, dtype=DTYPE)
    rows = {
        "q_proj": (0, HEADS),
        "k_proj": (HEADS, HEADS // 2),
        "v_proj": (3 * HEADS // 2, HEADS // 2),
    }

    def load(weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            layer, *path = name.split(".")[2:-1]
            part, many = path[-1], EXPERT // ranks
            if part in ("gate_proj", "up_proj"):
                onto = into[f"{layer}.w13"].data[int(path[2])]
                onto = onto.narrow(0, many if part == "up_proj" else 0, many)
                onto.copy_(weight.narrow(0, rank * many, many))
            elif part == "down_proj":
                into[f"{layer}.w2"].data[int(path[2])].copy_(weight.narrow(1, rank * many, many))
            elif part in rows:
                first, size = (n // ranks for n in rows[part])
                onto = into[f"{layer}.qkv"].data.narrow(0, first, size)
                onto.copy_(weight.narrow(0, rank * size, size))
            elif part == "o_proj":
                size = HEADS // ranks
                into[f"{layer}.o"].data.copy_(weight.narrow(1, rank * size, size))
            else:
                into[f"{layer}.{part}"].data.copy_(weight)

    return into, load


def measure(rank: int, args: argparse.Namespace, file: str) -> None:
    torch.set_num_threads(1)
    world = args.trainer + args.engine
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    shapes = shapes_of(args.layers, args.experts)
    mesh = DeviceMesh("cpu", list(range(args.trainer)))
    source, load, into, own = None, None, None, 0.0
    if rank < args.trainer:
        source = {}
        for k, (name, shape) in enumerate(shapes.items()):
            local = torch.full((shape[0] // args.trainer, *shape[1:]), k % 97, dtype=DTYPE)
            source[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    else:
        into, load = engine_of(args.layers, args.experts, args.engine, rank - args.trainer)
        whole = {
            n: torch.full(shape, k % 97, dtype=DTYPE) for k, (n, shape) in enumerate(shapes.items())
        }
        begin = time.process_time()
        load(whole)
        own = time.process_time() - begin
        wanted = {name: x.clone() for name, x in into.items()}
        for x in into.values():
            x.zero_()
    dist.barrier()
    begin = time.process_time()
    plan = plan_load(load, into, source)
    planning = time.process_time() - begin
    plan.run(source)  # the first also makes each message's copies
    first = time.process_time() - begin - planning
    assert into is None or all(torch.equal(x, wanted[name]) for name, x in into.items())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bytes_of_all = sum(torch.Size(shape).numel() for shape in shapes.values()) * DTYPE.itemsize
    figures: list[Any] = [None] * world
    dist.all_gather_object(figures, (planning, first, own, plan.received_bytes, memory))
    if rank == 0:
        report(args, len(shapes), bytes_of_all, figures)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, names: int, whole: int, figures: list[Any]) -> None:
    planning, first, own, received, memory = (max(column) for column in zip(*figures))
    print(f"{names:,} names, {args.trainer} ranks of a trainer, {args.engine} of an engine")
    print(f"the loader itself, on whole tensors   {own:.2f} s of CPU on the busiest rank")
    print(f"plan_load                             {planning:.2f} s, {planning / own:.1f}x")
    print(f"the first run                         {first:.2f} s, {first / own:.1f}x")
    print(
        f"received by the busiest rank          {received:,} bytes, of {whole:,} of whole tensors"
    )
    print(f"memory of a process, with torch       {memory / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--trainer", type=int, default=4)
    parser.add_argument("--engine", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        world = args.trainer + args.engine
        multiprocessing.spawn(measure, args=(args, f"{folder}/rendezvous"), nprocs=world)


if __name__ == "__main__":
    main()
