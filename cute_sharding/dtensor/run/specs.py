"""Shapes and placements without tensors: for plans, which need no process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from cute_sharding.dtensor.run.placements import chains_of_placements, checked_placements, without
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.layout.layout import row_major
from cute_sharding.models import PlacedTensor

AnyMesh: TypeAlias = "DeviceMesh | Mesh | Sequence[int]"
OnMesh: TypeAlias = "tuple[AnyMesh, Sequence[Placement] | str]"


class OfThisProcess:
    """A plan that runs: an immutable value, so a copy of it is itself. On DeviceMeshes it is not
    pickled: they keep the rank of their process, and yet are equal to other processes' meshes.
    """

    @property
    def _meshes(self) -> Iterable[Any]:
        """The meshes on which it is planned."""
        raise NotImplementedError

    def __copy__(self) -> OfThisProcess:
        return self

    def __deepcopy__(self, memo: Any) -> OfThisProcess:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if any(isinstance(mesh, DeviceMesh) for mesh in self._meshes):
            raise TypeError(
                "a plan on DeviceMeshes cannot be pickled, because the plan has the rank and the "
                "process groups of one process. Make the plan on each rank, which needs no "
                "communication, or pickle plan.to_dict()"
            )
        return vars(self)


@dataclass(frozen=True)
class Spec:
    """The shape, mesh, placements and dtype of a tensor, without the tensor.

    Attributes:
        shape: the global shape.
        mesh: a DeviceMesh. For a plan that is not run, also a :class:`cute_sharding.exchange.Mesh`
            or sizes.
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
        placements = checked_placements(self.placements, shape, self.ranks.sizes, "placements")
        object.__setattr__(self, "placements", placements)

    @property
    def ranks(self) -> Mesh:
        """The mesh with its ranks.

        Raises:
            ValueError: the mesh is one of several slices of a larger one.
        """
        if isinstance(self.mesh, Mesh):
            return self.mesh
        if not isinstance(self.mesh, DeviceMesh):
            sizes = tuple(map(int, self.mesh))
            return Mesh(sizes, range(prod(sizes)))
        found = communication.slices(self.mesh)
        if len(found) > 1:
            raise ValueError(
                f"{self.mesh} is one of {len(found)} slices of a larger mesh, so ranks have "
                "different meshes. Pass the larger mesh on all ranks, with Replicate on the mesh "
                "dims that the slice lacks"
            )
        return found[0]

    def to_dtensor_spec(self) -> DTensorSpec:
        """The spec as a DTensorSpec, with contiguous strides."""
        shape = tuple(self.shape)
        meta = TensorMeta(torch.Size(shape), row_major(shape), self.dtype)
        mesh: Any = self.mesh
        placements: Any = self.placements
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    def placed(self) -> PlacedTensor:
        """The spec as a value of the layout algebra: the cuts of the tensor, and the reductions of
        its Partials.
        """
        mesh, shape = self.ranks, tuple(self.shape)
        placements: Any = self.placements
        pending = [
            (m, p.reduce_op)
            for m, p in enumerate(placements)
            if isinstance(p, Partial) and mesh.sizes[m] > 1
        ]
        chains = chains_of_placements(shape, mesh.sizes, without((Partial,), placements))
        return PlacedTensor(
            Placed(shape, mesh, chains, tuple(pending)), str(self.dtype).removeprefix("torch.")
        )
