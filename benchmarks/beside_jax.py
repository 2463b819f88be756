"""What JAX's compiler makes of programs, for benchmarks that stand beside it: JAX runs in a process
of its own, of a Python that has it. :mod:`benchmarks.hlo` reads what the compiled program receives.
"""

from __future__ import annotations

import json
import os
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
    # Not above: the sides import this file, and PyTorch alone must not import the package.
    from cute_sharding.tools.progress import progress

    with progress(f"benchmarks.{benchmark} on side {side}"):
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
