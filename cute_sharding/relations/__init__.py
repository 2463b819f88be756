"""Relations as data: which element of its operands each element of a result is. Imports no torch.

Dim by dim, as movement ops are written:

- :mod:`.rows`, :mod:`.forms`: the rows of one dim, and which of them a device holds.
- :mod:`.moves`: the relation of an op, on tensors of given shapes.

Element by element, which composes:

- :mod:`.piece`: two layouts of one shape, and what two such pieces have in common.
- :mod:`.elements`: sets of elements: each once, and those that are in none.
- :mod:`.relation`: relations, one after the other, side by side, and back.
- :mod:`.devices`: what a device holds of them, and what it needs.
- :mod:`.read`: those of views and of maps of rows.
"""

from cute_sharding.relations.devices import held, needed
from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.moves import Link, Move
from cute_sharding.relations.piece import Piece, piece
from cute_sharding.relations.read import NotOnlyMoved, relation_of_move, relation_of_view
from cute_sharding.relations.relation import (
    ReadTwice,
    Relation,
    beside,
    compose,
    filled,
    inverse,
)
from cute_sharding.relations.rows import Rows

__all__ = [
    "Diagonal",
    "Fold",
    "Link",
    "Move",
    "NotOnlyMoved",
    "Piece",
    "ReadTwice",
    "Relation",
    "Rows",
    "Window",
    "beside",
    "compose",
    "filled",
    "held",
    "inverse",
    "needed",
    "piece",
    "relation_of_move",
    "relation_of_view",
]
