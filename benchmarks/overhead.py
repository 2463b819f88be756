"""What the package costs the host: warm ops, redistributions and reads with it, against torch's
own, in one run.

    python -m benchmarks.overhead [--calls 2000] [--rounds 5] [--only slice chunk]

Each round takes the processor time of the same calls in a process that never imports the package,
and in one with view propagation, one with redistribution as well and one with everything on, in
turn; the ratio is that of each round, and the median is printed. Nothing is communicated: each
process poses as one rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.sides import Side

VIEWS = {"USE_CUTE_VIEW_PROPAGATION": "1"}
SETTINGS: dict[str, Mapping[str, str] | None] = {
    "torch": None,
    "views": VIEWS,
    "both": {**VIEWS, "USE_CUTE_REDISTRIBUTION": "1"},
    "everything": {"USE_CUTE_SHARDING": "1"},
}

TURNS = 8


@cache
def programs() -> dict[str, Callable[[], object]]:
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.randn(8, 4, 16), mesh, [Shard(0)], run_check=False)
    y = DTensor.from_local(torch.randn(8, 4, 16), mesh, [Shard(0)], run_check=False)
    column = DTensor.from_local(torch.randn(8, 1, 16), mesh, [Shard(2)], run_check=False)
    rows = DTensor.from_local(torch.randn(6, 8), mesh, [Shard(0)], run_check=False)
    fused = DTensor.from_local(torch.randn(2, 8, 6), mesh, [Shard(2)], run_check=False)
    whole = DTensor.from_local(torch.randn(16, 8), mesh, [Replicate()], run_check=False)
    return {
        "view": lambda: x.view(32, 64),
        "transpose": lambda: x.transpose(1, 2),
        "unsqueeze": lambda: x.unsqueeze(0),
        "pointwise": lambda: x + y,
        "pointwise, in place": lambda: x.add_(y),
        "slice of a whole dim": lambda: x[:, 1:],
        "matmul": lambda: x @ x.transpose(1, 2),
        "slice of a cut dim": lambda: rows[1:],
        "chunk of cut rows, in 3": lambda: rows.chunk(3),
        "chunk of fused weights, in 2": lambda: fused.chunk(2, -1),
        "chunk of fused weights, in 3": lambda: fused.chunk(3, -1),
        "argmax of a cut dim": lambda: fused.argmax(-1),
        "redistribute S(0) -> S(1)": lambda: rows.redistribute(placements=[Shard(1)]),
        "redistribute R -> S(0)": lambda: whole.redistribute(placements=[Shard(0)]),
        "squeeze": lambda: column.squeeze(1),
        "redistribute to the same": lambda: x.redistribute(placements=[Shard(0)]),
        "placements": lambda: x.placements,
    }


def names_of_programs() -> list[str]:
    return list(programs())


def timed(name: str, calls: int) -> float:
    """The processor time of the calls, and of none of those that come before."""
    program = programs()[name]
    gc.collect()
    gc.disable()
    for _ in range(50):
        program()
    start = time.process_time()
    for _ in range(calls):
        program()
    took = time.process_time() - start
    gc.enable()
    return took


def measure(sides: dict[str, Side], name: str, calls: int, rounds: int) -> dict[str, float]:
    """By setting the median ratio to torch's time. The calls of a round come in short turns: a
    machine is not as fast as it was a second ago.
    """
    ratios: dict[str, list[float]] = {setting: [] for setting in sides}
    # A turn takes a millisecond and more: of what takes less the clock itself would be measured.
    [fifty] = sides["torch"].call(timed, name, 50)
    in_a_turn = max(calls // TURNS, int(50e-3 / fifty))
    for _ in range(rounds):
        seconds: dict[str, list[float]] = {setting: [] for setting in sides}
        for turn in range(TURNS):
            for setting in sorted(sides, reverse=turn % 2 == 1):
                seconds[setting] += sides[setting].call(timed, name, in_a_turn)
        for setting in sides:
            ratios[setting].append(
                statistics.median(seconds[setting]) / statistics.median(seconds["torch"])
            )
    return {setting: statistics.median(values) for setting, values in ratios.items()}


AUTOLOAD = """
import time
from importlib.metadata import entry_points
[point] = entry_points(group="torch.backends", name="cute_sharding")
start = time.perf_counter()
point.load()()
print(1000 * (time.perf_counter() - start))
"""


def autoload(repeat: int) -> dict[str, float]:
    """Milliseconds that `import torch` takes longer in a program that does not use DTensor, without
    a flag and with: the entry point's load and call, the best of some.
    """
    result = {}
    for value in ("0", "1"):
        environment = {**os.environ, "USE_CUTE_SHARDING": value}
        runs = [
            subprocess.run(
                [sys.executable, "-c", AUTOLOAD],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            for _ in range(repeat)
        ]
        result[value] = min(float(run.stdout) for run in runs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="programs with such words")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}: time of {arguments.calls} warm calls, as a multiple of "
        f"torch's own (median of {arguments.rounds} rounds)"
    )
    print(f"{'':32}" + "".join(f"{name:>12}" for name in SETTINGS if name != "torch"))
    with ExitStack() as stack:
        sides = {
            setting: stack.enter_context(Side(flags, poses_as=(1, 4)))
            for setting, flags in SETTINGS.items()
        }
        [names] = sides["torch"].call(names_of_programs)
        for name in names:
            if not arguments.only or any(word in name for word in arguments.only):
                row = measure(sides, name, arguments.calls, arguments.rounds)
                figures = "".join(f"{row[on]:12.3f}" for on in SETTINGS if on != "torch")
                print(f"{name:32}{figures}", flush=True)
    if not arguments.only:
        times = autoload(10)
        print(
            f"import torch, without DTensor: {times['0']:.2f} ms more with no flag, "
            f"{times['1']:.2f} ms more with one"
        )


if __name__ == "__main__":
    main()
