"""The parts of movement rules: runs of rows, pairs of dims, moves, and the map of an op's gradient,
which is the op's map turned around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cute_sharding.relations.moves import Link, Move, Pairs, Shape
from cute_sharding.relations.rows import Rows
from cute_sharding.sharding.meeting import Run, Runs

Rule = Callable[..., "Move | None"]
# For the dims that change: the rows of the operand, and those of the result.
Changed = Mapping[int, tuple[Rows, Rows]]


def line(x: int, y: int, count: int, dx: int = 1, dy: int = 1) -> Runs:
    """``count`` rows from (x, y) on, in steps of dx and dy."""
    if count <= 0:
        return ()
    if dx == dy == 1 or count == 1:
        return (Run(x, y, (), count),)
    return (Run(x, y, ((count, dx, dy),), 1),)


def pairs_but(ndim: int, changed: Changed) -> Pairs:
    """The pairs of dims of two tensors with ``ndim`` dims, unchanged except for ``changed``."""
    return tuple([changed.get(d, (Rows(d), Rows(d))) for d in range(ndim)])


def with_sizes(shape: Shape, dim: int, *sizes: int) -> Shape:
    """The shape with other sizes in place of the dim's."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def moved(x: Shape, onto: Shape, changed: Changed | Pairs, **more: Any) -> Move:
    """The move from one operand to one result whose dims are unchanged except for ``changed``."""
    pairs = changed if isinstance(changed, tuple) else pairs_but(len(x), changed)
    return Move((x,), (onto,), (Link(0, 0, pairs),), **more)


def gradient(rule: Rule, *, adds: bool = False, given: bool = False) -> Rule:
    """The rule of an op's gradient: the op's map turned around. Its arguments are the gradient, the
    operand's sizes, and the op's further arguments. Rows that the op did not read are zeros.

    Args:
        adds: the op reads rows several times, and their gradients are added up.
        given: the gradient op gets the operand itself and not its sizes.
    """

    def turned(received: Shape, sizes: Sequence[int], *args: Any) -> Move | None:
        x = tuple(sizes)
        move = rule(x, *args)
        if move is None or move.outputs != (tuple(received),):
            return None
        pairs = tuple([(target, source) for source, target in move.links[0].pairs])
        links = (Link(0, 0, pairs),)
        inputs = (*move.outputs, x) if given else move.outputs
        return move._replace(inputs=inputs, outputs=(x,), links=links, adds=adds, is_view=False)

    return turned
