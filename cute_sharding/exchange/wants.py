"""The elements of a relation's operands that ranks need for their results, and which ranks have
equal needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from cute_sharding.exchange.placed import Mesh, Placed
from cute_sharding.relations.piece import Piece, through
from cute_sharding.relations.relation import Relation

# The coordinates of a rank on each mesh with results, on the mesh dims that cut a result.
Wanting: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


@dataclass(frozen=True, eq=False)
class Wants:
    """The needs of ranks for the operands of a relation whose results are placed as ``targets``.

    >>> from cute_sharding.relations.table import relation_of
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> fused = Placed.of(Sharding((8, 6), (2,), (Shard(0),)), (1, 2))
    >>> wants = Wants(relation_of("torch.cat", [(4, 6), (4, 6)], 0), (fused,))
    >>> wants.takers, wants.of(wants.wanting(2), 0)
    ({((0,),): [1], ((1,),): [2]}, ())
    """

    relation: Relation
    targets: tuple[Placed, ...]

    @cached_property
    def _cuts(self) -> dict[Mesh, list[int]]:
        """For each mesh with results, the mesh dims that cut some result."""
        found: dict[Mesh, set[int]] = {}
        for target in self.targets:
            found.setdefault(target.mesh, set()).update(target.cut)
        return {mesh: sorted(dims) for mesh, dims in found.items()}

    def wanting(self, rank: int) -> Wanting:
        """The rank's key: ranks with equal keys have equal needs."""
        found = []
        for mesh, dims in self._cuts.items():
            device = mesh.coordinates(rank)
            found.append(None if device is None else tuple([device[m] for m in dims]))
        return tuple(found)

    @cached_property
    def takers(self) -> dict[Wanting, list[int]]:
        """The ranks with each key, ascending."""
        found: dict[Wanting, list[int]] = {}
        for rank in sorted({rank for target in self.targets for rank in target.mesh.ranks}):
            found.setdefault(self.wanting(rank), []).append(rank)
        return found

    @cached_property
    def _locals(self) -> dict[Wanting, list[Piece]]:
        return {}

    @cached_property
    def _of(self) -> dict[tuple[Wanting, int], tuple[Piece, ...]]:
        return {}

    def of(self, wanting: Wanting, operand: int) -> tuple[Piece, ...]:
        """The elements of an operand that ranks with this key need: from these to places of their
        results. Constants are operands with negative numbers.
        """
        if wanting not in self.takers:
            return ()
        key = wanting, operand
        if key not in self._of:
            if wanting not in self._locals:
                self._locals[wanting] = self._held(self.takers[wanting][0])
            self._of[key] = through(self.relation.by_source.get(operand, ()), self._locals[wanting])
        return self._of[key]

    def _held(self, rank: int) -> list[Piece]:
        """The part of the results that a rank needs, from their elements to its places."""
        return [
            each.turned._replace(source=t, target=t)
            for t, placed in enumerate(self.targets)
            if (device := placed.mesh.coordinates(rank)) is not None
            for each in placed.pieces(device)
        ]
