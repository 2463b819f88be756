"""What a checkpoint says of the tensors of a state: as it has them, or as a refit makes them of
what it has; and what of that fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.checkpoints.wanted import Wanted
from cute_sharding.dtensor.refit.trace import Generator, trace
from cute_sharding.relations import Relation


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Said(NamedTuple):
    """The tensors that a checkpoint gives.

    Attributes:
        relation: of them to those that it has.
        names, dtypes: theirs.
        sources: the names of those that it has.
        casts: the names of those that a refit casts.
    """

    relation: Relation
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    sources: tuple[str, ...]
    casts: frozenset[str] = frozenset()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name."""
        return dict(zip(self.names, self.relation.outputs))


def said_by(tensors: Mapping[str, Entry], refit: Generator | None) -> Said:
    """What a checkpoint of those tensors gives.

    Raises:
        ValueError: the refit computes, or asks for a tensor that is not there.
    """
    if refit is None:
        relation = Relation.same(*(each.shape for each in tensors.values()))
        dtypes = tuple([each.dtype for each in tensors.values()])
        return Said(relation, tuple(tensors), dtypes, tuple(tensors))
    try:
        found = trace(refit, tensors)
    except KeyError as error:
        raise ValueError(
            f"refit= reads {error}, but the checkpoint has {as_text([*tensors])}: use the names "
            "of the checkpoint"
        ) from error
    kept = [each.dtype for each in tensors.values()]
    casts = {
        found.names[one.target]
        for one in found.relation.pieces
        if one.source >= 0 and kept[one.source] != found.dtypes[one.target]
    }
    return Said(found.relation, found.names, found.dtypes, tuple(tensors), frozenset(casts))


class Names(NamedTuple):
    """The names that only one of both has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def checked_names(wanted: Wanted, said: Said, objects: Collection[str], strict: bool) -> Names:
    """The names that only the state has, and those that only the checkpoint has, by names.

    Raises:
        ValueError: there are such and ``strict``; or what both have does not fit together.
    """
    given = {*said.names, *objects}
    asked = dict.fromkeys([*(each.name for each in wanted.results), *sorted(wanted.objects)])
    names = Names(
        tuple([name for name in asked if name not in given]),
        tuple([name for name in (*said.names, *sorted(objects)) if name not in wanted.names]),
    )
    wrong = list(dict.fromkeys(_wrong(wanted, said, objects)))
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


def _wrong(wanted: Wanted, said: Said, objects: Collection[str]) -> list[str]:
    shapes, dtypes, found = said.shapes, dict(zip(said.names, said.dtypes)), []
    for each, dtype in zip(wanted.results, wanted.dtypes):
        name, shape = each.name, each.placed.shape
        if name in objects:
            found.append(f"{name!r} is a tensor in the state, but another object in the checkpoint")
        elif name in shapes and shapes[name] != shape:
            found.append(f"{name!r} has shape {shapes[name]}, but shape {shape} in the state")
        elif name in said.casts and dtypes[name] != dtype:
            found.append(f"refit= casts {name!r} to {dtypes[name]}, but the state has {dtype}")
    for name in sorted(wanted.objects & {*said.names}):
        found.append(f"{name!r} is a tensor in the checkpoint, but another object in the state")
    return found
