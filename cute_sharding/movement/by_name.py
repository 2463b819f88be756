"""Relations of ops by their names in the tables: of views and of movement ops."""

from __future__ import annotations

from typing import Any

from cute_sharding.movement.table import BY_OP as MOVEMENTS
from cute_sharding.relations import NotOnlyMoved, Relation, relation_of_move, relation_of_view
from cute_sharding.relations.moves import Shape
from cute_sharding.views import BY_OP as VIEWS


def of_view(op: str, shape: Shape, *args: Any, **kwargs: Any) -> Relation:
    """The relation of a view op, by its name in the table of views.

    Raises:
        KeyError: there is no such op.
        ValueError, TypeError, IndexError: the op has no such arguments on such a tensor.

    >>> print(of_view("Tensor.expand", (3, 1), (3, 2)))
    (3, 1) -> (3, 2)
      operand 0 (3,2):(1,0) -> result 0 (3,2):(2,1)
    """
    return relation_of_view(VIEWS[op].view(shape, *args, **kwargs))


def of_move(op: str, *args: Any, **kwargs: Any) -> Relation:
    """The relation of a movement op, by its name in the table of movement; shapes stand for
    tensors.

    Raises:
        KeyError: there is no such op.
        NotOnlyMoved: it adds elements up, or no map of rows is known for such arguments.

    >>> print(of_move("torch.cat", [(2, 3), (1, 3)], 0))
    (2, 3), (1, 3) -> (3, 3)
      operand 0 6:1 -> result 0 6:1
      operand 1 3:1 -> result 0 6 + 3:1
    """
    move = MOVEMENTS[op].move(*args, **kwargs)
    if move is None:
        raise NotOnlyMoved(f"{op} of {args}: no map of rows is known for such arguments")
    return relation_of_move(move)
