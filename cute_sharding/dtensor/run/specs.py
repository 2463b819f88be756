"""Shapes and placements without tensors: for plans, which need no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    TensorMeta,
)
from cute_sharding.dtensor.run.placements import (
    chains_of_placements,
    chains_of_spec,
    checked_placements,
    without,
)
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.exchange.placed import several
from cute_sharding.layout.layout import row_major
from cute_sharding.models import PlacedTensor

AnyMesh: TypeAlias = "DeviceMesh | Mesh | Sequence[int]"
OnMesh: TypeAlias = "tuple[AnyMesh, Sequence[Placement] | str]"


@dataclass(frozen=True)
class Spec:
    """The shape, mesh, placements and dtype of a tensor, without the tensor.

    Attributes:
        shape: the global shape.
        mesh: a DeviceMesh. If it is a slice of a larger mesh, each slice has a replica. For a plan
            that is not run, also a :class:`cute_sharding.exchange.Mesh` or sizes.
        placements: one for each mesh dim, or text such as ``"S(0), R"``.
        dtype: the dtype of the elements.

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
        placements = checked_placements(self.placements, shape, self._slices[0].sizes, "placements")
        object.__setattr__(self, "placements", placements)

    @property
    def _slices(self) -> tuple[Mesh, ...]:
        is_real = isinstance(self.mesh, DeviceMesh)
        return communication.slices(self.mesh) if is_real else (mesh_of(self.mesh),)

    @property
    def ranks(self) -> Mesh:
        """The mesh with its ranks; of slices of a larger mesh, with one more mesh dim in front."""
        first, *others = self._slices
        if not others:
            return first
        ranks = [rank for each in self._slices for rank in each.ranks]
        return Mesh((len(self._slices), *first.sizes), ranks)

    def to_dtensor_spec(self) -> DTensorSpec:
        """The spec as a DTensorSpec, with contiguous strides."""
        shape = tuple(self.shape)
        meta = TensorMeta(torch.Size(shape), row_major(shape), self.dtype)
        mesh: Any = self.mesh
        placements: Any = self.placements
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    def placed(self, name: str = "") -> PlacedTensor:
        """The spec as a value of the layout algebra: the cuts of the tensor, and the reductions of
        its Partials.
        """
        placements: Any = self.placements
        first, *others = self._slices
        found = placed_on(tuple(self.shape), first, placements, name_of(self.dtype), name)
        return on_all(found, others) if others else found


def mesh_of(mesh: AnyMesh) -> Mesh:
    """A mesh with its ranks."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    sizes = tuple(map(int, mesh))
    return Mesh(sizes, range(prod(sizes)))


def placed_on(
    shape: tuple[int, ...],
    mesh: Mesh,
    placements: Sequence[Placement],
    dtype: str = "float32",
    name: str = "",
) -> PlacedTensor:
    """A tensor by torch's placements, as a value of the layout algebra."""
    chains = chains_of_placements(shape, mesh.sizes, without((Partial,), placements))
    pending = [
        (m, p.reduce_op)
        for m, p in enumerate(placements)
        if isinstance(p, Partial) and mesh.sizes[m] > 1
    ]
    return PlacedTensor(Placed(shape, mesh, chains, tuple(pending)), dtype, name)


def on_all(tensor: PlacedTensor, others: Sequence[Mesh]) -> PlacedTensor:
    """A tensor on one slice of a mesh, as one of which the other slices have replicas.

    Raises:
        ValueError: something is pending.
    """
    if tensor.pending:
        raise ValueError(
            f"{tensor.name!r} is on a slice of a mesh and has a Partial: redistribute it to Shard "
            "or Replicate first"
        )
    placed = several(tensor.placed, [replace(tensor.placed, mesh=mesh) for mesh in others])
    return replace(tensor, placed=placed)


def placed_of(spec: DTensorSpec, mesh: Mesh, name: str = "") -> PlacedTensor:
    """A DTensor's spec as a value of the layout algebra. ``mesh``: its mesh with its ranks, on one
    slice. Reductions by methods of placements are not among those that are pending.
    """
    assert spec.tensor_meta is not None, "it has a shape"
    pending = [
        (m, p.reduce_op)
        for m, p in enumerate(spec.placements)
        if type(p) is Partial and spec.mesh.size(m) > 1
    ]
    placed = Placed(tuple(spec.shape), mesh, chains_of_spec(spec), tuple(pending))
    return PlacedTensor(placed, name_of(spec.tensor_meta.dtype), name)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found
