"""Runs in a shadow, by itself: answers of the torch there, for cases given as JSON.

``python -S conformance.py answers < cases`` prints for each case the placements of the input and of
the output, or the name of what was raised. ``python -S conformance.py times < cases`` prints for
each, of a rule and a propagation with nothing cached, the time with the flag over that without.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard


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


if __name__ == "__main__":
    work = {"answers": answer, "times": ratio}[sys.argv[1]]
    print(json.dumps([work(case) for case in json.load(sys.stdin)]))
