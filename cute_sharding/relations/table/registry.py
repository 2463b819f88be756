"""All rows, by op and by aten overload."""

from __future__ import annotations

from typing import Any

from cute_sharding.relations.relation import Relation
from cute_sharding.relations.table import (
    along,
    attention,
    indexing,
    losses,
    movement,
    normalization,
    products,
    steps,
    torchs,
    views,
    windows,
)
from cute_sharding.relations.table.row import ByDimMap, ByRows, BySteps, OfTorch, Row

TABLE: tuple[Row, ...] = (
    *views.ROWS,
    *movement.ROWS,
    *steps.ROWS,
    *along.ROWS,
    *indexing.ROWS,
    *products.ROWS,
    *normalization.ROWS,
    *losses.ROWS,
    *windows.ROWS,
    *attention.ROWS,
    *torchs.ROWS,
)
"""The rows.

>>> [row.pattern() for row in TABLE if "bmm.default" in row.overloads]
['b m k, b k n -> b m n']
"""

BY_OP: dict[str, Any] = {row.op: row for row in (*views.ROWS, *movement.ROWS)}
"""The rows of views and of movement by the name that the op has in torch.

>>> BY_OP["torch.unsqueeze"].view((2, 3), 1).output_shape
(2, 1, 3)
>>> BY_OP["torch.select"].move((4, 6), 1, -1).outputs
((4,),)
"""

VIEWS: dict[str, ByDimMap] = {name: row for row in views.ROWS for name in row.overloads}
"""The rows of views by aten overload.

>>> VIEWS["view.default"].op
'Tensor.view'
"""

MOVEMENTS: dict[str, ByRows] = {name: row for row in movement.ROWS for name in row.overloads}
"""The rows of movement by aten overload.

>>> MOVEMENTS["roll.default"].op
'torch.roll'
"""

STEPS: dict[str, BySteps] = {name: row for row in steps.ROWS for name in row.overloads}
"""The rows of ops that are several steps, by aten overload.

>>> [step.row.op for step in STEPS["channel_shuffle.default"].steps((2, 6, 4), 3)]
['Tensor.view', 'torch.permute', 'Tensor.view']
"""

SIGNATURES: dict[str, Row] = {name: row for row in TABLE for name in row.signed}
"""The rows by each overload that may go by its signature.

>>> SIGNATURES["mm.default"].pattern(), SIGNATURES["tril.default"].pattern((2, 6, 4))
('m k, k n -> m n', 'd0 [d1] [d2] -> d0 [to1] [to2]')
"""

OF_TORCH: dict[str, OfTorch] = {name: row for row in torchs.ROWS for name in row.overloads}
"""The rows of ops that torch answers for, by aten overload.

>>> OF_TORCH["clone.default"].carries_any_cut
True
"""

ROWS: dict[str, Row] = {name: row for row in TABLE for name in (*row.overloads, *row.by_names)}
"""The row of each aten overload.

>>> ROWS["convolution.default"].has_function, ROWS["rrelu_with_noise.default"].writes
(True, ('noise',))
"""


def relation_of(op: str, *args: Any, **kwargs: Any) -> Relation:
    """The relation of a view or a movement op, by its name in torch; shapes stand for tensors.

    Raises:
        KeyError: there is no such op.
        NotOnlyMoved: it adds elements up, or no map of rows is known for these arguments.
        ValueError, TypeError, IndexError: the op takes no such arguments on such a tensor.

    >>> print(relation_of("Tensor.expand", (3, 1), (3, 2)))
    (3, 1) -> (3, 2)
      operand 0 (3,2):(1,0) -> result 0 (3,2):(2,1)
    """
    found: Relation = BY_OP[op].relation(*args, **kwargs)
    return found
