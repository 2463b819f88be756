"""Movement ops (slice, split, cat, roll, flip, pad, unfold) as maps of rows, and what has to cross
between devices for them. Imports no torch.

- :mod:`.by_name`: the relations of ops by their names.
- :mod:`.rules`, :mod:`.table`: from an op's arguments to such a map; one row for each op.
- :mod:`.choose`, :mod:`.free`: which placements the results have: free ones, if there are any.
- :mod:`.slices`: results that are views of local tensors.

The maps are relations (:mod:`cute_sharding.relations`), and run as exchanges
(:mod:`cute_sharding.exchange`).
"""

from cute_sharding.movement.by_name import of_move, of_view
from cute_sharding.movement.choose import chosen
from cute_sharding.movement.table import BY_OP, BY_OVERLOAD, TABLE, Row

__all__ = [
    "BY_OP",
    "BY_OVERLOAD",
    "TABLE",
    "Row",
    "chosen",
    "of_move",
    "of_view",
]
