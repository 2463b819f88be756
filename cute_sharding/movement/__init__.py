"""Movement ops (slice, split, cat, roll, flip, pad, unfold) as maps of rows, and what has to cross
between devices for them. Imports no torch.

- :mod:`.rows`, :mod:`.forms`, :mod:`.moves`: which rows a result is made of, and which of them a
  device holds.
- :mod:`.rules`, :mod:`.table`: from an op's arguments to such a map; one row for each op.
- :mod:`.exchange`: the map on sharded tensors: one device's part, as strided copies.
- :mod:`.choose`: which placements the results have: free ones, if there are any.
"""

from cute_sharding.movement.choose import chosen
from cute_sharding.movement.exchange import Movement
from cute_sharding.movement.forms import Diagonal, Fold, Window
from cute_sharding.movement.moves import Link, Move
from cute_sharding.movement.rows import Rows
from cute_sharding.movement.table import BY_OP, BY_OVERLOAD, TABLE, Row

__all__ = [
    "BY_OP",
    "BY_OVERLOAD",
    "TABLE",
    "Diagonal",
    "Fold",
    "Link",
    "Move",
    "Movement",
    "Row",
    "Rows",
    "Window",
    "chosen",
]
