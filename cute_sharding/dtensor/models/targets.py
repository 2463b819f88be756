"""What is wanted of each tensor: by a function of name and tensor, by patterns of names, or by a
nest of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.models.nests import LeafPlace, Nest, State
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    TensorMeta,
    mesh_dim_text,
)
from cute_sharding.dtensor.run.placements import checked_placements
from cute_sharding.dtensor.run.specs import Spec

Wanted: TypeAlias = "Sequence[Placement] | str | DTensor | None"
"""What is wanted of one tensor: placements; or a DTensor, which says mesh and dtype as well; or
nothing: it stays as it is.

>>> wanted: Wanted = "S(0), R"
"""
WantedOfAll: TypeAlias = (
    "Callable[[str, DTensor], Wanted] | Mapping[str, Any] | Sequence[Any] | str"
)
"""The same for many: a function of name and tensor, a mapping from names or patterns of names, a
nest of the same form as the state, or placements for all.

>>> wanted: WantedOfAll = {"layers.*.weight": "S(0)", "*": "R"}
"""


class ByPattern:
    """Values by names, or by patterns of names as in fnmatch.

    Attributes:
        unused: the names and patterns that no name has matched; a pattern for all may be of none.

    >>> values = ByPattern({"w.*": 1, "w.b": 2, "v": 3, "*": 4})
    >>> values.of("w.a"), values.of("w.b"), values.of("u"), values.unused
    (1, 2, 4, ['v'])
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.unused = [pattern for pattern in values if pattern != "*"]

    def of(self, name: str) -> Any | None:
        """The value of the name itself, else of the first pattern that it matches, or None."""
        found = [pattern for pattern in self._values if fnmatchcase(name, pattern)]
        found = [name] if name in self._values else found
        self.unused = [pattern for pattern in self.unused if pattern not in found]
        return self._values[found[0]] if found else None


class Targets:
    """What ``placements`` says of tensors on ``mesh``, by default of each on its own; floating
    point numbers become ``dtype``, if one is given.
    """

    def __init__(
        self, placements: WantedOfAll | Nest, mesh: DeviceMesh | None, dtype: torch.dtype | None
    ) -> None:
        self._function: Any = placements if _is_function(placements) else None
        self._by_name = ByPattern({} if self._function else dict(_patterns(placements, "")))
        self._mesh, self._dtype = mesh, dtype

    def of(self, place: LeafPlace) -> DTensorSpec:
        """How a tensor is to lie: as it does, where nothing is said of it. What an optimizer has
        beside a parameter goes where that goes, and keeps its dtype.

        Raises:
            ValueError, TypeError: what is said of it does not fit.
        """
        name, tensor, goes_with = place.name, place.tensor, place.like
        wanted = (
            self._function(goes_with, tensor) if self._function else self._by_name.of(goes_with)
        )
        if isinstance(wanted, DTensor):
            return _like(place, wanted)
        mesh = tensor.device_mesh if self._mesh is None else self._mesh
        if wanted is None:
            mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        else:
            _check_mesh(name, tensor, mesh)
            said = f"placements of {name!r}"
            placements = checked_placements(wanted, tuple(tensor.shape), tuple(mesh.shape), said)
            _check_finished(name, mesh, placements)
        meta = tensor._spec.tensor_meta
        dtype = self._dtype if name == goes_with else None
        if dtype is not None and meta is not None and meta.dtype.is_floating_point:
            meta = TensorMeta(meta.shape, meta.stride, dtype)
        if wanted is None and meta == tensor._spec.tensor_meta:
            return tensor._spec
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    def check_all_used(self) -> None:
        """Raises:
        ValueError: a name or pattern is of no tensor. One for all may be of none.
        """
        unused = self._by_name.unused
        if unused:
            raise ValueError(
                f"no DTensor of the state has a name that matches {', '.join(map(repr, unused))}: "
                "in the target placements, write names as in a state dict, or patterns as in "
                "fnmatch"
            )


def _is_function(placements: Any) -> bool:
    return callable(placements) and not isinstance(placements, torch.nn.Module)


def _patterns(wanted: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What is wanted, by name or pattern, of a nest."""
    below = f"{name}." if name else ""
    if isinstance(wanted, (torch.nn.Module, torch.optim.Optimizer)):
        for place in State(wanted).places:
            yield f"{below}{place.name}", place.tensor
    elif isinstance(wanted, Mapping):
        for key, value in wanted.items():
            yield from _patterns(value, f"{below}{key}")
    elif _is_leaf(wanted):
        yield name or "*", wanted
    elif isinstance(wanted, (list, tuple)):
        for i, value in enumerate(wanted):
            yield from _patterns(value, f"{below}{i}")
    elif isinstance(wanted, Placement):
        raise TypeError(
            f"the target of {name or 'all tensors'} is a single placement, {wanted!r}: give a "
            "sequence with one placement for each mesh dim"
        )
    elif isinstance(wanted, Spec):
        raise TypeError(
            f"the target of {name or 'all tensors'} is a Spec, but source is not a dict of Specs: "
            "give placements or a DTensor as the target, or a dict of Specs as source"
        )


def _is_leaf(wanted: Any) -> bool:
    """Whether it is what one tensor is to be."""
    if isinstance(wanted, (str, DTensor)):
        return True
    is_row = isinstance(wanted, Sequence) and bool(wanted)
    return is_row and all(isinstance(placement, Placement) for placement in wanted)


def _like(place: LeafPlace, wanted: DTensor) -> DTensorSpec:
    name, tensor = place.name, place.tensor
    if wanted.shape != tensor.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but its target has shape "
            f"{tuple(wanted.shape)}: pass a target of the same shape"
        )
    _check_mesh(name, tensor, wanted.device_mesh)
    _check_finished(name, wanted.device_mesh, wanted.placements)
    if place.like == name:
        return wanted._spec
    return DTensorSpec(wanted.device_mesh, wanted.placements, tensor_meta=tensor._spec.tensor_meta)


def _check_mesh(name: str, tensor: DTensor, mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"cannot reshard to {mesh!r}, which is not a DeviceMesh: create a mesh with "
            "torch.distributed.device_mesh.init_device_mesh or DeviceMesh"
        )
    if mesh.device_type != tensor.device_mesh.device_type:
        raise ValueError(
            f"{name} is on a mesh of {tensor.device_mesh.device_type} devices, but its target is "
            f"on a mesh of {mesh.device_type} devices: first move the tensor to a mesh of "
            f"{mesh.device_type} devices"
        )


def _check_finished(name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    for m, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"the target of {name} has {placement} on "
                f"{mesh_dim_text(m, mesh.mesh_dim_names)}, and a target must not have a Partial: "
                "give Shard or Replicate"
            )
