"""What torch by itself does with the patterns of the gallery, and what it does with this package.

All devices are in one process (LocalTensorMode), and what each then holds is compared with the
placements of the result, element by element.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding
from cute_sharding.drawing.inputs import placements_of
from cute_sharding.sharding import Shard, Sharding

WORLD = 8


def of_torch(sharding: Sharding) -> list[Any]:
    return [
        Replicate()
        if not isinstance(p, Shard)
        else TorchShard(p.dim)
        if p.split_factor == 1
        else _StridedShard(p.dim, split_factor=p.split_factor)
        for p in sharding.placements
    ]


def held(full: Any, sharding: Sharding) -> dict[int, Any]:
    """What each device is to hold."""
    flat = full.reshape(-1)
    return {
        rank: flat[torch.tensor(list(sharding.flat_indices(device)), dtype=torch.long)].reshape(
            sharding.local_shape(device)
        )
        for rank, device in enumerate(product(*map(range, sharding.mesh)))
    }


def outcome(sharding: Sharding, view: Any, to: Any, *, ours: bool) -> str:
    """``free``, ``communicates``, ``raises`` or ``wrong``, and the placements of the result."""
    full = torch.arange(prod(sharding.shape), dtype=torch.float32).reshape(sharding.shape)
    parts = held(full, sharding)
    expected = full if view is None else full.reshape(view)
    with LocalTensorMode(prod(sharding.mesh)):
        mesh = DeviceMesh("cpu", torch.arange(prod(sharding.mesh)).reshape(sharding.mesh))
        x = DTensor.from_local(
            LocalTensor(parts),
            mesh,
            of_torch(sharding),
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        communication = CommDebugMode()
        try:
            with (
                cute_sharding.enabled(redistribution=True) if ours else nullcontext(),
                communication,
            ):
                target = None if to is None else Sharding(sharding.shape, sharding.mesh, to)
                y = x.view(view) if target is None else x.redistribute(mesh, of_torch(target))
                local = y.to_local()
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
            return f"raises {type(error).__name__}"
        got = {rank: local._local_tensors[rank] for rank in parts}
    result = Sharding(
        tuple(expected.shape), sharding.mesh, placements_of(y.placements, expected.ndim)
    )
    right = held(expected, result)
    placements = f"[{', '.join(map(str, result.placements))}]"
    if any(not torch.equal(got[rank], right[rank]) for rank in right):
        return f"wrong: {placements}, but devices hold something else"
    if communication.get_total_counts():
        return f"communicates: {placements}"
    return f"free: {placements}"


def measure(patterns: Any) -> dict[str, Any]:
    """For each pattern what torch does, and what torch does with this package."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        return {
            "torch": torch.__version__.split("+")[0],
            "outcomes": {
                pattern.name: {
                    side: outcome(pattern.sharding, pattern.view, pattern.to, ours=side == "ours")
                    for side in ("torch", "ours")
                }
                for pattern in patterns
            },
        }
    finally:
        dist.destroy_process_group()
