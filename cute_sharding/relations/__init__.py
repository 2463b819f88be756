"""Relations as data: of which elements of its operands the results of an op are made. Imports no
torch.

Dim by dim, as the rows of the table (:mod:`.table`) are written:

- by names: :mod:`.signature`.
- views: :mod:`.dim_map`, :mod:`.view`.
- the rows of one dim, and which of them a device holds: :mod:`.rows`, :mod:`.forms`; of an op on
  tensors of given shapes: :mod:`.moves`.

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
from cute_sharding.relations.signature import Linear, Signature, parse
from cute_sharding.relations.view import View, view_of

__all__ = [
    "Diagonal",
    "Fold",
    "Linear",
    "Link",
    "Move",
    "NotOnlyMoved",
    "Piece",
    "ReadTwice",
    "Relation",
    "Rows",
    "Signature",
    "View",
    "Window",
    "beside",
    "compose",
    "filled",
    "held",
    "inverse",
    "needed",
    "parse",
    "piece",
    "relation_of_move",
    "relation_of_view",
    "view_of",
]
