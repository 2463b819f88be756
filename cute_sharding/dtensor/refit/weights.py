"""The weights that ranks give to a load: how each rank sees that they lie, and what they are for
all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.local_tensors import is_wrapper
from cute_sharding.dtensor.replaced.tensor_specs import Partial
from cute_sharding.dtensor.run.groups import slice_with
from cute_sharding.dtensor.run.placements import chains_of_spec, text
from cute_sharding.dtensor.run.specs import Spec, name_of
from cute_sharding.exchange import Mesh
from cute_sharding.exchange.placed import Placed, several
from cute_sharding.models import PlacedTensor

Weight: TypeAlias = "torch.Tensor | Spec | None"


class WeightPlacement(NamedTuple):
    """How one rank sees that a weight lies.

    Attributes:
        shape, dtype: of the whole.
        sizes, ranks, chains: the mesh and what cuts the weight. No ranks: this rank has all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    chains: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def placed(self) -> Placed:
        """On the mesh."""
        return Placed(self.shape, Mesh(self.sizes, self.ranks), self.chains)

    def __str__(self) -> str:
        how = f"as {self.placed.placements_text()}" if self.ranks else "on each rank that has it"
        mesh = f" on {Mesh(self.sizes, self.ranks)}" if self.ranks else ""
        return f"{self.shape} {self.dtype} {how}{mesh}"


def lies(name: str, weight: torch.Tensor | Spec) -> WeightPlacement:
    """How a weight lies.

    Raises:
        ValueError: something is pending.
        TypeError: it is not a tensor of elements.
    """
    placements: Any = weight.placements if isinstance(weight, (DTensor, Spec)) else ()
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"{name!r} has placements {text(placements)}, but must not have a Partial: "
            "redistribute the tensor to Shard or Replicate first"
        )
    if isinstance(weight, Spec):
        placed = weight.placed(name)
        mesh, chains = placed.placed.mesh, placed.placed.chains
        return WeightPlacement(
            placed.placed.shape, placed.dtype, mesh.sizes, tuple(mesh.ranks), chains
        )
    is_tensor = isinstance(weight, torch.Tensor) and not is_wrapper(local_part(weight))
    if not is_tensor or local_part(weight).layout is not torch.strided:
        raise TypeError(
            f"{name!r} is a {type(weight).__name__}: give a DTensor, a plain tensor that is whole, "
            "or a cute_sharding.Spec of its shape, mesh, placements and dtype"
        )
    if isinstance(weight, DTensor):
        return _lies(weight._spec, weight.dtype, communication.this_rank())
    return WeightPlacement(tuple(weight.shape), name_of(weight.dtype))


@remembered
def _lies(spec: Any, dtype: torch.dtype, rank: int) -> WeightPlacement:
    mesh, shape = slice_with(spec.mesh, rank), tuple(spec.shape)
    return WeightPlacement(
        shape, name_of(dtype), mesh.sizes, tuple(mesh.ranks), chains_of_spec(spec)
    )


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """What this rank has of a weight."""
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def described(source: Mapping[str, Weight] | None, rank: int) -> dict[str, WeightPlacement]:
    """How this rank's weights lie; without those of meshes on which it is not.

    Raises:
        TypeError: they are no mapping.
    """
    if source is not None and not isinstance(source, Mapping):
        raise TypeError(
            f"source is a {type(source).__name__}, not a mapping: give tensors by name, such as "
            "model.state_dict()"
        )
    found = {}
    for name, weight in (source or {}).items():
        if weight is None or (isinstance(weight, DTensor) and not _is_on(weight, rank)):
            continue
        found[name] = lies(name, weight)
    return found


def _is_on(weight: DTensor, rank: int) -> bool:
    return any(rank in ranks for ranks in communication.rank_lists(weight.device_mesh))


def joined_weights(
    said: Iterable[tuple[Sequence[int], Mapping[str, WeightPlacement]]],
) -> list[PlacedTensor]:
    """The weights as all ranks together have them.

    Raises:
        ValueError: ranks have weights of one name that are not the same.
    """
    by_name: dict[str, list[tuple[Sequence[int], WeightPlacement]]] = {}
    for ranks, weights in said:
        for name, placement in weights.items():
            by_name.setdefault(name, []).append((ranks, placement))
    known: dict[Any, PlacedTensor] = {}
    found = []
    for name, some in by_name.items():
        key = tuple([(tuple(ranks), placement) for ranks, placement in some])
        if key not in known:
            known[key] = _placed(name, some)
        found.append(replace(known[key], name=name))
    return found


def _placed(name: str, said: Sequence[tuple[Sequence[int], WeightPlacement]]) -> PlacedTensor:
    (ranks, first), *_ = said
    for others, placement in said:
        alike = placement.shape == first.shape and placement.dtype == first.dtype
        if not alike or bool(placement.ranks) != bool(first.ranks):
            raise ValueError(
                f"the ranks {listed(ranks)} have {name!r} as {first}, but the ranks "
                f"{listed(others)} have {name!r} as {placement}: give the same tensor on all ranks"
            )
    if not first.ranks:
        every = tuple(sorted(rank for some, _ in said for rank in some))
        placed = Placed(first.shape, Mesh((len(every),), every), ((),) * len(first.shape))
        return PlacedTensor(placed, first.dtype)
    having = {rank for some, _ in said for rank in some}
    lacking = sorted({rank for _, each in said for rank in each.ranks} - having)
    if lacking:
        raise ValueError(
            f"{name!r} is {first}, but the ranks {listed(lacking)} of its mesh give no {name!r}, "
            "or are not in the group: give the weight on all ranks of its mesh"
        )
    meshes = [*dict.fromkeys(placement for _, placement in said)]
    if len(meshes) == 1:
        return PlacedTensor(first.placed, first.dtype)
    try:
        placed = several(first.placed, [each.placed for each in meshes[1:]])
    except ValueError as error:
        raise ValueError(
            f"ranks have {name!r} as {first} and as {meshes[1]}, which are not replicas of one "
            "tensor: give the tensor on one mesh"
        ) from error
    return PlacedTensor(placed, first.dtype)


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
