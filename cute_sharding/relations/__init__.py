"""Which rows of its operands each row of an op's results is made of. Imports no torch.

- :mod:`.rows`, :mod:`.forms`: the rows of one dim, and which of them a device holds.
- :mod:`.moves`: the relation of an op, on tensors of given shapes.
"""

from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.moves import Link, Move
from cute_sharding.relations.rows import Rows

__all__ = ["Diagonal", "Fold", "Link", "Move", "Rows", "Window"]
