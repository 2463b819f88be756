"""Whole models from mesh to mesh, beside what programs do without: four gloo processes with the
package and four that never import it, the same tensors, each way in turn.

    python -m benchmarks.reshard [--width 640] [--layers 6] [--repeat 3] [--only fsdp] [--ways hand]

The parameters are those of a Llama, scaled. Prints for each pair of meshes and each way the time of
the slowest rank, the best of the repetitions; what the busiest rank receives; the most that a rank
holds beside the model, by what the process has resident; and how many collectives a rank calls, and
messages all ranks send. All results are compared with the parameters. Then, what is resident with a
limit of memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.sent_by_hand import send_by_hand, written
from benchmarks.sides import torch_alone, with_flags

VOCABULARY = 13824
R = Replicate()
State = dict[str, DTensor]


def parameters(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a Llama's parameters."""
    kv, hidden = width // 4, width * 7 // 2
    layer = {
        "attention.wq": (width, width),
        "attention.wk": (kv, width),
        "attention.wv": (kv, width),
        "attention.wo": (width, width),
        "feed_forward.w1": (hidden, width),
        "feed_forward.w2": (width, hidden),
        "feed_forward.w3": (hidden, width),
        "attention_norm": (width,),
        "ffn_norm": (width,),
    }
    return {
        "tok_embeddings": (VOCABULARY, width),
        **{f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()},
        "norm": (width,),
        "output": (VOCABULARY, width),
    }


def fsdp(name: str) -> Any:
    return Shard(0)


def tp(name: str) -> Any:
    if name.endswith("norm"):
        return R
    return Shard(1) if name.endswith(("wo", "w2")) else Shard(0)


class Case(NamedTuple):
    """From which placements of which mesh to which of which other."""

    name: str
    source: tuple[DeviceMesh, Callable[[str], list[Any]]]
    target: tuple[DeviceMesh, Callable[[str], list[Any]]]


def cases() -> list[Case]:
    line, square = DeviceMesh("cpu", range(4)), DeviceMesh("cpu", [[0, 1], [2, 3]])
    first, last = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    return [
        Case("fsdp to tp", (line, lambda n: [fsdp(n)]), (line, lambda n: [tp(n)])),
        Case("tp to fsdp", (line, lambda n: [tp(n)]), (line, lambda n: [fsdp(n)])),
        Case("2x2 to 4", (square, lambda n: [fsdp(n), tp(n)]), (line, lambda n: [tp(n)])),
        Case("ranks 0-1 to 2-3", (first, lambda n: [fsdp(n)]), (last, lambda n: [tp(n)])),
    ]


# -- the ways --------------------------------------------------------------------------------------


def by_plan(case: Case, state: State) -> Callable[[], State]:
    import cute_sharding

    mesh, placements = case.target
    plan: Any = cute_sharding.plan_reshard(state, lambda name, _: placements(name), mesh)
    return lambda: plan.run(dict(state))


def by_plan_into(case: Case, state: State) -> Callable[[], State]:
    """Into the memory of a model that is there."""
    import cute_sharding

    mesh, placements = case.target
    plan: Any = cute_sharding.plan_reshard(state, lambda name, _: placements(name), mesh)
    held = plan.run({name: x * 1 for name, x in state.items()})  # in memory of its own
    return lambda: plan.run(state, into=held)


def by_changes(case: Case, state: State) -> Callable[[], State]:
    """The same where one element in a hundred has changed: only these."""
    import cute_sharding

    mesh, placements = case.target
    plan: Any = cute_sharding.plan_reshard(state, lambda name, _: placements(name), mesh)
    other = {name: x * 1 for name, x in state.items()}
    for x in other.values():
        x.to_local().view(-1)[::100] += 1
    held = plan.run({name: x * 1 for name, x in other.items()})
    states = [state, other]

    def run() -> State:
        states.reverse()
        before, now = states
        result: State = plan.run(now, into=held, since=before)
        return result

    return run


def by_tensor(case: Case, state: State) -> Callable[[], State]:
    import cute_sharding

    mesh, placements = case.target
    return lambda: {n: cute_sharding.redistribute(x, mesh, placements(n)) for n, x in state.items()}


def by_stock(case: Case, state: State) -> Callable[[], State] | None:
    mesh, placements = case.target
    if mesh != case.source[0]:
        return None
    return lambda: {n: x.redistribute(mesh, placements(n)) for n, x in state.items()}


def by_whole_tensors(case: Case, state: State) -> Callable[[], State]:
    """Gathered, sent to who has none, and cut."""
    mesh, placements = case.target
    first = int(case.source[0].mesh.flatten()[0])

    def run() -> State:
        result = {}
        for name, x in state.items():
            whole = x.full_tensor()
            if case.source[0].size() < dist.get_world_size():
                whole = whole if dist.get_rank() < 2 else torch.empty(x.shape)
                dist.broadcast(whole, first)
            result[name] = distribute_tensor(whole, mesh, placements(name), src_data_rank=None)
        return result

    return run


def by_checkpoint(case: Case, state: State) -> Callable[[], State]:
    """Through files in memory."""
    mesh, placements = case.target
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    path = folder / f"benchmark-of-reshard-{os.getppid()}"

    def run() -> State:
        inside = case.source[0]._is_current_rank_part_of_mesh()
        checkpoint.save(dict(state) if inside else {}, checkpoint_id=path)
        result = {
            n: distribute_tensor(torch.empty(x.shape), mesh, placements(n), src_data_rank=None)
            for n, x in state.items()
        }
        if mesh._is_current_rank_part_of_mesh():
            checkpoint.load(result, checkpoint_id=path, no_dist=mesh.size() < 4)
        return result

    return run


def by_hand(case: Case, state: State) -> Callable[[], State]:
    sends = written({n: tuple(x.shape) for n, x in state.items()}, case.source, case.target)
    return lambda: send_by_hand(state, sends, case.target)


Make = Callable[[Case, State], Callable[[], State] | None]
OURS: dict[str, Make] = {
    "reshard": by_plan,
    "reshard, into": by_plan_into,
    "reshard, 1 % changed": by_changes,
    "redistribute, each": by_tensor,
}
# What a program does without the package.
WITHOUT: dict[str, Make] = {
    "torch's, each": by_stock,
    "whole tensors": by_whole_tensors,
    "checkpoint": by_checkpoint,
    "sent by hand": by_hand,
}


# -- what is measured ------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts collectives, messages that this rank sends, and the bytes that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.sent = self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        if "c10d" in func.namespace and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self._count(name, args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        world = dist.get_world_size()
        if name == "send":
            self.sent += 1
        elif name.startswith("recv"):
            self.received += args[0][0].nbytes
        else:
            self.collectives += 1
        if name == "all_to_all_single":
            self.sent += sum(1 for n in args[2] if n)
            self.received += sum(args[1]) * args[0].itemsize
        elif name == "alltoall_base_":
            self.sent += sum(1 for n in args[4] if n)
            self.received += args[0].nbytes
        elif name.startswith(("all_gather_into", "_allgather_base")):
            out = result if isinstance(result, torch.Tensor) else args[0]
            self.received += out.nbytes * (world - 1) // world
        elif name.startswith("broadcast"):
            self.received += args[0][0].nbytes if dist.get_rank() else 0


def resident(which: str = "VmRSS") -> int:
    """The bytes that this process has resident, or (VmHWM) has had at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def let_go() -> None:
    """Give back what the C library keeps of freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_of(run: Callable[[], State]) -> int:
    """The most bytes that are resident while it runs, beside those that were before."""
    let_go()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    run()
    return resident("VmHWM") - before


def within_limit(case: Case, full: Callable[[str], torch.Tensor], names: list[str]) -> list[int]:
    """A limit that is halfway between the least and what a plan without one takes; what the plan
    for it says; and what has been resident beside what was before the model, on the rank that had
    the most.
    """
    import cute_sharding
    from cute_sharding.exchange import MemoryLimitError

    def model() -> State:
        mesh, placements = case.source
        whole = (
            (n, distribute_tensor(full(n), mesh, placements(n), src_data_rank=None)) for n in names
        )
        return {n: x.detach().clone() for n, x in whole}  # not a part of what is whole

    mesh, placements = case.target
    wanted = {n: placements(n) for n in names}
    limit = cute_sharding.plan_reshard(model(), wanted, mesh).peak_bytes
    try:
        cute_sharding.plan_reshard(model(), wanted, mesh, memory_limit=0)
    except MemoryLimitError as error:
        limit = (limit + error.least) // 2
    let_go()
    before = resident()
    state = model()
    let_go()
    Path("/proc/self/clear_refs").write_text("5")
    cute_sharding.reshard(state, wanted, mesh, memory_limit=limit)
    peak = torch.tensor(resident("VmHWM") - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return [limit, int(peak)]


def is_right(result: State, case: Case, full: Callable[[str], torch.Tensor]) -> bool:
    mesh, placements = case.target
    if not mesh._is_current_rank_part_of_mesh():
        return True
    at, parts = mesh.get_local_rank(), mesh.size()
    for name, x in result.items():
        (placement,) = placements(name)
        whole = full(name)
        part = whole if placement.is_replicate() else whole.chunk(parts, placement.dim)[at]
        if not torch.equal(x.to_local(), part):
            return False
    return True


def slowest(run: Callable[[], State]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    result = run()
    took = torch.tensor(time.perf_counter() - begin)
    del result
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


# What a process keeps between calls: the runs of one case, by the name of their way.
_now: dict[str, Callable[[], State]] = {}


@cache
def cases_by_name() -> dict[str, Case]:
    return {case.name: case for case in cases()}


def begin(name: str, ways: Sequence[str], width: int, layers: int) -> dict[str, list[int]]:
    """By way what :func:`measure` finds, for ways that the case has."""
    case, shapes = cases_by_name()[name], parameters(width, layers)
    full = whole_tensors(shapes)
    mesh, placements = case.source
    state = {
        name: distribute_tensor(full(name), mesh, placements(name), src_data_rank=None)
        for name in shapes
    }
    makes = {**OURS, **WITHOUT}
    _now.clear()
    _now.update({way: run for way in ways if (run := makes[way](case, state)) is not None})
    return {way: measure(run, case, full) for way, run in _now.items()}


def time_once(way: str) -> float:
    return slowest(_now[way])


def names_of_cases() -> list[str]:
    return list(cases_by_name())


def limits(name: str, width: int, layers: int) -> list[int]:
    """See :func:`within_limit`."""
    shapes = parameters(width, layers)
    return within_limit(cases_by_name()[name], whole_tensors(shapes), list(shapes))


def whole_tensors(shapes: dict[str, tuple[int, ...]]) -> Callable[[str], torch.Tensor]:
    """The parameters, the same on all ranks."""
    numbers = {name: i for i, name in enumerate(shapes)}

    def full(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(numbers[name])
        return torch.rand(shapes[name], generator=generator)

    return full


def measure(run: Callable[[], State], case: Case, full: Callable[[str], torch.Tensor]) -> list[int]:
    """Collectives, messages of all ranks, bytes received, the peak beside, and whether it is
    right.
    """
    with torch.no_grad():
        right = is_right(run(), case, full)
        with Watch() as watch:
            run()
        peak = peak_of(run)
    found = torch.tensor([watch.collectives, watch.received, peak, not right])
    sent = torch.tensor(watch.sent)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(sent)
    collectives, received, most, wrong = map(int, found)
    return [collectives, int(sent), received, most, not wrong]


def show(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    measured: dict[str, list[int]],
    times: dict[str, list[float]],
) -> None:
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * 4
    print(f"{name}: {len(shapes)} tensors, {total / 2**20:.1f} MiB")
    best = {way: min(of) for way, of in times.items()}
    for way, (collectives, sent, received, peak, right) in measured.items():
        print(
            f"  {way:20} {best[way] * 1e3:7.0f} ms   {best['reshard'] / best[way]:4.2f}   "
            f"{received / 2**20:7.1f} MiB received   {peak / 2**20:6.0f} MiB beside   "
            f"{collectives:3} collectives   {sent or '-':>4} messages   "
            f"{'right' if right else 'WRONG'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=640, help="of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--ways", default="", help="ways whose name has this in it")
    arguments = parser.parse_args()
    size = arguments.width, arguments.layers
    ours = [way for way in OURS if arguments.ways in way or way == "reshard"]
    without = [way for way in WITHOUT if arguments.ways in way]
    with with_flags({}, 4) as here, torch_alone(4) as torchs:
        [names, *_] = here.call(names_of_cases)
        names = [name for name in names if arguments.only in name]
        for name in names:
            measured, run_by = {}, {}
            for side, ways in ((here, ours), (torchs, without)):
                [found, *_] = side.call(begin, name, ways, *size)
                measured.update(found)
                run_by.update(dict.fromkeys(found, side))
            times: dict[str, list[float]] = {way: [] for way in measured}
            for _ in range(arguments.repeat):
                for way, side in run_by.items():
                    times[way].append(side.call(time_once, way)[0])
            show(name, parameters(*size), measured, times)
    # In new processes, which hold nothing else.
    with with_flags({}, 4) as here:
        for name in names:
            [(limit, peak), *_] = here.call(limits, name, *size)
            print(
                f"{name}, memory_limit={limit / 2**20:.1f} MiB: {peak / 2**20:.1f} MiB "
                f"resident, {peak / limit:.2f} of it",
                flush=True,
            )


if __name__ == "__main__":
    main()
