"""What a redistribution costs the host on a mesh of thousands of devices, ours beside torch's,
without a network: ``python -m benchmarks.host``.

One process poses as one rank of 4,096 with torch's fake backend. Tensors are small, so that what is
measured is Python, its caches and the launches. Cold is the first call.
"""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding

WORLD = 4096
ROUNDS = 10
R = Replicate()
CASES = {
    "all-reduce over two mesh dims": ((64, 64), (256, 64), [Partial(), Partial()], [R, R]),
    "S(0)S(1) -> S(1)S(0) over two dims of 8": (
        (64, 8, 8),
        (64, 64),
        [R, Shard(0), Shard(1)],
        [R, Shard(1), Shard(0)],
    ),
    "S(0)S(1) -> RR, even": ((512, 8), (1024, 64), [Shard(0), Shard(1)], [R, R]),
    "S(0)S(1) -> RR, uneven": ((512, 8), (1027, 67), [Shard(0), Shard(1)], [R, R]),
    "S(0)S(0) -> RR, uneven": ((512, 8), (4099, 4), [Shard(0), Shard(0)], [R, R]),
    "S(0) -> R, even": ((4096,), (8192, 2), [Shard(0)], [R]),
    "S(0) -> R, uneven": ((4096,), (50257, 2), [Shard(0)], [R]),
    "P -> S(0), uneven": ((4096,), (50257, 2), [Partial()], [Shard(0)]),
}


def tensor_of(mesh: DeviceMesh, shape: tuple[int, ...], placements: list) -> DTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = compute_local_shape_and_global_offset(shape, mesh, placements)[0]
    return DTensor.from_local(
        torch.zeros(local),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def cold(tensor: DTensor, after: list) -> float:
    begin = time.perf_counter()
    tensor.redistribute(placements=after)
    return time.perf_counter() - begin


def warm(tensor: DTensor, after: list, calls: int) -> tuple[float, float]:
    """(torch's, ours), seconds a call: the fastest tenth of ``calls`` each, in turns, so that what
    else runs on the machine falls on both.
    """
    stock: list[float] = []
    ours: list[float] = []
    for _ in range(ROUNDS):
        for switched_on, taken in ((False, stock), (True, ours)):
            with cute_sharding.enabled(redistribution=True) if switched_on else nullcontext():
                each = [cold(tensor, after) for _ in range(calls // ROUNDS + 2)]
            taken += each[2:]
    tenth = max(len(stock) // 10, 1)
    return sum(sorted(stock)[:tenth]) / tenth, sum(sorted(ours)[:tenth]) / tenth


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--prepared", action="store_true", help="after prepare_groups")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    print(f"{'':44}{'torch':>12}{'ours':>12}{'ratio':>8}{'cold, torch':>14}{'cold, ours':>12}")
    for name, (sizes, shape, before, after) in CASES.items():
        mesh = DeviceMesh("cpu", torch.arange(WORLD).reshape(sizes))
        if arguments.prepared:
            cute_sharding.prepare_groups(mesh)
        tensor = tensor_of(mesh, shape, before)
        cute_sharding.disable()
        cold_stock = cold(tensor, after)
        with cute_sharding.enabled(redistribution=True):
            cold_ours = cold(tensor, after)
        stock, ours = warm(tensor, after, arguments.calls)
        print(
            f"{name:44}{stock * 1e3:9.3f} ms{ours * 1e3:9.3f} "
            f"ms{ours / stock:8.2f}{cold_stock * 1e3:11.1f} ms{cold_ours * 1e3:9.1f} ms"
        )


if __name__ == "__main__":
    main()
