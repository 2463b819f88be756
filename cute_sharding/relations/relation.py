"""Relations: which operand element each result element is; and their algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, TypeAlias

from cute_sharding.relations.elements import on_both_sides, read_once, subtract
from cute_sharding.relations.piece import (
    Piece,
    identity_pieces,
    join_pieces,
    ladders,
    meet,
    piece,
    through,
)
from cute_sharding.sharding.meeting import Run, count_rows

Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class Relation:
    """For each element of some results, the element of some operands that it is.

    Attributes:
        inputs, outputs: the shapes of the operands and of the results.
        pieces: the parts of the results. An element of a result is in at most one piece; it is in
            none if it is unknown, as in a device's part (:func:`held`) or in an inverse.
        constants: the values of elements in pieces whose source is below 0.

    >>> pieces = (piece(0, 0, 0, 0, [(24, 1, 1)]),)
    >>> print(Relation.same((4, 6)).then(Relation(((4, 6),), ((24,),), pieces)))
    (4, 6) -> (24,)
      operand 0 24:1 -> result 0 24:1
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    pieces: tuple[Piece, ...]
    constants: tuple[Any, ...] = ()

    @classmethod
    def same(cls, *shapes: Shape) -> Relation:
        """The identity on tensors of these shapes."""
        pieces = [
            each for k, shape in enumerate(shapes) for each in identity_pieces(k, k, prod(shape))
        ]
        return cls(shapes, shapes, tuple(pieces))

    def then(self, other: Relation) -> Relation:
        """This relation followed by ``other``: see :func:`compose`."""
        return compose(self, other)

    def of(self, *outputs: int) -> Relation:
        """The relation to some of the results only, in the given order."""
        numbers = {k: i for i, k in enumerate(outputs)}
        pieces = [
            each._replace(target=numbers[each.target])
            for each in self.pieces
            if each.target in numbers
        ]
        shapes = tuple([self.outputs[k] for k in outputs])
        return replace(self, outputs=shapes, pieces=join_pieces(pieces))

    @cached_property
    def by_source(self) -> dict[int, tuple[Piece, ...]]:
        """The pieces by the operand that they read; numbers below 0 are constants."""
        return _grouped(self.pieces, attrgetter("source"))

    @cached_property
    def by_target(self) -> dict[int, tuple[Piece, ...]]:
        """The pieces by result."""
        return _grouped(self.pieces, attrgetter("target"))

    def said(self, output: int) -> int:
        """How many elements of a result are in pieces."""
        return sum(each.size for each in self.by_target.get(output, ()))

    @property
    def is_total(self) -> bool:
        """Whether all elements of all results are in pieces."""
        return all(self.said(k) == prod(shape) for k, shape in enumerate(self.outputs))

    @property
    def sources(self) -> tuple[int, ...]:
        """The operands that are read."""
        return tuple(sorted(k for k in self.by_source if k >= 0))

    def __str__(self) -> str:
        before, after = (", ".join(map(str, each)) for each in (self.inputs, self.outputs))
        lines = [f"{before} -> {after}", *(f"  {each}" for each in self.pieces)]
        values = [f"  constant {k} is {value!r}" for k, value in enumerate(self.constants)]
        return "\n".join([*lines, *values])


def _grouped(pieces: Iterable[Piece], key: Callable[[Piece], int]) -> dict[int, tuple[Piece, ...]]:
    found: dict[int, list[Piece]] = {}
    for each in pieces:
        found.setdefault(key(each), []).append(each)
    return {k: tuple(some) for k, some in found.items()}


def compose(first: Relation, second: Relation) -> Relation:
    """``second`` applied to the results of ``first``, as one relation.

    The layouts of ``first`` into its results meet those of ``second`` into its operands, as strided
    runs: the cost grows with the number of pieces and modes, not of elements.

    Raises:
        ValueError: the shapes of ``second``'s operands are not those of ``first``'s results.

    >>> view = Relation(((3, 5),), ((15,),), (piece(0, 0, 0, 0, [(15, 1, 1)]),))
    >>> some = Relation(((15,),), ((9,),), (piece(0, 0, 2, 0, [(9, 1, 1)]),))  # [2:11]
    >>> print(compose(view, some))
    (3, 5) -> (9,)
      operand 0 2 + 9:1 -> result 0 9:1
    """
    if first.outputs != second.inputs:
        raise ValueError(
            "cannot compose the relations: the results of the first relation have shapes "
            f"{first.outputs}, but the operands of the second relation have shapes {second.inputs}"
        )
    constants, others = with_constants(first.constants, second)
    kept = [each for each in others if each.source < 0]
    found = with_results(first, second.outputs, [each for each in others if each.source >= 0])
    return replace(found, pieces=join_pieces([*found.pieces, *kept]), constants=constants)


def with_results(relation: Relation, outputs: tuple[Shape, ...], pieces: list[Piece]) -> Relation:
    """The relation with other results, whose pieces read its own results."""
    return replace(relation, outputs=outputs, pieces=through(relation.pieces, pieces))


def with_constants(
    constants: tuple[Any, ...], relation: Relation
) -> tuple[tuple[Any, ...], tuple[Piece, ...]]:
    """The constants of both, each once, and the relation's pieces renumbered to match."""
    if not relation.constants:
        return constants, relation.pieces
    known = [*constants]
    numbers = []
    for value in relation.constants:
        said = [(type(other), repr(other)) for other in known]
        if (type(value), repr(value)) not in said:
            known.append(value)
            said.append((type(value), repr(value)))
        numbers.append(-1 - said.index((type(value), repr(value))))
    pieces = [
        each if each.source >= 0 else each._replace(source=numbers[-1 - each.source])
        for each in relation.pieces
    ]
    return tuple(known), tuple(pieces)


def beside(relations: Sequence[Relation]) -> Relation:
    """Several relations of the same operands as one, with the results of all in order.

    >>> both = beside([Relation.same((2,)), Relation.same((2,))])
    >>> both.outputs, len(both.pieces)
    (((2,), (2,)), 2)
    """
    constants: tuple[Any, ...] = ()
    outputs: list[Shape] = []
    pieces: list[Piece] = []
    for relation in relations:
        constants, others = with_constants(constants, relation)
        pieces += [each._replace(target=each.target + len(outputs)) for each in others]
        outputs += relation.outputs
    return Relation(relations[0].inputs, tuple(outputs), tuple(pieces), constants)


def filled(relation: Relation, value: Any) -> Relation:
    """The relation with a constant for every result element that is in no piece.

    >>> padded = Relation(((3,),), ((5,),), (piece(0, 0, 0, 1, [(3, 1, 1)]),))
    >>> print(filled(padded, 0))
    (3,) -> (5,)
      constant 0 2:0 -> result 0 2:4
      operand 0 3:1 -> result 0 1 + 3:1
      constant 0 is 0
    """
    if relation.is_total:
        return relation
    constants, (some,) = with_constants(
        relation.constants, Relation((), ((),), (Piece(-1, 0, 0, 0, ()),), (value,))
    )
    pieces = list(relation.pieces)
    for k, shape in enumerate(relation.outputs):
        if relation.said(k) < prod(shape):
            written = [each.turned for each in relation.pieces if each.target == k]
            left = subtract([Run(0, 0, (), prod(shape))], read_once(written))
            for run in left:
                modes = [(n, 0, dx) for n, dx, _ in run.loops]
                pieces.append(piece(some.source, k, 0, run.x, [*modes, (run.length, 0, 1)]))
    return replace(relation, pieces=join_pieces(pieces), constants=constants)


# -- inverse ---------------------------------------------------------------------------------------


class ReadTwice(ValueError):
    """A relation has no inverse: an element of an operand is read more than once.

    >>> from cute_sharding.relations.table import relation_of
    >>> try:
    ...     inverse(relation_of("Tensor.expand", (2, 1), (2, 3)))
    ... except ReadTwice as error:
    ...     print(error)
    the relation has no inverse, because an element of operand 0 of shape (2, 1) is in \
several places of the results. The part of the relation that repeats the element: operand 0 \
(2,3):(1,0) -> result 0 (2,3):(3,1). If all copies are equal, pass any_copy=True
    """


def inverse(relation: Relation, *, any_copy: bool = False) -> Relation:
    """The relation from the results back to the operands.

    It exists if each operand element is read at most once, and it gives for each element that is
    read the place where it went. For a movement op that is the gradient, once unread elements are
    filled with 0 (:func:`filled`). Constants are left out. With ``any_copy`` an element that is
    read more than once is taken from its first copy: this undoes a relation on tensors whose copies
    stay equal, such as repeated heads.

    Raises:
        ReadTwice: an element is read more than once, and ``any_copy`` is not set.

    >>> some = Relation(((6,),), ((2,),), (piece(0, 0, 1, 0, [(2, 3, 1)]),))  # elements 1 and 4
    >>> print(inverse(some))
    (2,) -> (6,)
      operand 0 2:1 -> result 0 1 + 2:3
    >>> inverse(inverse(some)) == some
    True
    """
    found: list[Piece] = []
    for k in range(len(relation.inputs)):
        read: list[Run] = []
        for each in [each for each in relation.pieces if each.source == k]:
            new = _unread(each, read)
            if not any_copy and sum(some.size for some in new) < each.size:
                raise ReadTwice(
                    f"the relation has no inverse, because an element of operand {k} of shape "
                    f"{relation.inputs[k]} is in several places of the results. The part of the "
                    f"relation that repeats the element: {each}. If all copies are equal, pass "
                    "any_copy=True"
                )
            found += new
    return Relation(relation.outputs, relation.inputs, join_pieces(found))


def _unread(each: Piece, read: list[Run]) -> list[Piece]:
    """Pieces from a piece's target back to those source elements that are not in ``read``, each
    from one place; adds them to ``read``.
    """
    found: list[Piece] = []
    modes = tuple([mode for mode in each.modes if mode[1]])
    for ladder in ladders(each.x, each.y, modes):
        back = [(n, beside, step) for n, step, beside in ladder.modes]
        turned = piece(each.target, each.source, ladder.other, ladder.run.x, back)
        new = subtract([on_both_sides(ladder.run)], read)
        read += new
        found += [turned] if count_rows(new) == turned.size else _only(turned, new)
    return found


def _only(one: Piece, elements: Iterable[Run]) -> list[Piece]:
    """The piece restricted to some elements of its target."""
    return [found for run in elements for found in meet(one, of_run(one.target, one.target, run))]


def of_run(source: int, target: int, run: Run) -> Piece:
    """The piece from a run's x to its y."""
    return piece(source, target, run.x, run.y, [*run.loops, (run.length, 1, 1)])
