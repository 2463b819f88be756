"""How long it takes to find the placements that an op needs and gives, beside torch's own rule for
the same op: ``python -m benchmarks.strategies [--mesh 2 2] [--only NAME ...]``.

The operator database's ops run on tensors that are cut as views cut them; each op that comes to the
propagator is asked again, cold: of ours all caches are emptied before each call. (Warm calls of
either meet one cache, torch's, and never come here.)
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
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
from cute_sharding.dtensor.torch_private import op_schemas, registry, tensor_specs

_LIKE = lru_cache(lambda: None)


def caches() -> list[Any]:
    """Ours."""
    return [
        found
        for found in gc.get_objects()
        if isinstance(found, type(_LIKE)) and str(found.__module__).startswith("cute_sharding")
    ]


def seconds(propagate: Callable[[Any], Any], schema: Any, ours: list[Any], calls: int) -> float:
    taken = []
    for _ in range(calls):
        for cache in ours:
            cache.cache_clear()
        begin = time.perf_counter()
        propagate(schema)
        taken.append(time.perf_counter() - begin)
    return median(taken)


def strided(rng: random.Random, mesh: DeviceMesh, sizes: tuple[int, ...], x: torch.Tensor) -> Any:
    return distributed(x, mesh, drawn(rng, tuple(x.shape), sizes, "strided"))


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
    world, sizes = prod(options.mesh), tuple(options.mesh)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    torchs = registry.propagation()
    schemas: dict[str, Any] = {}
    with LocalTensorMode(world), cute_sharding.enabled():
        ours = registry.propagation()

        def noted(schema: Any) -> Any:
            found = ours(schema)
            if any(map(tensor_specs.split_factors, op_schemas.specs_of(schema))):
                schemas.setdefault(registry.name_of(schema.op), schema)
            return found

        registry.propagator().propagate_op_sharding_non_cached = noted
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(options.mesh))
        for info in database(options.only):
            if torch.float64 not in info.dtypes:
                continue
            rng = random.Random(info.name)
            with _disable_current_modes():
                samples = []
                for i, sample in enumerate(
                    info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd)
                ):
                    if i < 20 and all(
                        0 < x.numel() < 3000
                        for x in leaves_of((sample.input, sample.args, sample.kwargs))
                    ):
                        samples.append(sample)
            for sample in samples[: options.samples]:
                cut = partial(strided, rng, mesh, sizes)
                args, kwargs = tree_map_only(
                    torch.Tensor, cut, ((sample.input, *sample.args), dict(sample.kwargs))
                )
                try:
                    run(info.op, args, kwargs, bool(info.supports_autograd))
                except Exception:
                    continue
    ratios: dict[str, float] = {}
    emptied = caches()
    for name, schema in sorted(schemas.items()):
        try:
            with cute_sharding.enabled():
                theirs, own = (
                    seconds(propagate, schema, emptied, options.calls)
                    for propagate in (torchs, registry.propagation())
                )
        except Exception as error:
            print(f"{name:50} {type(error).__name__}")
            continue
        ratios[name] = own / theirs
        print(
            f"{name:50}{theirs * 1e3:10.3f} ms{own * 1e3:10.3f} ms{ratios[name]:8.2f}", flush=True
        )
    print(
        f"{len(ratios)} ops, ours over torch's, cold: geometric mean "
        f"{geometric_mean(ratios.values()):.2f}, most {max(ratios.values()):.2f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
