"""How the tensors of a refit lie: by DTensors, or by what says one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced.tensor_specs import (
    Partial,
)
from cute_sharding.dtensor.run.placements import chains_of_placements, chains_of_spec, text
from cute_sharding.dtensor.run.specs import OnMesh, Spec
from cute_sharding.models.refit import NamedTensor

# By names or patterns of names, or asked with name and tensor.
Target: TypeAlias = "Mapping[str, DTensor | Spec | OnMesh] | Callable[[str, torch.Tensor], OnMesh]"


def named_tensor(name: str, spec: Spec) -> NamedTensor:
    """A tensor as a refit has it.

    Raises:
        ValueError: something is pending.
    """
    placements: Any = spec.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"{name!r} has placements {text(placements)}, but must not have a Partial: "
            "redistribute the tensor to Shard or Replicate first"
        )
    return NamedTensor(name, spec.placed())


def spec_of(name: str, given: Any) -> Spec:
    """The spec of a DTensor, or of what says one.

    Raises:
        TypeError: it is neither.
        RuntimeError: it is sharded in another order than its placements say.
    """
    if isinstance(given, Spec):
        return given
    if not isinstance(given, DTensor):
        raise TypeError(
            f"{name!r} is a {type(given).__name__}: give a DTensor, or a cute_sharding.Spec of its "
            "shape, mesh, placements and dtype"
        )
    spec = given._spec
    said = tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements)
    if chains_of_spec(spec) != chains_of_placements(*said):
        raise RuntimeError(
            f"{name!r} of shape {tuple(spec.shape)} with placements {text(spec.placements)} has a "
            "shard order that a refit cannot read: a later mesh dim shards the tensor first. First "
            "redistribute the tensor to Shard or Replicate"
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
        found = next((target[pattern] for pattern in _entries(target, name)), None)
        if found is None:
            raise ValueError(
                f"the target has no entry for result {name!r} (entries: "
                f"{', '.join(map(repr, target)) or 'none'}): add {name!r}, or a pattern such as "
                "'*'"
            )
    if isinstance(found, tuple) and len(found) == 2:
        return Spec(shape, *found, dtype)
    spec = spec_of(name, found)
    if (tuple(spec.shape), spec.dtype) != (shape, dtype):
        raise ValueError(
            f"result {name!r} has shape {shape} and dtype {dtype}, but its entry in the target has "
            f"shape {tuple(spec.shape)} and dtype {spec.dtype}: change the generator (the function "
            "that makes the results) or the target"
        )
    return spec


def check_all_used(target: Target, names: Sequence[str]) -> None:
    """
    Raises:
        ValueError: an entry of the target is of no result. An entry for all may be of none.
    """
    if callable(target):
        return
    used = {"*"}.union(*(_entries(target, name) for name in names))
    unused = [name for name in target if name not in used]
    if unused:
        raise ValueError(
            f"no result has a name that matches {', '.join(map(repr, unused))}: in the target, "
            f"write names of results ({', '.join(map(repr, names))}), or patterns as in fnmatch"
        )


def _entries(target: Mapping[str, Any], name: str) -> list[str]:
    """The keys of a target that are of this result: its name, else patterns, the first of which
    decides.
    """
    return [name] if name in target else [key for key in target if fnmatchcase(name, key)]
