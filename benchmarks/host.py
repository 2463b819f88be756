"""What a redistribution costs the host on a mesh of thousands of devices, ours beside torch's,
without a network: ``python -m benchmarks.host``.

A process of each side, torch's without the package, poses as one rank of 4,096 with torch's fake
backend. Tensors are small, so that what is measured is Python, its caches and the launches. Cold is
the first call.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from benchmarks.sides import Side, torch_alone, with_flags

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


# What a process keeps between calls: the tensor, and where it goes.
_now: dict[str, Any] = {}


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


def cold(name: str, prepared: bool) -> float:
    """The seconds of the first redistribution."""
    sizes, shape, before, after = CASES[name]
    mesh = DeviceMesh("cpu", torch.arange(WORLD).reshape(sizes))
    if prepared:
        import cute_sharding

        cute_sharding.prepare_groups(mesh)
    _now.update(tensor=tensor_of(mesh, shape, before), after=after)
    return once()


def once() -> float:
    begin = time.perf_counter()
    _now["tensor"].redistribute(placements=_now["after"])
    return time.perf_counter() - begin


def several(calls: int) -> list[float]:
    return [once() for _ in range(calls + 2)][2:]


def warm(sides: Sequence[Side], calls: int) -> list[float]:
    """Seconds a call of each side: the fastest tenth of ``calls`` each, in turns, so that what else
    runs on the machine falls on all.
    """
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for some, side in zip(taken, sides):
            some += side.call(several, max(calls // ROUNDS, 1))[0]
    tenth = max(len(taken[0]) // 10, 1)
    return [sum(sorted(some)[:tenth]) / tenth for some in taken]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--prepared", action="store_true", help="ours after prepare_groups")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{'':44}{'torch':>12}{'ours':>12}{'ratio':>8}{'cold, torch':>14}{'cold, ours':>12}")
    flags, posed = {"USE_CUTE_REDISTRIBUTION": "1"}, (0, WORLD)
    with torch_alone(poses_as=posed) as torchs, with_flags(flags, poses_as=posed) as here:
        for name in CASES:
            [cold_stock] = torchs.call(cold, name, False)
            [cold_ours] = here.call(cold, name, arguments.prepared)
            stock, ours = warm((torchs, here), arguments.calls)
            print(
                f"{name:44}{stock * 1e3:9.3f} ms{ours * 1e3:9.3f} ms{ours / stock:8.2f}"
                f"{cold_stock * 1e3:11.1f} ms{cold_ours * 1e3:9.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
