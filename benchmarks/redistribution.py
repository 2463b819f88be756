"""Redistribution beside torch's own, in one run: four gloo processes with the package and four that
never import it, the same tensors, the two in turn.

    python -m benchmarks.redistribution [--megabytes 64] [--repeat 5] [--pairs 20]

Prints for each pair of placements the times, what the busiest rank receives, the collectives and
the peak memory of both, and whether torch's result is right. Times are the slowest rank's, the
median of the repetitions; a ratio below 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.sides import Side, torch_alone, with_flags
from benchmarks.timing import geometric_mean

WORLD = 4


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


# What a process keeps between calls: the tensor, and where it goes.
_now: dict[str, Any] = {}


def part(full: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """What this rank has of ``full``, by the definition of each placement, from left to right."""
    local = full
    for m, placement in enumerate(placements):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        d, k = placement.dim, mesh.get_coordinate()[m]
        pieces = local.chunk(getattr(placement, "split_factor", 1), d)
        taken = [piece.tensor_split(_ends(piece.shape[d], mesh.size(m)), d)[k] for piece in pieces]
        local = torch.cat(taken, d)
    return local.contiguous()


def _ends(n: int, parts: int) -> list[int]:
    block = -(-n // parts)
    return [min(k * block, n) for k in range(1, parts)]


def begin(shape: tuple[int, ...], odd: bool, source: list[Any], target: list[Any], n: int) -> Any:
    """Redistribute once, which makes groups, plans and caches; then count.

    Returns: the elements that the busiest rank receives, the collectives, the peak of memory in MB,
    and whether the result is right. Every rank's contribution to a pending sum is the whole tensor.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape)
    full = torch.arange(float((n + odd) * (n - odd))).reshape(n + odd, n - odd)
    contributions = math.prod(k for k, p in zip(shape, source) if p.is_partial())
    want = part(full, mesh, target) * contributions
    start = DTensor.from_local(
        part(full, mesh, source),
        mesh,
        source,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    _now.update(start=start, target=target)
    try:
        result = start.redistribute(placements=target).to_local()
    except Exception as error:
        return 0, 0, 0, f"raises {type(error).__name__}"
    wrong = torch.tensor(result.shape != want.shape or not torch.equal(result, want))
    del result, full, want
    with Watch(start.to_local()) as watch:
        start.redistribute(placements=target)
    peak = (watch.peak + start.to_local().nbytes) // 2**20
    counts = torch.tensor([watch.received, watch.collectives, peak, wrong])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    received, collectives, most, is_wrong = map(int, counts)
    return received, collectives, most, "WRONG" if is_wrong else "right"


def time_once() -> float:
    """The seconds of one redistribution, beside one before it."""
    start, target = _now["start"], _now["target"]
    start.redistribute(placements=target)
    dist.barrier()
    begin = time.perf_counter()
    result = start.redistribute(placements=target).to_local()
    result = getattr(result, "wait", lambda: result)()
    return time.perf_counter() - begin


def compare(arguments: argparse.Namespace, ours: Side, torchs: Side) -> list[float]:
    """Prints a line for each pair; the ratios where PyTorch is right."""
    ratios = []
    side = math.isqrt(arguments.megabytes * 2**20 // 4)
    for shape, odd, source, target in PAIRS[: arguments.pairs]:
        rows = [each.call(begin, shape, odd, source, target, side)[0] for each in (ours, torchs)]
        assert rows[0][3] == "right", (source, target, rows[0])
        times: list[list[float]] = [[], []]
        for turn in range(arguments.repeat):
            for k in (0, 1) if turn % 2 == 0 else (1, 0):
                if not rows[k][3].startswith("raises"):
                    times[k].append(max((ours, torchs)[k].call(time_once)))
        own, theirs = (statistics.median(some or [math.inf]) for some in times)
        if rows[1][3] == "right":
            ratios.append(own / theirs)
        names = [", ".join(map(str, placements)) for placements in (source, target)]
        received, count, peak = (f"{rows[0][i]:,}/{rows[1][i]:,}" for i in range(3))
        print(
            f"{shape!s:8} {names[0]:22} {names[1]:22} {own * 1e3:8.1f} {theirs * 1e3:9.1f} "
            f"{own / theirs:6.2f}   {received:>17}   {count:>11}   {peak:>11}   {rows[1][3]}",
            flush=True,
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    arguments = parser.parse_args()
    print(
        f"{'mesh':8} {'from':22} {'to':22} {'ours ms':>8} {'torch ms':>9} {'ratio':>6}   "
        f"{'received':>17}   {'collectives':>11}   {'peak MB':>11}   torch is"
    )
    flags = {"USE_CUTE_REDISTRIBUTION": "1"}
    with with_flags(flags, WORLD) as ours, torch_alone(WORLD) as torchs:
        ratios = compare(arguments, ours, torchs)
    print(
        "geometric mean of ours over torch, where torch is right: "
        f"{geometric_mean(ratios):.2f}, worst {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
