"""What ranks want loaded, on all of them together; what a checkpoint gives; and that both fit.

Each rank says what it has, on the ranks of its slice where a mesh is one of several: so pipeline
stages load other tensors than one another, and copies of a model on slices of a mesh the same. What
several ranks say alike is told once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.checkpoints.leaves import Leaf
from cute_sharding.dtensor.refit.trace import Generator, Traced, UnknownSource, trace
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.replaced.tensor_specs import Partial
from cute_sharding.dtensor.run.groups import slice_with
from cute_sharding.dtensor.run.packing import in_shape
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.ranks import Ranks
from cute_sharding.dtensor.run.specs import dtype_of, name_of, placed_of
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.models import PlacedTensor
from cute_sharding.relations import Relation

# The tensors of a checkpoint, by name: shape and dtype.
Entries = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
# Of a plain tensor: each rank that has it has all of it.
NOBODY = Mesh((0,), ())


class Want(NamedTuple):
    """A tensor as one rank says it, and of which kind its device is. A plain tensor is on
    :data:`NOBODY`, until all have said what they have.
    """

    tensor: PlacedTensor
    device: str

    def of(self, those: Sequence[int]) -> PlacedTensor:
        """The tensor as an exchange has it; ``those``: the ranks that say it."""
        placed = self.tensor.placed
        mesh = Mesh((len(those),), tuple(those)) if placed.mesh == NOBODY else placed.mesh
        return replace(self.tensor, placed=_one_for_all(Placed(placed.shape, mesh, placed.chains)))


@remembered
def _one_for_all(placed: Placed) -> Placed:
    """The same object for all layers that lie alike, which remembers what it has computed."""
    return placed


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
        placed = Placed(shape, NOBODY, ((),) * len(shape))
        return Want(PlacedTensor(placed, name_of(tensor.dtype), name=leaf.name), device)
    rank, mesh = communication.this_rank(), tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(
            f"load_checkpoint cannot load into a Partial, and {leaf.name!r} has placements "
            f"{text(tensor.placements)}: first redistribute the tensor to Shard or Replicate"
        )
    if mesh.get_coordinate() is None:
        return None
    found = placed_of(tensor._spec, slice_with(mesh, rank), leaf.name)
    local = communication.wait_for(tensor._local_tensor)
    in_shape(local, found.placed.shape_on(rank), leaf.name)
    return Want(found, mesh.device_type)


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


class Wanted(NamedTuple):
    """What is loaded.

    Attributes:
        results: how each tensor lies, wherever it does.
        mine: by name, the number of the result of which this rank has a part.
        objects: the names of what is no tensor.
        names: all that some rank's state has.
        devices: the kinds of devices.
    """

    results: tuple[PlacedTensor, ...]
    mine: dict[str, int]
    objects: frozenset[str]
    names: frozenset[str]
    devices: frozenset[str]


def wanted_by_all(ranks: Ranks, mine: Mine, digests: Mapping[int, bytes]) -> Wanted:
    """What all ranks want, by what this one does and by what each has told."""
    numbers: dict[tuple[str, PlacedTensor], int] = {}
    own: dict[str, int] = {}
    objects, names, devices = {*mine.objects}, {*mine.names}, set()
    here = digests[ranks.this]
    for one in dict.fromkeys(digests.values()):
        those = [rank for rank in ranks.all if digests[rank] == one]
        theirs = mine if len(those) == len(ranks.all) else ranks.told_by(those[0], mine)
        objects |= theirs.objects
        names |= theirs.names
        for want in theirs.wants:
            name = want.tensor.name
            number = numbers.setdefault((name, want.of(those)), len(numbers))
            if one == here:
                own[name] = number
            devices.add(want.device)
    results = tuple([tensor for _, tensor in numbers])
    return Wanted(results, own, frozenset(objects), frozenset(names), frozenset(devices))


# -- what a checkpoint gives -----------------------------------------------------------------------


def given_by(tensors: Entries, refit: Generator | None) -> Traced:
    """What a checkpoint of those tensors gives: as it has them, or as a refit makes them.

    Raises:
        ValueError: the refit computes, or asks for a tensor that is not there.
    """
    if refit is None:
        relation = Relation.same(*(shape for shape, _ in tensors.values()))
        return Traced(relation, tuple(tensors), tuple([dtype for _, dtype in tensors.values()]))
    try:
        return trace(refit, tensors)
    except UnknownSource as error:
        raise ValueError(
            f"refit= reads {error.name!r}, but the checkpoint has {as_text([*tensors])}: use the "
            "names of the checkpoint"
        ) from error


class Names(NamedTuple):
    """The names that only one of both has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def checked_names(
    wanted: Wanted, given: Traced, tensors: Entries, objects: Collection[str], strict: bool
) -> Names:
    """The names that only the state has, and those that only the checkpoint has. ``tensors`` and
    ``objects``: what this has, by name.

    Raises:
        ValueError: there are such and ``strict``; or what both have does not fit together.
    """
    there = {*given.names, *objects}
    asked = dict.fromkeys([*(each.name for each in wanted.results), *sorted(wanted.objects)])
    names = Names(
        tuple([name for name in asked if name not in there]),
        tuple([name for name in (*given.names, *sorted(objects)) if name not in wanted.names]),
    )
    wrong = list(dict.fromkeys(_wrong(wanted, given, tensors, objects)))
    if strict and names.missing:
        wrong.append(f"the checkpoint lacks {as_text(names.missing)}")
    if strict and names.unexpected:
        wrong.append(f"the state lacks {as_text(names.unexpected)}")
    if wrong:
        raise ValueError(
            f"the checkpoint does not fit the state: {'; '.join(wrong)}. No tensor was read. Pass "
            "strict=False to skip names that only the state or only the checkpoint has, or pass "
            "refit= to convert names and shapes"
        )
    return names


def _wrong(
    wanted: Wanted, given: Traced, tensors: Entries, objects: Collection[str]
) -> Iterator[str]:
    kept = [dtype for _, dtype in tensors.values()]
    casts = {
        given.names[one.target]
        for one in given.relation.pieces
        if one.source >= 0 and kept[one.source] != given.dtypes[one.target]
    }
    shapes: dict[str, Any] = dict(zip(given.names, given.relation.outputs))
    dtypes = dict(zip(given.names, given.dtypes))
    for each in wanted.results:
        name, shape, dtype = each.name, each.placed.shape, dtype_of(each.dtype)
        if name in objects:
            yield f"{name!r} is a tensor in the state, but another object in the checkpoint"
        elif name in shapes and shapes[name] != shape:
            yield f"{name!r} has shape {shapes[name]}, but shape {shape} in the state"
        elif name in casts and dtypes[name] != dtype:
            yield f"refit= casts {name!r} to {dtypes[name]}, but the state has {dtype}"
    for name in sorted(wanted.objects & {*given.names}):
        yield f"{name!r} is a tensor in the checkpoint, but another object in the state"
