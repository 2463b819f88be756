"""How a tensor lies: on which ranks, what cuts it, what is pending, and of which dtype it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

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


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor on a mesh.

    Attributes:
        placed: how it lies.
        dtype: the name of its dtype, as torch prints it without ``torch.``.

    >>> spec = PlacedTensor.of((8, 6), (2, 2), "S(0), P", "bfloat16")
    >>> spec.placed.local_shape(3), spec.itemsize, spec.pending
    ((4, 6), 2, ((1, 'sum'),))
    >>> print(spec)
    (8, 6) bfloat16 [S(0), P(sum)]
    """

    placed: Placed
    dtype: str = "float32"

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        mesh: Mesh | Sequence[int],
        placements: Sequence[Placement] | str,
        dtype: str = "float32",
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
        pending = [
            (m, p.reduce_op)
            for m, p in enumerate(placements)
            if isinstance(p, Partial) and mesh.sizes[m] > 1
        ]
        finished = tuple([Replicate() if isinstance(p, Partial) else p for p in placements])
        placed = Placed.of(Sharding(shape, mesh.sizes, finished), mesh.ranks)
        itemsize_of(dtype)
        return cls(replace(placed, pending=tuple(pending)), dtype)

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

    def __str__(self) -> str:
        sizes = self.placed.mesh.sizes
        placements = placements_text(self.placed.chains, len(sizes), pending=self.pending)
        return f"{self.placed.shape} {self.dtype} {placements}"
