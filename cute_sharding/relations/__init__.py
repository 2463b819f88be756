"""Relations as data: which element of its operands each element of a result is. Imports no torch.

- :mod:`.piece`: two layouts of one shape, and what two such pieces have in common.
- :mod:`.elements`: sets of elements: each once, and those that are in none.
- :mod:`.relation`: relations, one after the other, side by side, and back.
- :mod:`.devices`: what a device holds of them, and what it needs.
- :mod:`.read`: those of views and of movement ops, from their tables.
"""

from cute_sharding.relations.devices import held, needed
from cute_sharding.relations.piece import Piece, piece
from cute_sharding.relations.read import NotOnlyMoved, of_move, of_view
from cute_sharding.relations.relation import (
    ReadTwice,
    Relation,
    beside,
    compose,
    filled,
    inverse,
)

__all__ = [
    "NotOnlyMoved",
    "Piece",
    "ReadTwice",
    "Relation",
    "beside",
    "compose",
    "filled",
    "held",
    "inverse",
    "needed",
    "of_move",
    "of_view",
    "piece",
]
