"""How the tensors lie that are loaded, on all ranks together.

Each rank says what it has, on the ranks of its slice where a mesh is one of several: so pipeline
stages load other tensors than one another, and copies of a model on slices of a mesh the same. What
several ranks say alike is told once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cute_sharding._memory import remembered
from cute_sharding.dtensor.checkpoints.leaves import Leaf
from cute_sharding.dtensor.checkpoints.ranks import Ranks
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.tensor_specs import Partial
from cute_sharding.dtensor.run.groups import slice_with
from cute_sharding.dtensor.run.packing import in_shape
from cute_sharding.dtensor.run.placements import chains_of_spec, text
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.models import PlacedTensor
from cute_sharding.models.refit import NamedTensor
from cute_sharding.sharding.rows import Chains


class Want(NamedTuple):
    """A tensor as one rank says it.

    Attributes:
        sizes, ranks: of its mesh; None, of a plain tensor: each rank that says it has all of it.
        chains: what cuts its dims.
        device: of which kind it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...] | None
    ranks: tuple[int, ...] | None
    chains: Chains
    device: str

    def named(self, those: Sequence[int]) -> NamedTensor:
        """As an exchange has it; ``those``: the ranks that say it."""
        if self.sizes is None or self.ranks is None:
            placed = _placed(self.shape, (len(those),), tuple(those), self.chains)
        else:
            placed = _placed(self.shape, self.sizes, self.ranks, self.chains)
        dtype = str(self.dtype).removeprefix("torch.")
        return NamedTensor(self.name, PlacedTensor(placed, dtype))


@remembered
def _placed(
    shape: tuple[int, ...], sizes: tuple[int, ...], ranks: tuple[int, ...], chains: Chains
) -> Placed:
    """One for all layers that are alike."""
    return Placed(shape, Mesh(sizes, ranks), chains)


class Wanted(NamedTuple):
    """What is loaded.

    Attributes:
        results: how each tensor lies, wherever it does.
        dtypes: theirs.
        mine: by name, the number of the result of which this rank has a part.
        objects: the names of what is no tensor.
        names: all that some rank's state has.
        devices: the kinds of devices.
    """

    results: tuple[NamedTensor, ...]
    dtypes: tuple[torch.dtype, ...]
    mine: dict[str, int]
    objects: frozenset[str]
    names: frozenset[str]
    devices: frozenset[str]


def want_of(leaf: Leaf) -> Want | None:
    """What this rank says of a tensor; None where it is not on its mesh.

    Raises:
        ValueError: the tensor has no memory, or something is pending.
        OtherShape: the local tensor is not of the shape that the placements give.
    """
    tensor: torch.Tensor = leaf.value
    shape, device = tuple(tensor.shape), tensor.device.type
    if device == "meta":
        raise ValueError(
            f"{leaf.name!r} is on the meta device, and has no memory for values: first call "
            "module.to_empty(device=...)"
        )
    if not isinstance(tensor, DTensor):
        return Want(leaf.name, shape, tensor.dtype, None, None, ((),) * len(shape), device)
    rank, mesh, spec = communication.this_rank(), tensor.device_mesh, tensor._spec
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"load_checkpoint cannot load into a Partial, and {leaf.name!r} has placements "
            f"{text(tensor.placements)}: first redistribute the tensor to Shard or Replicate"
        )
    if mesh.get_coordinate() is None:
        return None
    local = communication.wait_for(tensor._local_tensor)
    found = Want(
        leaf.name,
        shape,
        tensor.dtype,
        tuple(mesh.shape),
        tuple(slice_with(mesh, rank).ranks),
        chains_of_spec(spec),
        mesh.device_type,
    )
    expected = found.named(()).placed.local_shape(rank)
    assert expected is not None
    in_shape(local, expected, leaf.name)
    return found


class Mine(NamedTuple):
    """What one rank wants.

    Attributes:
        wants: its tensors.
        objects: the names of what is no tensor.
        names: all that its state has, also where several are one tensor.
    """

    wants: tuple[Want, ...]
    objects: frozenset[str]
    names: frozenset[str]

    @property
    def digest(self) -> bytes:
        """The same where all of it is."""
        said = [tuple(want) for want in self.wants], sorted(self.objects), sorted(self.names)
        return sha256(repr(said).encode()).digest()


def wanted_by_all(ranks: Ranks, mine: Mine, digests: Mapping[int, bytes]) -> Wanted:
    """What all ranks want, by what this one does and by what each has told."""
    numbers: dict[tuple[str, Placed, torch.dtype], int] = {}
    own: dict[str, int] = {}
    results: list[tuple[NamedTensor, torch.dtype]] = []
    objects, names, devices = {*mine.objects}, {*mine.names}, set()
    here = digests[ranks.this]
    for one in dict.fromkeys(digests.values()):
        those = [rank for rank in ranks.all if digests[rank] == one]
        theirs = mine if len(those) == len(ranks.all) else ranks.told_by(those[0], mine)
        objects |= theirs.objects
        names |= theirs.names
        for want in theirs.wants:
            named = want.named(those)
            key = named.name, named.placed, want.dtype
            if key not in numbers:
                numbers[key] = len(results)
                results.append((named, want.dtype))
            if one == here:
                own[want.name] = numbers[key]
            devices.add(want.device)
    return Wanted(
        tuple([named for named, _ in results]),
        tuple([dtype for _, dtype in results]),
        own,
        frozenset(objects),
        frozenset(names),
        frozenset(devices),
    )
