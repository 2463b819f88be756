"""Which ranks need the same of a relation's operands, and what: by the results that they are to
hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from cute_sharding.exchange.placed import Mesh, Placed
from cute_sharding.relations.piece import Piece, through
from cute_sharding.relations.relation import Relation

# The coordinates of a rank on each mesh that results are on, as far as they tell what it needs.
Wanting: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


@dataclass(frozen=True, eq=False)
class Wants:
    """What ranks need of the operands of a relation whose results are to lie as ``targets`` say.

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
        """The mesh dims that cut some result, of each mesh that has results."""
        found: dict[Mesh, set[int]] = {}
        for target in self.targets:
            found.setdefault(target.mesh, set()).update(target.cut)
        return {mesh: sorted(dims) for mesh, dims in found.items()}

    def wanting(self, rank: int) -> Wanting:
        """Ranks of which that is the same need the same."""
        found = []
        for mesh, dims in self._cuts.items():
            device = mesh.coordinates(rank)
            found.append(None if device is None else tuple([device[m] for m in dims]))
        return tuple(found)

    @cached_property
    def takers(self) -> dict[Wanting, list[int]]:
        """Those that need the same, ascending."""
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
        """What ranks need of an operand: from its elements to places of their results. Constants
        are operands of numbers below 0.
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
        """What a rank is to have of the results, from their elements to its places."""
        return [
            each.turned._replace(source=t, target=t)
            for t, placed in enumerate(self.targets)
            if (device := placed.mesh.coordinates(rank)) is not None
            for each in placed.pieces(device)
        ]
