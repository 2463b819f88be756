"""How the tensors of a refit lie: by DTensors, or by specs, which need no process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import process_groups
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    TensorMeta,
)
from cute_sharding.dtensor.run.placements import checked_placements, text
from cute_sharding.dtensor.run.reading import left_to_right, readings
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.exchange.refit import Named
from cute_sharding.layout.layout import row_major

AnyMesh: TypeAlias = "DeviceMesh | Mesh | Sequence[int]"
OnMesh: TypeAlias = "tuple[AnyMesh, Sequence[Placement] | str]"
# By names or patterns of names, or asked with name and tensor.
Target: TypeAlias = "Mapping[str, DTensor | Spec | OnMesh] | Callable[[str, torch.Tensor], OnMesh]"


@dataclass(frozen=True)
class Spec:
    """How a tensor lies, said without the tensor.

    Attributes:
        shape: the global shape.
        mesh: a DeviceMesh; or, to plan alone, a :class:`cute_sharding.exchange.Mesh` or sizes.
        placements: one for each mesh dim, or text as ``"S(0), R"``.
        dtype: of its elements.

    >>> import torch
    >>> spec = Spec((1024, 64), (2, 4), "S(0), R", torch.bfloat16)
    >>> spec.placements
    (Shard(dim=0), Replicate())
    """

    shape: Sequence[int]
    mesh: AnyMesh
    placements: Sequence[Placement] | str
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        shape = tuple(map(int, self.shape))
        object.__setattr__(self, "shape", shape)
        placements = checked_placements(self.placements, shape, self.ranks.sizes, "placements")
        object.__setattr__(self, "placements", placements)

    @property
    def ranks(self) -> Mesh:
        """The mesh with its ranks.

        Raises:
            ValueError: it is one of several slices of a larger mesh.
        """
        if isinstance(self.mesh, Mesh):
            return self.mesh
        if not isinstance(self.mesh, DeviceMesh):
            sizes = tuple(map(int, self.mesh))
            return Mesh(sizes, range(prod(sizes)))
        lists = process_groups.rank_lists(self.mesh)
        if len(lists) > 1:
            raise ValueError(
                f"{self.mesh} is one of {len(lists)} slices of a larger mesh, and a refit is the "
                "same on all ranks: give the larger mesh, with Replicate on its other dims"
            )
        return Mesh(tuple(self.mesh.shape), tuple(lists[0]))

    def to_dtensor_spec(self) -> DTensorSpec:
        """As DTensor has it, of contiguous strides."""
        shape = tuple(self.shape)
        meta = TensorMeta(torch.Size(shape), row_major(shape), self.dtype)
        mesh: Any = self.mesh
        placements: Any = self.placements
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    def named(self, name: str) -> Named:
        """As a refit has it.

        Raises:
            ValueError: something is pending.
        """
        placements: Any = self.placements
        pending = [p for p in placements if isinstance(p, Partial)]
        if pending:
            raise ValueError(
                f"{name!r} is {text(placements)}, with a reduction pending: redistribute it to "
                "Shard or Replicate first, a refit only moves elements"
            )
        mesh, shape = self.ranks, tuple(self.shape)
        chains = left_to_right(shape, mesh.sizes, tuple(placements))
        dtype = str(self.dtype).removeprefix("torch.")
        return Named(name, Placed(shape, mesh, chains), dtype, self.dtype.itemsize)


def spec_of(name: str, given: Any) -> Spec:
    """The spec of a DTensor, or of what says one.

    Raises:
        TypeError: it is neither.
        RuntimeError: its placements can be read in two ways.
    """
    if isinstance(given, Spec):
        return given
    if not isinstance(given, DTensor):
        raise TypeError(
            f"{name!r} is a {type(given).__name__}: give a DTensor, or a cute_sharding.Spec of its "
            "shape, mesh, placements and dtype"
        )
    spec = given._spec
    chains, ordered = readings(spec)
    if ordered is not None or chains != left_to_right(
        tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements)
    ):
        raise RuntimeError(
            f"{name!r} of shape {tuple(spec.shape)} with placements {text(spec.placements)} can be "
            "read left to right or as a shard order, which are other rows: redistribute it to "
            "Shard or Replicate placements first"
        )
    return Spec(tuple(given.shape), spec.mesh, spec.placements, given.dtype)


def target_of(target: Target, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """How a result is to lie.

    Raises:
        ValueError: the target has no such name; or it has a tensor of another shape or dtype.
    """
    found: Any
    if callable(target):
        found = target(name, torch.empty(shape, dtype=dtype, device="meta"))
    else:
        patterns = [name, *(pattern for pattern in target if fnmatchcase(name, pattern))]
        found = next((target[pattern] for pattern in patterns if pattern in target), None)
        if found is None:
            raise ValueError(
                f"the target says nothing of result {name!r}: it has "
                f"{', '.join(map(repr, target)) or 'no names'}. Add the name, or a pattern like '*'"
            )
    if isinstance(found, tuple) and len(found) == 2:
        return Spec(shape, *found, dtype)
    spec = spec_of(name, found)
    if (tuple(spec.shape), spec.dtype) != (shape, dtype):
        raise ValueError(
            f"result {name!r} has shape {shape} and is {dtype}; in the target it has shape "
            f"{tuple(spec.shape)} and is {spec.dtype}: let the generator give that"
        )
    return spec
