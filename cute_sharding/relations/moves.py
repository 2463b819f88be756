"""A movement op as a map of rows: the operands' rows that its results are made of."""

from __future__ import annotations

import ast
import math
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.rows import Rows, common_rows
from cute_sharding.sharding.meeting import Run, Runs, meet_on_x

Shape: TypeAlias = "tuple[int, ...]"
# For each dim of an exchange: how its rows map to the source's and to the target's.
Pairs: TypeAlias = "tuple[tuple[Rows, Rows], ...]"


class Link(NamedTuple):
    """The part of one result that comes from one operand.

    Attributes:
        source, target: the position of the operand, and of the result.
        pairs: for each dim of the exchange, how its rows map to the source's and to the target's.

    >>> rows = Rows(0)
    >>> Link(0, 0, ((rows, rows),)).pairs[0][0].is_plain
    True
    """

    source: int
    target: int
    pairs: Pairs


class Move(NamedTuple):
    """A movement op on tensors of given shapes.

    Attributes:
        inputs, outputs: the shapes of operands and results.
        links: the operand parts that the results are made of.
        fill: the value of result rows that come from no operand row.
        adds: a result row that comes from several operand rows is their sum.
        is_view: on a plain tensor the results are views of the one operand.
        triangle: for tril and triu: whether it is the lower one, and the number of the diagonal up
            to which, or from which on, the elements of the last two dims are kept.
        named: the operands' dims that the arguments name, even if the op leaves them unchanged.
        unchanged: those of ``named`` that stay unchanged for any number of rows: as in ``x[:]``,
            and not in ``x[:8]`` where there happen to be eight.

    >>> from cute_sharding.relations.table import BY_OP
    >>> roll = BY_OP["torch.roll"].move((8, 4), 2, 0)
    >>> isinstance(roll, Move), roll.outputs, roll.touched(0)
    (True, ((8, 4),), frozenset({0}))
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    links: tuple[Link, ...]
    fill: Any = 0
    adds: bool = False
    is_view: bool = False
    named: frozenset[int] = frozenset()
    unchanged: frozenset[int] = frozenset()
    triangle: tuple[bool, int] | None = None

    def touched(self, source: int) -> frozenset[int]:
        """The dims of an operand that do not go into every result unchanged, and those that the op
        names.
        """
        found, every = {*self.named}, range(len(self.inputs[source]))
        for link in self.links:
            if link.source == source:
                plain = [one.dim for one, other in link.pairs if one.is_plain and other.is_plain]
                found.update([d for d in every if d not in plain])
        return frozenset(found.intersection(every))

    def of_result(self, k: int) -> Move:
        """The move with one of its results only."""
        links = tuple([link._replace(target=0) for link in self.links if link.target == k])
        return self._replace(outputs=(self.outputs[k],), links=links)

    def turned(self) -> Move:
        """The move from the result back to the operand, of a move with one of each. Operand rows
        that were not read come from no row.

        >>> from cute_sharding.relations.table import BY_OP
        >>> BY_OP["Tensor.__getitem__"].move((8,), 0, 2, 5).turned().outputs
        ((8,),)
        """
        links = [
            link._replace(pairs=tuple([(target, source) for source, target in link.pairs]))
            for link in self.links
        ]
        turned = self._replace(inputs=self.outputs, outputs=self.inputs, links=tuple(links))
        return turned._replace(is_view=False)

    def bound(self, source: int) -> frozenset[int]:
        """The dims of an operand of which a result row may need any row, in this call or in another
        call of the program: all dims but those that go into every result unchanged.

        >>> from cute_sharding.relations.table import BY_OP
        >>> some = BY_OP["Tensor.__getitem__"]
        >>> [some.move((8, 4), 0, 0, end).bound(0) for end in (None, 8)]
        [frozenset(), frozenset({0})]
        """
        ndim = len(self.inputs[source])
        corner = () if self.triangle is None else (ndim - 2, ndim - 1)
        return (self.touched(source) - self.unchanged) | {*corner}

    def home(self, link: Link) -> dict[int, int]:
        """For dims of the link's operand, the dim of the result that has their rows."""
        return {
            d: other.dim for one, other in link.pairs for d in one.dims if other.dim is not None
        }


# The classes in the text of a move.
_CLASSES = {each.__name__: each for each in (Move, Link, Rows, Run, Window, Fold, Diagonal)}
_FLOATS = {"inf": math.inf, "nan": math.nan}


@remembered
def parse_move(text: str) -> Move:
    """The move of which this is the ``repr``.

    >>> from cute_sharding.relations.table import BY_OP
    >>> roll = BY_OP["torch.roll"].move((8, 4), 2, 0)
    >>> parse_move(repr(roll)) == roll
    True
    """
    found = _value_of(ast.parse(text, mode="eval").body)
    assert isinstance(found, Move)
    return found


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Call(ast.Name(name), args, keywords):
            of = frozenset if name == "frozenset" else _CLASSES[name]
            named = {each.arg: _value_of(each.value) for each in keywords if each.arg}
            return of(*map(_value_of, args), **named)
        case ast.Tuple(elements):
            return tuple(map(_value_of, elements))
        case ast.Set(elements):
            return set(map(_value_of, elements))
        case ast.Name(name):
            return _FLOATS[name]
        case ast.UnaryOp(ast.USub(), ast.Name(name)):
            return -_FLOATS[name]
    return ast.literal_eval(node)


@remembered
def are_apart(one: Move, i: int, other: Move, j: int) -> bool:
    """Whether result ``i`` of the one and ``j`` of the other, of one operand, have no row of it in
    common. False also where that is not known.

    >>> from cute_sharding.relations.table import BY_OP
    >>> parts = [BY_OP["Tensor.__getitem__"].move((8,), 0, *ends) for ends in ((0, 4), (4, 8))]
    >>> are_apart(parts[0], 0, parts[1], 0), are_apart(parts[0], 0, parts[0], 0)
    (True, False)
    """
    ones = [_rows_read(one, link) for link in one.links if link.target == i]
    others = [_rows_read(other, link) for link in other.links if link.target == j]
    return all(
        any(d in second and not meet_on_x(rows, second[d]) for d, rows in first.items())
        for first in ones
        for second in others
    )


def _rows_read(move: Move, link: Link) -> dict[int, Runs]:
    """For dims of the link's operand, the rows that the link reads, as x. A dim of which rows are
    read in another form is left out.
    """
    found: dict[int, Runs] = {}
    for source, target in link.pairs:
        if source.dim is None or source.backward or source.form or target.form:
            continue
        n = (move.inputs[link.source][source.dim],)
        m = tuple([move.outputs[link.target][d] for d in target.dims])
        found[source.dim] = common_rows(source, n, ((),), target, m, ((),) * len(m))
    return found
