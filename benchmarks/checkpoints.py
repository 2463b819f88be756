"""Loading a model's checkpoint onto another mesh, beside torch.distributed.checkpoint: real gloo
processes, the same files (in memory, where there is /dev/shm), each way in turn.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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

Full = Callable[[str], torch.Tensor]


class Counting(checkpoint.FileSystemReader):
    """Counts the bytes that this rank reads."""

    read = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.read += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)


class Way(NamedTuple):
    """How a checkpoint is loaded: a function that loads into a state, and gives the bytes that this
    rank has read, and been sent where that is known.
    """

    name: str
    load: Callable[[State], tuple[int, int]]


def ways(path: Path, file: Path, in_mesh: bool) -> list[Way]:
    from cute_sharding import load_checkpoint

    def ours(state: State, source: Any, limit: int | None = None) -> tuple[int, int]:
        done = load_checkpoint(state, source, memory_limit=limit)
        return done.read_bytes, done.received_bytes

    def torchs(state: State) -> tuple[int, int]:
        reader = Counting(path)
        if in_mesh:
            checkpoint.load(dict(state), storage_reader=reader, no_dist=len(state) == 0)
        return reader.read, 0

    def by_scatter(state: State) -> tuple[int, int]:
        first = dist.get_rank() == 0
        whole = torch.load(file, mmap=True) if first else {}
        for name, x in state.items():
            full = whole[name] if first else torch.empty(x.shape)
            x.copy_(distribute_tensor(full, x.device_mesh, x.placements))
        return sum(x.nbytes for x in whole.values()), 0

    return [
        Way("load_checkpoint", lambda state: ours(state, path)),
        Way("torch.distributed.checkpoint", torchs),
        Way("load_checkpoint of a file", lambda state: ours(state, file)),
        Way("torch.load and scatter", by_scatter),
    ]


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


def saved(case: Case, full: Full, names: list[str], folder: str) -> tuple[Path, Path]:
    mesh, placements = case.source
    path, file = Path(folder) / "checkpoint", Path(folder) / "state.pt"
    state = {n: distribute_tensor(full(n), mesh, placements(n), src_data_rank=None) for n in names}
    inside = mesh._is_current_rank_part_of_mesh()
    checkpoint.save(dict(state) if inside else {}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({name: full(name) for name in names}, file)
    dist.barrier()
    return path, file


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    begin(rank, folder)
    shapes = parameters(arguments.width, arguments.layers)
    full = whole_tensors(shapes)
    line = DeviceMesh("cpu", range(4))
    same = Case("fsdp to fsdp", (line, lambda n: [fsdp(n)]), (line, lambda n: [fsdp(n)]))
    for case in [*cases(), same]:
        if arguments.only in case.name:
            compared(case, full, list(shapes), arguments.repeat, folder)
    end()


def begin(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous{os.environ.get('MALLOC_MMAP_THRESHOLD_', '')}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=4)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads


def compared(case: Case, full: Full, names: list[str], repeat: int, folder: str) -> None:
    path, file = saved(case, full, names, folder)
    total = sum(full(name).nbytes for name in names)
    if dist.get_rank() == 0:
        print(f"{case.name}: {len(names)} tensors, {total / 2**20:.1f} MiB", flush=True)
    mesh, _ = case.target
    those = ways(path, file, in_mesh=mesh.size() == 4)
    those = those if mesh.size() == 4 else those[::2]  # torch's need all ranks on the mesh
    state = empty(case, full, names)
    rows = {way.name: first_time(way, case, full, state) for way in those}
    times: dict[str, list[float]] = {way.name: [] for way in those}
    for _ in range(repeat):
        for way in those:
            times[way.name].append(slowest(lambda way=way: way.load(state) and {}))
    best = {name: min(of) for name, of in times.items()}
    for k, way in enumerate(those):
        read, received, peak, right = rows[way.name]
        ours, theirs = ([best[each.name] for each in those[i::2]] for i in (0, 1))
        ratio = f"{ours[k // 2] / theirs[k // 2]:4.2f} of it" if k % 2 and theirs else ""
        ratio = ratio if len(those) == 4 else ""
        if dist.get_rank() == 0:
            print(
                f"  {way.name:29} {best[way.name] * 1e3:6.0f} ms {ratio:10}   "
                f"{read / total:5.2f} of the model read   {received / 2**20:6.1f} MiB received   "
                f"{peak / 2**20:5.0f} MiB beside   {'right' if right else 'WRONG'}",
                flush=True,
            )


def first_time(way: Way, case: Case, full: Full, state: State) -> list[int]:
    """What all ranks read, what the busiest is sent, the peak beside, and whether it is right."""
    for x in state.values():
        x.zero_()
    let_go()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    read, received = way.load(state)
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


def limits(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """What is resident, where the C library gives back what is freed."""
    begin(rank, folder)
    shapes = parameters(arguments.width, arguments.layers)
    full, names = whole_tensors(shapes), list(shapes)
    from cute_sharding import load_checkpoint

    for case in cases():
        if arguments.only not in case.name:
            continue
        path, file = saved(case, full, names, folder)
        state = empty(case, full, names)
        for what, source, limit in (("checkpoint", path, 40 << 20), ("file", file, 16 << 20)):
            for x in state.values():
                x.zero_()
            load_checkpoint(state, source, memory_limit=limit)  # what is mapped, and code
            right = is_right(state, case, full)
            with Beside() as beside:
                load_checkpoint(state, source, memory_limit=limit)
            found = torch.tensor([beside.peak, not right])
            dist.all_reduce(found, dist.ReduceOp.MAX)
            peak, wrong = map(int, found)
            if rank == 0:
                print(
                    f"{case.name}, {what}, memory_limit={limit / 2**20:.0f} MiB: "
                    f"{peak / 2**20:.1f} MiB resident beside, {peak / limit:.2f} of it, "
                    f"{'WRONG' if wrong else 'right'}",
                    flush=True,
                )
    end()


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
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        mp.spawn(worker, (arguments, folder), nprocs=4)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
        mp.spawn(limits, (arguments, folder), nprocs=4)


if __name__ == "__main__":
    main()
