"""A movement op as a map of rows: which rows of which tensors its results are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from cute_sharding.relations.rows import Rows

Shape: TypeAlias = "tuple[int, ...]"
# Of each dim of an exchange: how its rows are those of the source, and those of the target.
Pairs: TypeAlias = "tuple[tuple[Rows, Rows], ...]"


class Link(NamedTuple):
    """What one result takes from one operand.

    Attributes:
        source, target: which operand, and which result.
        pairs: of each dim of the exchange, how its rows are those of the one and of the other.

    >>> rows = Rows(0)
    >>> Link(0, 0, ((rows, rows),)).pairs[0][0].is_plain
    True
    """

    source: int
    target: int
    pairs: Pairs


@dataclass(frozen=True)
class Move:
    """A movement op on tensors of given shapes.

    Attributes:
        inputs, outputs: the shapes of operands and results.
        links: what the results are made of.
        fill: what rows of the results have that are made of no row.
        adds: rows of a result that are made of several are their sum.
        is_view: on a plain tensor the results are views of the one operand.
        triangle: of tril and triu: whether it is the lower one, and the number of the diagonal up
            to which, or from which on, the elements of the last two dims are kept.
        named: dims of the operands that the op is about, also where it does nothing to them.
        unchanged: those of them to which such arguments do nothing however many rows there are: the
            rows of ``x[:]``, and not those of ``x[:8]`` where there are eight.

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
        """The dims of an operand that do not go into every result as they are, and those that the
        op names.
        """
        found, every = {*self.named}, range(len(self.inputs[source]))
        for link in self.links:
            if link.source == source:
                plain = [one.dim for one, other in link.pairs if one.is_plain and other.is_plain]
                found.update([d for d in every if d not in plain])
        return frozenset(found.intersection(every))

    def of_result(self, k: int) -> Move:
        """The move of one of the results."""
        links = tuple([link._replace(target=0) for link in self.links if link.target == k])
        return replace(self, outputs=(self.outputs[k],), links=links)

    def turned(self) -> Move:
        """Of a move from one operand to one result, that from the result to the operand, of which
        other rows are no part.

        >>> from cute_sharding.relations.table import BY_OP
        >>> BY_OP["Tensor.__getitem__"].move((8,), 0, 2, 5).turned().outputs
        ((8,),)
        """
        links = [
            link._replace(pairs=tuple([(target, source) for source, target in link.pairs]))
            for link in self.links
        ]
        turned = replace(self, inputs=self.outputs, outputs=self.inputs, links=tuple(links))
        return replace(turned, is_view=False)

    def bound(self, source: int) -> frozenset[int]:
        """The dims of an operand of which some row of a result may need any row, in this call of a
        program or in another: all but those that go into every result as they are.

        >>> from cute_sharding.relations.table import BY_OP
        >>> some = BY_OP["Tensor.__getitem__"]
        >>> [some.move((8, 4), 0, 0, end).bound(0) for end in (None, 8)]
        [frozenset(), frozenset({0})]
        """
        ndim = len(self.inputs[source])
        corner = () if self.triangle is None else (ndim - 2, ndim - 1)
        return (self.touched(source) - self.unchanged) | {*corner}

    def home(self, link: Link) -> dict[int, int]:
        """For dims of the link's operand, the dim of the result that goes on with their rows."""
        return {
            d: other.dim for one, other in link.pairs for d in one.dims if other.dim is not None
        }
