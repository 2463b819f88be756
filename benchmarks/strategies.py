"""How long it takes to find the placements that an op needs and gives, beside torch's own rule for
the same op: ``python -m benchmarks.strategies [--mesh 2 2] [--only NAME ...]``.

The operator database's ops run on tensors that are cut as views cut them; each op that comes to the
propagator is asked again, cold: of ours all caches are emptied before each call, but for tables
that are made once in a process. (Warm calls of
either meet one cache, torch's, and never come here.)
"""

from __future__ import annotations

import argparse
import gc
import random
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from inspect import signature
from itertools import islice
from math import prod
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

import cute_sharding
from benchmarks.op_database import database, distributed, drawn, leaves_of, run
from cute_sharding.dtensor.replaced import op_schemas, tensor_specs

PATIENCE = 10  # seconds
_LIKE = lru_cache(lambda: None)


def caches() -> list[Any]:
    """Ours, but for tables that are made once in a process: functions of nothing."""
    return [
        found
        for found in gc.get_objects()
        if isinstance(found, type(_LIKE))
        and str(found.__module__).startswith("cute_sharding")
        and signature(found).parameters
    ]


def seconds(propagate: Callable[[Any], Any], schema: Any, ours: list[Any], calls: int) -> float:
    """Of one call; of those that take long there is but one, and ``PATIENCE`` is what one takes
    that is not done by then (torch's, where it derives a rule by trying placements).
    """

    def give_up(*_: Any) -> None:
        raise TimeoutError

    taken: list[float] = []
    signal.signal(signal.SIGALRM, give_up)
    while len(taken) < calls and sum(taken) < 1:
        for cache in ours:
            cache.cache_clear()
        signal.alarm(PATIENCE)
        begin = time.perf_counter()
        with suppress(TimeoutError):
            propagate(schema)
        signal.alarm(0)
        taken.append(time.perf_counter() - begin)
    return median(taken)


def strided(rng: random.Random, mesh: DeviceMesh, sizes: tuple[int, ...], x: torch.Tensor) -> Any:
    return distributed(x, mesh, drawn(rng, tuple(x.shape), sizes, "strided"))


def samples_of(info: Any, count: int) -> list[Any]:
    """The op's first inputs that are neither empty nor large."""
    found = []
    given = info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd)
    for sample in islice(given, 20):
        tensors = leaves_of((sample.input, sample.args, sample.kwargs))
        if all(0 < x.numel() < 3000 for x in tensors):
            found.append(sample)
    return found[:count]


def schemas_met(shape: tuple[int, ...], only: list[str], samples: int) -> dict[str, Any]:
    """The first schema of each op that comes to our propagator with a _StridedShard tensor, while
    the database's ops run on a mesh of that shape.
    """
    found: dict[str, Any] = {}
    world = prod(shape)
    with LocalTensorMode(world), cute_sharding.enabled():
        ours = op_schemas.propagation()

        def noted(schema: Any) -> Any:
            result = ours(schema)
            if any(map(tensor_specs.split_factors, op_schemas.specs_of(schema))):
                found.setdefault(op_schemas.name_of(schema.op), schema)
            return result

        op_schemas.propagator().propagate_op_sharding_non_cached = noted
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(shape))
        for info in database(only):
            if torch.float64 not in info.dtypes:
                continue
            cut = partial(strided, random.Random(info.name), mesh, shape)
            with _disable_current_modes():
                given = samples_of(info, samples)
            for sample in given:
                with suppress(Exception):  # of sparse tensors, and what is refused
                    args, kwargs = tree_map_only(
                        torch.Tensor, cut, ((sample.input, *sample.args), dict(sample.kwargs))
                    )
                    run(info.op, args, kwargs, bool(info.supports_autograd))
    return found


def compared(torchs: Callable[[Any], Any], schemas: dict[str, Any], calls: int) -> dict[str, float]:
    """Our time over torch's for each op; what cannot be asked again is said and left out."""
    ratios: dict[str, float] = {}
    emptied = caches()
    for name, schema in sorted(schemas.items()):
        try:
            with cute_sharding.enabled():
                theirs, own = (
                    seconds(propagate, schema, emptied, calls)
                    for propagate in (torchs, op_schemas.propagation())
                )
        except Exception as error:
            print(f"{name:50} {type(error).__name__}")
            continue
        ratios[name] = own / theirs
        print(
            f"{name:50}{theirs * 1e3:10.3f} ms{own * 1e3:10.3f} ms{ratios[name]:8.2f}", flush=True
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", type=int, nargs="*", default=[2, 2])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    shape = tuple(options.mesh)
    dist.init_process_group("fake", rank=0, world_size=prod(shape), store=FakeStore())
    torchs = op_schemas.propagation()
    ratios = compared(torchs, schemas_met(shape, options.only, options.samples), options.calls)
    print(
        f"{len(ratios)} ops, ours over torch's, cold: geometric mean "
        f"{geometric_mean(ratios.values()):.2f}, most {max(ratios.values()):.2f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
