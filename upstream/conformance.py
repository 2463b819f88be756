"""Runs in a shadow, by itself: what the torch there makes of cases. Reads and prints JSON, a list
for each kind of work that is asked for:

answers: the placements of the input and of the output, or the name of what was raised.
times: of a rule and a propagation with nothing cached, with the flag over those without.
moved: whether a redistribution goes in one exchange, and what each rank of the mesh then holds.

    python -S conformance.py <<< '{"answers": [...], "moved": [...]}'
"""

from __future__ import annotations

import json
import sys
import time
from functools import lru_cache
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


def placement(cut: Any) -> Any:
    """From ``[dim, split factor]``, ``"R"`` or ``"P"``."""
    if isinstance(cut, list):
        dim, factor = cut
        return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return {"R": Replicate, "P": Partial}[cut]()


def cut(placement: Any) -> Any:
    """The inverse."""
    if isinstance(placement, _StridedShard):
        return [placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return [placement.dim, 1]
    return "R" if isinstance(placement, Replicate) else "P"


def answer(case: dict[str, Any]) -> Any:
    """What torch makes of a case."""
    module, name = case["op"].split(".")
    op = getattr({"torch": torch, "Tensor": torch.Tensor}[module], name)
    shape = tuple(case["shape"])
    given = SimpleNamespace(shape=shape, ndim=len(shape))
    placements = tuple(map(placement, case["placements"]))
    options = {"needs_whole_dims": True} if case["op"] == "torch.squeeze" else {}
    if "needs_whole_dims" not in _view_ops.propagate_shape_and_sharding.__code__.co_varnames:
        options = {}
    try:
        rule = _view_ops.dim_maps[op](given, *case["args"])
        source, output = _view_ops.propagate_shape_and_sharding(
            placements, shape, rule, tuple(case["mesh"]), case["strict"], **options
        )
    except Exception as error:  # whatever torch raises is its answer
        return type(error).__name__
    return [list(map(cut, source)), list(map(cut, output))]


def seconds(case: dict[str, Any], flag: bool) -> float:
    """The least time of one rule and propagation, over short rounds."""
    shape, target, mesh = (tuple(case[key]) for key in ("shape", "target", "mesh"))
    placements = tuple(map(placement, case["placements"]))
    _view_ops._USE_CUTE_VIEW_PROPAGATION = flag  # type: ignore[attr-defined]
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        for _ in range(40):
            rule = _view_ops.view_groups(shape, target)
            _view_ops.propagate_shape_and_sharding(placements, shape, rule, mesh, True)
        best = min(best, (time.perf_counter() - start) / 40)
    return best


def ratio(case: dict[str, Any]) -> float:
    """With the flag over without, measured in turns."""
    turns = [(seconds(case, True), seconds(case, False)) for _ in range(5)]
    return min(on for on, _ in turns) / min(off for _, off in turns)


@lru_cache(maxsize=1)
def made(sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh whose ranks all run in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=prod(sizes), store=FakeStore())
    return init_device_mesh("cpu", sizes)


def chunked(rows: list[int], parts: int) -> list[list[int]]:
    size = -(-len(rows) // parts)
    return [rows[k * size : (k + 1) * size] for k in range(parts)]


def held(full: torch.Tensor, mesh: Any, placements: Any, device: Any) -> torch.Tensor:
    """What a device holds, by the definition of placements. Of a sum the first has all."""
    for p, parts, k in zip(placements, mesh, device):
        if isinstance(p, (Shard, _StridedShard)):
            rows = list(range(full.shape[p.dim]))
            pieces = chunked(rows, getattr(p, "split_factor", 1))
            mine = [row for piece in pieces for row in chunked(piece, parts)[k]]
            full = full.index_select(p.dim, torch.tensor(mine, dtype=torch.int64))
        elif isinstance(p, Partial) and k:
            full = torch.zeros_like(full)
    return full


def moved(case: dict[str, Any]) -> Any:
    """Whether it is done in one exchange, and each rank's flat elements of the result."""
    mesh, full = made(tuple(case["mesh"])), torch.arange(prod(case["shape"])).view(case["shape"])
    specs = []
    for key, ordered in zip(("source", "target"), case["ordered"]):
        placements = tuple(map(placement, case[key]))
        strided = any(isinstance(p, _StridedShard) for p in placements)
        meta = TensorMeta(full.shape, full.stride(), full.dtype)
        specs.append(
            DTensorSpec(
                mesh,
                placements,
                meta,
                use_strided_shard_as_shard_order=ordered if strided else None,
            )
        )
    devices = list(product(*map(range, case["mesh"])))
    with LocalTensorMode(len(devices)):
        local = LocalTensor(
            {
                rank: held(full, case["mesh"], specs[0].placements, device).contiguous()
                for rank, device in enumerate(devices)
            }
        )
        try:
            result: Any = _redistribute.redistribute_local_tensor(local, *specs)
        except Exception as error:  # whatever torch raises is its answer
            return [by_exchange(specs), type(error).__name__]
        result = result.wait() if hasattr(result, "wait") else result
        return [
            by_exchange(specs),
            [result._local_tensors[rank].flatten().tolist() for rank in range(len(devices))],
        ]


def by_exchange(specs: Any) -> bool:
    try:
        from torch.distributed.tensor._exchange import left_to_steps
    except ImportError:
        return False
    return _redistribute._USE_CUTE_REDISTRIBUTION and left_to_steps(*specs) is None


WORK = {"answers": answer, "times": ratio, "moved": moved}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({name: list(map(WORK[name], cases)) for name, cases in asked.items()}))
