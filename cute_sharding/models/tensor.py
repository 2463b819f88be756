"""A tensor of a state: on which ranks it is, what cuts it, what is pending, its dtype and name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

from cute_sharding.exchange import Mesh, Placed
from cute_sharding.sharding import (
    Partial,
    Placement,
    Replicate,
    Sharding,
    parse_placements,
)
from cute_sharding.sharding.rows import placements_text


@cache
def itemsize_of(dtype: str) -> int:
    """The bytes of an element of a dtype, from the bits that its name says.

    >>> itemsize_of("bfloat16"), itemsize_of("float8_e4m3fn"), itemsize_of("bool")
    (2, 1, 1)

    Raises:
        ValueError: its name says none.
    """
    found = re.search(r"\d+", dtype)
    if found is None and dtype != "bool":
        raise ValueError(
            f"dtype {dtype!r} does not have a known number of bits: give the name of a PyTorch "
            "dtype, such as bfloat16"
        )
    return max(int(found[0]) // 8, 1) if found else 1


def wire_of(dtype: str, results: Collection[str]) -> str:
    """The dtype in which a tensor is sent: that of the results made of it, where all have one of
    fewer bytes.

    >>> wire_of("float32", {"bfloat16"}), wire_of("bfloat16", {"float32"})
    ('bfloat16', 'bfloat16')
    """
    first = next(iter(results), dtype)
    is_smaller = itemsize_of(first) < itemsize_of(dtype) and all(x == first for x in results)
    return first if is_smaller else dtype


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor on a mesh.

    Attributes:
        placed: how it lies.
        dtype: the name of its dtype, as torch prints it without ``torch.``.
        name: the tensor's, for texts. Tensors that lie alike are equal whatever their names: the
            layers of a model are planned once.

    >>> spec = PlacedTensor.of((8, 6), (2, 2), "S(0), P", "bfloat16")
    >>> spec.placed.local_shape(3), spec.itemsize, spec.pending
    ((4, 6), 2, ((1, 'sum'),))
    >>> print(spec)
    (8, 6) bfloat16 [S(0), P(sum)]
    """

    placed: Placed
    dtype: str = "float32"
    name: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        mesh: Mesh | Sequence[int],
        placements: Sequence[Placement] | str,
        dtype: str = "float32",
        name: str = "",
    ) -> PlacedTensor:
        """Of placements, applied left to right, on a mesh or the sizes of one whose ranks are 0 and
        those that follow.

        Raises:
            ValueError: they do not fit together.
        """
        shape = tuple(shape)
        if not isinstance(mesh, Mesh):
            mesh = Mesh(tuple(mesh), range(prod(mesh)))
        if isinstance(placements, str):
            placements = parse_placements(placements, len(shape))
        pending = [(m, p.reduce_op) for m, p in enumerate(placements) if isinstance(p, Partial)]
        finished = tuple([Replicate() if isinstance(p, Partial) else p for p in placements])
        placed = Placed.of(Sharding(shape, mesh.sizes, finished), mesh.ranks)
        itemsize_of(dtype)
        pending = [(m, op) for m, op in pending if mesh.sizes[m] > 1]
        return cls(replace(placed, pending=tuple(pending)), dtype, name)

    @property
    def pending(self) -> tuple[tuple[int, str], ...]:
        """The mesh dims on which a reduction is pending, and its op."""
        return self.placed.pending

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return itemsize_of(self.dtype)

    def bytes_on(self, rank: int) -> int:
        """What a rank holds of it."""
        shape = self.placed.local_shape(rank)
        return 0 if shape is None else prod(shape) * self.itemsize

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return prod(self.placed.shape) * self.itemsize

    @property
    def placements(self) -> str:
        """The placements, as text."""
        dims = len(self.placed.mesh.sizes)
        return placements_text(self.placed.chains, dims, pending=self.pending)

    def to_dict(self) -> dict[str, Any]:
        """The tensor as plain data."""
        return {
            "name": self.name,
            "shape": list(self.placed.shape),
            "dtype": self.dtype,
            "mesh": list(self.placed.mesh.sizes),
            "ranks": list(self.placed.mesh.ranks),
            "placements": self.placements,
        }

    def __str__(self) -> str:
        return f"{self.placed.shape} {self.dtype} {self.placements}"
