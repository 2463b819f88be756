"""What is drawn, from what a caller has: DTensors, placements of torch or as text, views."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol, TypeAlias, runtime_checkable

from cute_sharding.exchange import Mesh
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import View
from cute_sharding.sharding import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    parse_placements,
)
from cute_sharding.tools.drawing.holding import Holding


@runtime_checkable
class DeviceMeshLike(Protocol):
    """What pictures read of a DeviceMesh: torch is not imported for its name."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    @property
    def mesh(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...


@runtime_checkable
class DTensorLike(Protocol):
    """What pictures read of a DTensor: torch is not imported for its name."""

    @property
    def device_mesh(self) -> Any: ...
    @property
    def placements(self) -> Sequence[Any]: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def ndim(self) -> int: ...
    def to_local(self) -> Any: ...


PlacementsLike: TypeAlias = "str | Sequence[object]"
"""Placements as text (``"S(1), R"``), or as objects: torch's or ours.

>>> placements: PlacementsLike = "S(1), R"
>>> placements_of(placements, 2)
(Shard(dim=1, split_factor=1), Replicate())
"""
MeshLike: TypeAlias = "DeviceMeshLike | Mesh | Sequence[int]"
"""A mesh: torch's, ours, or its sizes, of ranks from 0 on.

>>> mesh: MeshLike = (2, 2)
>>> mesh_of(mesh).ranks
range(0, 4)
"""


def names_of(names: Sequence[str] | None, mesh: Sequence[int]) -> tuple[str, ...]:
    """A name for each mesh dim."""
    if names is None:
        return tuple(f"mesh{m}" for m in range(len(mesh)))
    if len(names) != len(mesh) or len(set(names)) < len(mesh):
        raise ValueError(
            f"the names of the dims of mesh {tuple(mesh)} are {tuple(names)}: give each mesh dim a "
            "different name"
        )
    return tuple(names)


def placements_of(placements: PlacementsLike, ndim: int) -> tuple[Placement, ...]:
    """Placements of a tensor of so many dims, from text, from torch's objects or from ours."""
    if isinstance(placements, str):
        return parse_placements(placements, ndim)
    return tuple(_placement_of(p) for p in placements)


def _placement_of(p: Any) -> Placement:
    if isinstance(p, (Shard, Replicate, Partial)):
        return p
    kinds = {base.__name__ for base in type(p).__mro__}
    # In torch a _StridedShard is no Shard in some releases, and one in others.
    if "_StridedShard" in kinds:
        return Shard(p.dim, int(p.split_factor))
    if "Shard" in kinds:
        return Shard(p.dim)
    if "Replicate" in kinds:
        return Replicate()
    if "Partial" in kinds:
        return Partial(str(p.reduce_op))
    raise TypeError(
        f"{p!r} is not a placement that can be drawn: use Shard, _StridedShard, Replicate or "
        "Partial"
    )


def sharding_of_dtensor(tensor: DTensorLike) -> Sharding:
    """What a DTensor's placements say, read left to right."""
    return Sharding(
        tuple(map(int, tensor.shape)),
        tuple(map(int, tensor.device_mesh.shape)),
        placements_of(tensor.placements, tensor.ndim),
    )


def holding_of_dtensor(tensor: Any, names: tuple[str, ...]) -> Holding:
    """Who holds what of a DTensor, by the order of cuts that its spec gives it."""
    from cute_sharding.dtensor.run.placements import chains_of_spec

    plain = Holding.of(sharding_of_dtensor(tensor), names)
    chains = chains_of_spec(tensor._spec)
    return Holding(plain.shape, plain.mesh, names, chains, plain.pending)


def said_of_numbers(tensor: Any) -> tuple[str, ...]:
    """Which ranks the devices of a DTensor are, where they are others than their numbers."""
    ranks = tensor.device_mesh.mesh.flatten()
    first, last, most = int(ranks[0]), int(ranks[-1]), len(ranks) - 1
    if (first, last) == (0, most):
        return ()
    return (
        f"devices are numbered by their place in the mesh: device 0 is rank {first}, device {most} "
        f"rank {last}",
    )


def mesh_of(mesh: MeshLike | int) -> Mesh:
    """A mesh with its ranks, from a DeviceMesh, from ours, or from sizes: then of ranks from 0 on.

    >>> mesh_of((2, 2)).text()
    'mesh (2, 2) of ranks 0 to 3'
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMeshLike):
        return Mesh(tuple(map(int, mesh.shape)), tuple(mesh.mesh.flatten().tolist()))
    sizes = (mesh,) if isinstance(mesh, int) else tuple(map(int, mesh))
    return Mesh(sizes, range(prod(sizes)))


def view_of(view: Any, shape: Sequence[int]) -> tuple[str, View]:
    """A view, and what to call it: a View, or the shape that Tensor.view is given."""
    if isinstance(view, View):
        return f"a view to {view.output_shape}", view
    sizes = (view,) if isinstance(view, int) else tuple(view)
    made = BY_OP["Tensor.view"].view(tuple(shape), sizes)
    return f"view{made.output_shape}", made
