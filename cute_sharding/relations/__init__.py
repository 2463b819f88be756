"""Relations as data: which elements of an op's operands its results are made of. Imports no torch.

For one tensor dim at a time, as the rows of the table (:mod:`.table`) are written:

- :mod:`.signature`: the names of dims.
- :mod:`.view`: DimMaps, and views as layouts. :mod:`.strided`: those that strides stand for.
- :mod:`.moves`: the rows of one dim, and which of them a device holds; an op on tensors of given
  shapes as a map of rows.

Element by element, in a form that composes:

- :mod:`.relation`: pieces, which are two layouts of one shape; relations, their composition,
  juxtaposition and inverse; the part that a device holds, and the part that it needs.
"""

from cute_sharding.relations.moves import (
    Diagonal,
    Fold,
    Link,
    Move,
    NotOnlyMoved,
    Rows,
    Window,
    relation_of_move,
    relation_of_view,
)
from cute_sharding.relations.relation import (
    Piece,
    ReadTwice,
    Relation,
    beside,
    compose,
    filled,
    held,
    inverse,
    needed,
    piece,
)
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
