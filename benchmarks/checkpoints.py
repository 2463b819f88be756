"""Loading a model's checkpoint onto another mesh, beside torch.distributed.checkpoint: four gloo
processes with the package and four that never import it, the same files (in memory, where there is
/dev/shm), each way in turn.

    python -m benchmarks.checkpoints [--width 640] [--layers 6] [--repeat 3] [--only fsdp]

The parameters are those of a Llama, scaled. Prints for each pair of meshes and each way the time of
the slowest rank, the best of the repetitions; what all ranks read of storage, as bytes of the
model; what the busiest is sent; and the most that a rank has resident beside the model. All results
are compared with the parameters. Then what is resident with a limit of memory, where the C library
gives back what is freed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from benchmarks.reshard import (
    Case,
    State,
    cases,
    fsdp,
    is_right,
    let_go,
    parameters,
    resident,
    slowest,
    whole_tensors,
)
from benchmarks.sides import Side, torch_alone, with_flags

Full = Callable[[str], torch.Tensor]


class Counting(checkpoint.FileSystemReader):
    """Counts the bytes that this rank reads."""

    read = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.read += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)


# How a checkpoint is loaded into a state from a folder, or from a file of whole tensors: the bytes
# that this rank has read, and been sent where that is known.
Load = Callable[[State, Path, Path], tuple[int, int]]


def by_package(state: State, source: Path, limit: int | None = None) -> tuple[int, int]:
    from cute_sharding import load_checkpoint

    done = load_checkpoint(state, source, memory_limit=limit)
    return done.read_bytes, done.received_bytes


def by_torch(state: State, path: Path, file: Path) -> tuple[int, int]:
    reader = Counting(path)
    checkpoint.load(dict(state), storage_reader=reader, no_dist=len(state) == 0)
    return reader.read, 0


def by_scatter(state: State, path: Path, file: Path) -> tuple[int, int]:
    first = dist.get_rank() == 0
    whole = torch.load(file, mmap=True) if first else {}
    for name, x in state.items():
        full = whole[name] if first else torch.empty(x.shape)
        x.copy_(distribute_tensor(full, x.device_mesh, x.placements))
    return sum(x.nbytes for x in whole.values()), 0


OURS: dict[str, Load] = {
    "load_checkpoint": lambda state, path, file: by_package(state, path),
    "load_checkpoint of a file": lambda state, path, file: by_package(state, file),
}
# What each of these is beside.
TORCHS: dict[str, Load] = {
    "torch.distributed.checkpoint": by_torch,
    "torch.load and scatter": by_scatter,
}


def empty(case: Case, full: Full, names: list[str]) -> State:
    mesh, placements = case.target
    return {
        name: distribute_tensor(
            torch.zeros_like(full(name)), mesh, placements(name), src_data_rank=None
        )
        .detach()
        .clone()
        for name in names
    }


@cache
def cases_by_name() -> dict[str, Case]:
    line = DeviceMesh("cpu", range(4))
    same = Case("fsdp to fsdp", (line, lambda n: [fsdp(n)]), (line, lambda n: [fsdp(n)]))
    return {case.name: case for case in (*cases(), same)}


def names_of_cases() -> list[str]:
    return list(cases_by_name())


def save(name: str, width: int, layers: int, folder: str) -> tuple[Path, Path]:
    """The folder and the file that ways load from."""
    mesh, placements = cases_by_name()[name].source
    shapes = parameters(width, layers)
    full = whole_tensors(shapes)
    path, file = Path(folder) / "checkpoint", Path(folder) / "state.pt"
    state = {n: distribute_tensor(full(n), mesh, placements(n), src_data_rank=None) for n in shapes}
    inside = mesh._is_current_rank_part_of_mesh()
    checkpoint.save(dict(state) if inside else {}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({name: full(name) for name in shapes}, file)
    dist.barrier()
    return path, file


# What a process keeps between calls: the loads of one case, by the name of their way.
_now: dict[str, Callable[[], Any]] = {}


def begin(
    name: str, width: int, layers: int, path: Path, file: Path, ways: Sequence[str]
) -> dict[str, list[int]]:
    """By way what :func:`first_time` finds. torch's ways need all ranks on the mesh."""
    case, shapes = cases_by_name()[name], parameters(width, layers)
    full = whole_tensors(shapes)
    state = empty(case, full, list(shapes))
    loads = {**OURS, **(TORCHS if case.target[0].size() == 4 else {})}
    runs = {way: partial(loads[way], state, path, file) for way in ways if way in loads}
    _now.clear()
    _now.update(runs)
    return {way: first_time(run, case, full, state) for way, run in runs.items()}


def time_once(way: str) -> float:
    return slowest(lambda: _now[way]() and {})


def compare(name: str, here: Side, torchs: Side, arguments: Any, folder: str) -> None:
    size = arguments.width, arguments.layers
    [(path, file), *_] = torchs.call(save, name, *size, folder)
    total = sum(prod(shape) * 4 for shape in parameters(*size).values())
    print(f"{name}: {len(parameters(*size))} tensors, {total / 2**20:.1f} MiB", flush=True)
    rows, run_by = {}, {}
    for side, ways in ((here, OURS), (torchs, TORCHS)):
        [found, *_] = side.call(begin, name, *size, path, file, list(ways))
        rows.update(found)
        run_by.update(dict.fromkeys(found, side))
    times: dict[str, list[float]] = {way: [] for way in rows}
    for _ in range(arguments.repeat):
        for way, side in run_by.items():
            times[way].append(side.call(time_once, way)[0])
    best = {way: min(of) for way, of in times.items()}
    beside = dict(zip(TORCHS, OURS))
    for way, (read, received, peak, right) in rows.items():
        ratio = f"{best[beside[way]] / best[way]:4.2f} of it" if way in beside else ""
        print(
            f"  {way:29} {best[way] * 1e3:6.0f} ms {ratio:10}   "
            f"{read / total:5.2f} of the model read   {received / 2**20:6.1f} MiB received   "
            f"{peak / 2**20:5.0f} MiB beside   {'right' if right else 'WRONG'}",
            flush=True,
        )


def first_time(
    load: Callable[[], tuple[int, int]], case: Case, full: Full, state: State
) -> list[int]:
    """What all ranks read, what the busiest is sent, the peak beside, and whether it is right."""
    for x in state.values():
        x.zero_()
    let_go()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    read, received = load()
    peak = resident("VmHWM") - before
    right = is_right(state, case, full)
    found = torch.tensor([received, peak, not right])
    every = torch.tensor(read)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(every)
    most, beside, wrong = map(int, found)
    return [int(every), most, beside, not wrong]


class Beside(threading.Thread):
    """Looks again and again at what is resident, and not mapped of a file."""

    def __enter__(self) -> Beside:
        let_go()
        self.peak, self._before, self._runs = 0, resident("RssAnon"), True
        self.start()
        return self

    def run(self) -> None:
        while self._runs:
            self.peak = max(self.peak, resident("RssAnon") - self._before)
            time.sleep(0.001)

    def __exit__(self, *error: object) -> None:
        self._runs = False
        self.join()


def limits(name: str, width: int, layers: int, path: Path, file: Path) -> list[str]:
    """What is resident, where the C library gives back what is freed."""
    case, shapes = cases_by_name()[name], parameters(width, layers)
    full = whole_tensors(shapes)
    state = empty(case, full, list(shapes))
    lines = []
    for what, source, limit in (("checkpoint", path, 40 << 20), ("file", file, 16 << 20)):
        for x in state.values():
            x.zero_()
        by_package(state, source, limit)  # what is mapped, and code
        right = is_right(state, case, full)
        with Beside() as beside:
            by_package(state, source, limit)
        found = torch.tensor([beside.peak, not right])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        peak, wrong = map(int, found)
        lines.append(
            f"{name}, {what}, memory_limit={limit / 2**20:.0f} MiB: "
            f"{peak / 2**20:.1f} MiB resident beside, {peak / limit:.2f} of it, "
            f"{'WRONG' if wrong else 'right'}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=640, help="of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    size = arguments.width, arguments.layers
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        with with_flags({}, 4) as here, torch_alone(4) as torchs:
            [names, *_] = here.call(names_of_cases)
            for name in names:
                if arguments.only in name:
                    compare(name, here, torchs, arguments, folder)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
        with with_flags({}, 4) as here:
            for name in names:
                if arguments.only in name:
                    [(path, file), *_] = here.call(save, name, *size, folder)
                    [lines, *_] = here.call(limits, name, *size, path, file)
                    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
