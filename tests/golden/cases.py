"""What the golden table has lines of: ops and small programs, on five ways to place their tensors
and three meshes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from zlib import crc32

import movement_programs
import numpy
import op_programs
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

# Samples of torch's operator database have sizes of 5 and 10, and op_programs of 4, 5 and 6: some
# divide on these and some do not. Gradients are asked for on the first alone: a second mesh dim
# takes three times as long.
MESHES = ((2,), (3,), (2, 2))


def _rows(tensor: int, ndim: int, mesh_dim: int) -> Any:
    return Shard(0)


def _columns(tensor: int, ndim: int, mesh_dim: int) -> Any:
    """The last dim of the first tensor, and a replica of the others; on a second mesh dim, the
    other way about.
    """
    return Shard(ndim - 1) if (tensor == 0) == (mesh_dim == 0) else Replicate()


def _crossed(tensor: int, ndim: int, mesh_dim: int) -> Any:
    """Other dims from tensor to tensor and from mesh dim to mesh dim."""
    return Shard((tensor + mesh_dim + 1) % ndim)


def _strided(tensor: int, ndim: int, mesh_dim: int) -> Any:
    dim = (mesh_dim + max(ndim - 2, 0)) % ndim
    return _StridedShard(dim, split_factor=2) if tensor == 0 else Replicate()


def _pending(tensor: int, ndim: int, mesh_dim: int) -> Any:
    """A sum in the first tensor, and a shard of the others; a shard on a second mesh dim."""
    return Partial() if (tensor, mesh_dim) == (0, 0) else Shard(0)


# By name: (number of the tensor, its dims, mesh dim) -> its placement.
PLACEMENTS = {
    "rows": _rows,
    "columns": _columns,
    "crossed": _crossed,
    "strided": _strided,
    "pending": _pending,
}


def placements(way: str, tensor: int, full: torch.Tensor, mesh: tuple[int, ...]) -> list[Any]:
    """Those of one tensor; of one without dims, and where a sum of bools would be pending,
    Replicate.
    """
    found = [PLACEMENTS[way](tensor, max(full.ndim, 1), m) for m in range(len(mesh))]
    return [
        Replicate()
        if (full.ndim == 0 and not isinstance(p, Partial))
        or (isinstance(p, Partial) and full.dtype is torch.bool)
        else p
        for p in found
    ]


@dataclass(frozen=True)
class Case:
    """A call, whose tensors are placed. With ``gradients`` those of its floating tensors are asked
    for, too.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True

    def tensors(self) -> list[torch.Tensor]:
        leaves = tree_leaves((self.args, self.kwargs))
        return [x for x in leaves if isinstance(x, torch.Tensor)]


def seed(name: str) -> None:
    """All numbers that samples are made of follow from the name."""
    number = crc32(name.encode())
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


# -- the operator database -------------------------------------------------------------------------

# So many of an op's samples are looked at.
LOOKED_AT = 12

# Of these torch derives a rule by trying all placements of all that they decompose to, for a
# minute.
LEFT_OUT = ("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate")


@cache
def database() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # takes long to import

    kept = (info for info in op_db if info.name not in LEFT_OUT)
    named = {f"{info.name}.{info.variant_test_name}".rstrip("."): info for info in kept}
    return {f"op {name}": info for name, info in sorted(named.items())}


def of_database(name: str) -> Case | None:
    """Of its samples the first with two dims that can be cut, or with the most; None if no sample
    has a tensor, or one is not dense.
    """
    info = database()[name]
    dtypes = (torch.float32, torch.float64, torch.int64, torch.complex64)
    dtype = next((dtype for dtype in dtypes if dtype in info.dtypes), torch.bool)
    seed(name)
    best, most = None, -1
    for i, sample in enumerate(info.sample_inputs("cpu", dtype)):
        args = (sample.input, *sample.args)
        case = Case(info.op, args, dict(sample.kwargs), info.supports_autograd)
        tensors = case.tensors()
        dims = min(sum(n > 1 for n in tensors[0].shape), 2) if tensors else -1
        if dims > most and all(x.layout is torch.strided for x in tensors):
            best, most = case, dims
        if most == 2 or i == LOOKED_AT:
            break
    return best


# -- programs of tests -----------------------------------------------------------------------------


def of_program(function: Callable[..., Any], shapes: tuple[Any, ...]) -> Case:
    fulls = [x if isinstance(x, torch.Tensor) else op_programs.values(*x) for x in shapes]
    return Case(function, tuple(fulls))


def of_movement(name: str) -> Case:
    _, shape, program = movement_programs.draw(random.Random(f"golden {name}"), name)
    return Case(program, (op_programs.values(*shape),), {}, name not in movement_programs.FORWARD)


def redistribution(way: str) -> Case:
    """To placements of the table, of a matrix of which rows divide nowhere."""

    def redistributed(x: Any) -> Any:
        return x.redistribute(placements=placements(way, 0, x, tuple(x.device_mesh.shape)))

    return of_program(redistributed, ((7, 12),))


def names() -> list[str]:
    """Of all cases, in the order of the table."""
    return [*database(), *makers()]


@cache
def makers() -> dict[str, Callable[[], Case]]:
    programs = {
        f"program {name}": partial(of_program, function, tuple(shapes))
        for name, (function, *shapes) in op_programs.PROGRAMS.items()
    }
    movements = {**movement_programs.PROGRAMS, **movement_programs.FORWARD}
    moved = {f"movement {name}": partial(of_movement, name) for name in movements}
    exchanges = {f"redistribute to {way}": partial(redistribution, way) for way in PLACEMENTS}
    return {**programs, **moved, **exchanges}


def case_of(name: str) -> Case | None:
    return of_database(name) if name in database() else makers()[name]()
