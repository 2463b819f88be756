"""Redistribution beside torch's own, in one run: real gloo processes, the same tensors, the two in
turn.

    python -m benchmarks.redistribution [--processes 4] [--megabytes 64] [--repeat 5] [--pairs 20]

Prints for each pair of placements the times, what the busiest rank receives, the collectives and
the peak memory of both, and whether torch's result is right. Times are the slowest rank's, the
median of the repetitions; a ratio below 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode


def S(dim: int, split_factor: int = 1) -> Any:
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


R, P = Replicate(), Partial()
# (mesh, rows and columns do not divide, source, target)
PAIRS = [
    ((4,), False, [S(0)], [R]),
    ((4,), False, [S(1)], [R]),
    ((4,), False, [S(0)], [S(1)]),
    ((4,), False, [S(1)], [S(0)]),
    ((4,), False, [R], [S(1)]),
    ((4,), True, [S(0)], [S(1)]),
    ((4,), True, [S(1)], [R]),
    ((4,), False, [S(0)], [S(0, 4)]),
    ((4,), False, [S(0, 8)], [S(1)]),
    ((4,), False, [S(1, 2)], [R]),
    ((4,), False, [P], [S(0)]),
    ((4,), False, [P], [R]),
    ((2, 2), False, [S(0), S(1)], [S(1), S(0)]),
    ((2, 2), False, [S(0), S(0)], [R, S(0)]),
    ((2, 2), False, [S(0), S(1)], [R, R]),
    ((2, 2), False, [S(0), S(0)], [S(1), S(1)]),
    ((2, 2), False, [R, S(0)], [S(0), R]),
    ((2, 2), False, [S(0, 2), S(0)], [S(0), S(1)]),
    ((2, 2), False, [P, S(0)], [S(0), R]),
    ((2, 2), False, [P, P], [S(1), R]),
]


class Watch(TorchDispatchMode):
    """Counts collectives, the elements that this rank receives, and the storages alive at once."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.collectives = self.received = 0
        self.alive = self.peak = 0
        self.seen = {given.untyped_storage()._cdata}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if "c10d" in name or "_dtensor" in name:
            self._count(name.split("::")[-1].split(".")[0], args, result)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if type(tensor) is torch.Tensor:
                self._watch(tensor.untyped_storage())
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        self.collectives += 1
        if name == "all_gather_into_tensor":
            self.received += result.numel() - args[0].numel()
        elif name == "reduce_scatter_tensor":
            self.received += args[0].numel() - result.numel()
        elif name == "all_reduce":
            group = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[2]))
            self.received += 2 * (group - 1) * args[0].numel() // group
        elif name == "all_to_all_single":
            group = dist.distributed_c10d._resolve_process_group(args[3])
            self.received += sum(args[1]) - args[1][dist.get_rank(group)]
        elif name == "shard_dim_alltoall":
            group = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[3]))
            self.received += (group - 1) * result.numel() // group
        else:
            raise AssertionError(f"{name} is not counted")

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen or not storage.nbytes():
            return
        self.seen.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size


def worker(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    import cute_sharding

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=arguments.processes
    )
    from torch.distributed.device_mesh import init_device_mesh

    meshes = {shape: init_device_mesh("cpu", shape) for shape in {pair[0] for pair in PAIRS}}
    side = math.isqrt(arguments.megabytes * 2**20 // 4)
    ratios = []
    if rank == 0:
        print(
            f"{'mesh':8} {'from':22} {'to':22} {'ours ms':>8} {'torch ms':>9} {'ratio':>6}   "
            f"{'received':>17}   {'collectives':>11}   {'peak MB':>11}   torch is"
        )
    for shape, odd, source, target in PAIRS[: arguments.pairs]:
        full = torch.arange(float((side + odd) * (side - odd))).reshape(side + odd, side - odd)
        mesh = meshes[shape]
        start = _start(full, mesh, source)
        with cute_sharding.enabled(views=False):
            want = (
                _start(full, mesh, target).to_local()
                if not any(p.is_partial() for p in source)
                else None
            )
        measured: dict[str, tuple[int, int, int, str]] = {}
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for turn in range(1 + arguments.repeat):
            for name in ("ours", "torch") if turn % 2 == 0 else ("torch", "ours"):
                with cute_sharding.enabled(redistribution=name == "ours", views=False):
                    if turn == 0:
                        measured[name] = _measure(start, target, want)
                    elif not measured[name][-1].startswith("raises"):
                        times[name].append(_time(start, target))
        ours, torchs = (
            (statistics.median(times[name] or [math.inf]), *measured[name])
            for name in ("ours", "torch")
        )
        assert ours[4] == "right", (source, target)
        ratios.append(ours[0] / torchs[0] if torchs[4] == "right" else math.nan)
        if rank == 0:
            names = [", ".join(map(str, placements)) for placements in (source, target)]
            received, count, peak = (f"{ours[i]:,}/{torchs[i]:,}" for i in (1, 2, 3))
            print(
                f"{shape!s:8} {names[0]:22} {names[1]:22} {ours[0] * 1e3:8.1f} "
                f"{torchs[0] * 1e3:9.1f} {ratios[-1]:6.2f}   {received:>17}   {count:>11}   "
                f"{peak:>11}   {torchs[4]}",
                flush=True,
            )
    if rank == 0:
        right = [r for r in ratios if not math.isnan(r)]
        print(
            "geometric mean of ours over torch, where torch is right: "
            f"{math.exp(sum(map(math.log, right)) / len(right)):.2f}, worst {max(right):.2f}"
        )
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads


def _start(full: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """``full`` with those placements; every rank's contribution to a pending sum is the whole."""
    from cute_sharding.dtensor.run.placements import cut_of
    from cute_sharding.sharding.meeting import rows

    local = full
    coordinate = mesh.get_coordinate()
    for dim, n in enumerate(full.shape):
        chain = [
            (cut[1], mesh.size(m), coordinate[m])
            for m, p in enumerate(placements)
            if (cut := cut_of(p)) is not None and cut[0] == dim
        ]
        if chain:
            local = torch.cat([local.narrow(dim, a, b - a) for a, b in rows(n, chain)], dim)
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def _measure(
    start: DTensor, target: list[Any], want: torch.Tensor | None
) -> tuple[int, int, int, str]:
    """The elements received, the collectives, the peak of memory in MB, and whether the result is
    right. Groups, plans and caches are made on the way.
    """
    try:
        result = start.redistribute(placements=target).to_local()
        verdict = "right" if want is None or torch.equal(result, want) else "WRONG"
    except Exception as error:
        return 0, 0, 0, f"raises {type(error).__name__}"
    del result
    with Watch(start.to_local()) as watch:
        start.redistribute(placements=target)
    counts = torch.tensor(
        [watch.received, watch.collectives, (watch.peak + start.to_local().nbytes) // 2**20]
    )
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    received, collectives, peak = map(int, counts)
    return received, collectives, peak, verdict


def _time(start: DTensor, target: list[Any]) -> float:
    """The seconds of one redistribution on the slowest rank."""
    start.redistribute(placements=target)
    dist.barrier()
    begin = time.perf_counter()
    result = start.redistribute(placements=target).to_local()
    del result
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            worker, (arguments, os.path.join(folder, "rendezvous")), nprocs=arguments.processes
        )


if __name__ == "__main__":
    main()
