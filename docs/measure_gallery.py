"""What torch by itself does with the patterns of the gallery, and what it does with this package.

All devices are in one process (LocalTensorMode), and what each then holds is compared with the
placements of the result, element by element.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
from cute_sharding.exchange import Mesh
from cute_sharding.sharding import Shard, Sharding
from cute_sharding.tools.inputs import sharding_of

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


def held(full: Any, sharding: Sharding, ranks: Sequence[int] | None = None) -> dict[int, Any]:
    """What each device is to hold; by its rank, of a mesh of those."""
    ranks = range(prod(sharding.mesh)) if ranks is None else ranks
    flat = full.reshape(-1)
    return {
        rank: flat[torch.tensor(list(sharding.flat_indices(device)), dtype=torch.long)].reshape(
            sharding.local_shape(device)
        )
        for rank, device in zip(ranks, product(*map(range, sharding.mesh)))
    }


def outcome(
    sharding: Sharding, view: Any, to: Any, to_mesh: Mesh | None = None, *, ours: bool
) -> str:
    """``free``, ``communicates``, ``raises`` or ``wrong``, and the placements of the result."""
    full = torch.arange(prod(sharding.shape), dtype=torch.float32).reshape(sharding.shape)
    parts = held(full, sharding)
    expected = full if view is None else full.reshape(view)
    sizes, ranks = (sharding.mesh, None) if to_mesh is None else (to_mesh.sizes, to_mesh.ranks)
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
        cute_sharding.stats(reset=True)
        try:
            with (
                cute_sharding.enabled(redistribution=True) if ours else nullcontext(),
                communication,
            ):
                y = changed(x, view, to, mesh if to_mesh is None else device_mesh_of(to_mesh), ours)
                # Of ranks that hold nothing LocalTensor makes no view.
                local: Any = y.to_local() if to_mesh is None else y._local_tensor
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
            return f"raises {type(error).__name__}"
        got = dict(local._local_tensors)
    result = sharding_of(expected.shape, sizes, y.placements)
    right = held(expected, result, ranks)
    placements = f"[{', '.join(map(str, result.placements))}]"
    if any(not torch.equal(got[rank], right[rank]) for rank in right):
        return f"wrong: {placements}, but devices hold something else"
    # Messages from rank to rank are no collectives.
    counts = cute_sharding.stats()
    received = "redistribute" in counts and counts["redistribute"].get("received_by_all", 0)
    if communication.get_total_counts() or received:
        return f"communicates: {placements}"
    return f"free: {placements}"


def device_mesh_of(mesh: Mesh) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor([*mesh.ranks]).reshape(mesh.sizes))


def changed(x: DTensor, view: Any, to: Any, mesh: DeviceMesh, ours: bool) -> Any:
    """The view of a tensor, or the tensor redistributed on that mesh."""
    if to is None:
        return x.view(view)
    target = of_torch(Sharding(tuple(x.shape), tuple(mesh.shape), to))
    if ours and mesh != x.device_mesh:
        return cute_sharding.redistribute(x, mesh, target)
    return x.redistribute(mesh, target)


def measure(patterns: Any) -> dict[str, Any]:
    """For each pattern what torch does, and what torch does with this package."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        return {
            "torch": torch.__version__.split("+")[0],
            "outcomes": {
                pattern.name: {
                    side: outcome(
                        pattern.sharding,
                        pattern.view,
                        pattern.to,
                        pattern.to_mesh,
                        ours=side == "ours",
                    )
                    for side in ("torch", "ours")
                }
                for pattern in patterns
            },
        }
    finally:
        dist.destroy_process_group()
