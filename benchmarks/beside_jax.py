"""What JAX's compiler makes of programs, for benchmarks that stand beside it: JAX runs in a process
of its own, of a Python that has it, and what it receives is read off the compiled program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def answer(
    benchmark: str, side: str, arguments: Sequence[str], python: str = "", given: Any = None
) -> dict[str, Any]:
    """What ``python -m benchmarks.BENCHMARK --side SIDE ARGUMENTS`` says: the last line that it
    prints, as JSON. It runs without our flags, by this Python or by another, and reads ``given``.
    """
    done = subprocess.run(
        [python or sys.executable, "-m", f"benchmarks.{benchmark}", "--side", side, *arguments],
        cwd=ROOT,
        input=json.dumps(given or {}),
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("USE_CUTE_")},
        timeout=1800,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def mesh_of(sizes: tuple[int, ...], names: Sequence[str]) -> Any:
    """A mesh of CPU devices that JAX makes up. To be called before JAX is imported."""
    devices = f" --xla_force_host_platform_device_count={prod(sizes)}"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + devices
    import jax

    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(names), axis_types=auto)


def placed(shape: tuple[int, ...], dtype: Any, mesh: Any, spec: Sequence[Any]) -> Any:
    """An operand to compile for: ``spec`` has, for each dim, the mesh dims that shard it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\((.*)$",
    re.M,
)


def received_of(program: str) -> tuple[int, int]:
    """The bytes that a device receives in a compiled program of XLA, and its collectives."""
    total, count = 0.0, 0
    for made, op, rest in _COLLECTIVE.findall(program):
        n = sum(
            _BYTES.get(dtype, 4) * prod(int(size) for size in dims.split(",") if size)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", made)
        )
        parts = _group_size(rest)
        count += 1
        total += {
            "all-reduce": 2 * n * (parts - 1) / parts,
            "all-gather": n * (parts - 1) / parts,
            "all-to-all": n * (parts - 1) / parts,
            "reduce-scatter": n * (parts - 1),
            "collective-permute": n,
        }[op]
    return round(total), count


def _group_size(text: str) -> int:
    """The devices of one group, in any of XLA's three ways to write the groups."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return prod(int(axes[name]) for name in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
        return int(found[2])
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    return len(found[1].split(",")) if found else 1
