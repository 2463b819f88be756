"""What a row of the table is: one op, or several that do the same to dims, and what the relation
between its operands and its results is.

There are as many kinds of row as ways to write a relation down: by the names of dims (:class:`Row`
itself), by a DimMap (:class:`ByDimMap`: views), by the rows of a dim (:class:`ByRows`: movement),
by steps that are rows of these two kinds (:class:`BySteps`). Of each kind a signature is known, and
of all but the first which element of the operands each element of the results is. Of an op without
a relation a row says what else is known (:class:`OfTorch`).

A rule is called with the op's arguments, where tensors are their shapes. Where it gives None,
nothing is known of such arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, NamedTuple

from cute_sharding.relations.dim_map import DimMap
from cute_sharding.relations.moves import Move
from cute_sharding.relations.read import NotOnlyMoved, relation_of_move, relation_of_view
from cute_sharding.relations.relation import Relation, compose
from cute_sharding.relations.signature import COPIES, Linear
from cute_sharding.relations.table.derived import (
    Origins,
    origins_of_move,
    origins_of_view,
    pattern_of_move,
    pattern_of_origins,
)
from cute_sharding.relations.table.kernels import Kernel
from cute_sharding.relations.table.names import Shape, without_missing
from cute_sharding.relations.view import View, view_of


@dataclass(frozen=True)
class Row:
    """One op, or several that do the same to dims; here by the names of these.

    Attributes:
        overloads: its aten overloads.
        rule: a pattern for the tensors among the arguments in their order, those in lists and
            options too, as :func:`cute_sharding.relations.parse` reads it; or arguments -> pattern.
            In a pattern that is the rule, a tensor that ends in ``?`` is left out where the
            argument in its place is None.
        reduce: what a contracted dim leaves pending: "sum", "avg", "max", "min"; or, of arguments;
            None: such dims are whole.
        linear: the operands of which what is pending may stay so; by position, those of which the
            result is linear, each by itself.
        filled: the names of which no device may be left without rows, since the op refuses to
            compute of nothing, or torch's kernel divides by their number; or, of arguments; True:
            all of them.
        shares: an average that is left pending may be of blocks that differ: the op is then run so
            that each counts by its share of the "elements", or, of losses that give their weight as
            a second result, of the "rows" (dtensor/decide/shares.py).
        empty: what the op gives of no rows changes nothing of what is pending, as of sums: a device
            may have none.
        op: its name in torch, such as ``torch.permute`` or ``Tensor.expand``.
        by_names: overloads that go by the signature alone.
        kernel: what the op's kernel wants of its local arguments.
        writes: the names of arguments that the op writes to, where its schema in torch does not say
            so.
        own_order: of operands that do not lie row by row kernels may make results in another order
            of dims than torch says.
        has_function: torch's dispatcher may have a function of its own for the op, so that the
            propagator is not asked.
        made_of: what torch makes the op of, before a DTensor meets it.
        note: what a reader of the table should know.

    >>> row = Row(("mm.default",), "m k, k n -> m n", "sum", linear=(0, 1))
    >>> row.pattern(), row.reduction()
    ('m k, k n -> m n', 'sum')
    """

    overloads: tuple[str, ...]
    rule: Any
    reduce: str | Callable[..., str | None] | None = None
    linear: Linear | tuple[int, ...] = ()
    filled: bool | frozenset[str] | Callable[..., frozenset[str]] = False
    shares: str | None = None
    empty: bool = False
    op: str = ""
    by_names: tuple[str, ...] = ()
    kernel: Kernel | None = None
    writes: tuple[str, ...] = ()
    own_order: bool = False
    has_function: bool = False
    made_of: str = ""
    note: str = field(default="", compare=False)

    # Whether the results are elements of the operands, or sums of them: whether it has a relation,
    # from which the rest follows. Then the rule computes with the numbers among the arguments; in a
    # compiled program those that another call may have otherwise are given as ThisCall (names.py).
    is_moved: ClassVar[bool] = False

    @property
    def signed(self) -> tuple[str, ...]:
        """The overloads that go by the signature, where nothing else answers."""
        return self.overloads

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        """The op's signature for those arguments; None: none is known."""
        if isinstance(self.rule, str):
            return without_missing(self.rule, args)
        found: str | None = self.rule(*args, **kwargs)
        return found

    def reduction(self, *args: Any, **kwargs: Any) -> str | None:
        """What a contracted dim leaves pending for those arguments; None: such dims are whole."""
        return self.reduce(*args, **kwargs) if callable(self.reduce) else self.reduce

    def has_rows(self, *args: Any, **kwargs: Any) -> bool | frozenset[str]:
        """The names of which each device must have rows for those arguments; True: all."""
        return self.filled(*args, **kwargs) if callable(self.filled) else self.filled

    def relation(self, *args: Any, **kwargs: Any) -> Relation:
        """Which element of its operands each element of a result is.

        Raises:
            NotOnlyMoved: the op computes, adds elements up, or nothing is known of such arguments.
            ValueError, TypeError, IndexError: it has no such arguments on such tensors.

        >>> print(BY_OP["torch.cat"].relation([(2, 3), (1, 3)], 0))
        (2, 3), (1, 3) -> (3, 3)
          operand 0 6:1 -> result 0 6:1
          operand 1 3:1 -> result 0 6 + 3:1
        """
        raise NotOnlyMoved(f"{self.overloads[0]}: what it gives is computed")


@dataclass(frozen=True)
class OfTorch(Row):
    """An op of which no relation is written: torch's own rule answers.

    Attributes:
        carries_any_cut: that is right on any cut, as the op does the same to any rows.
        leaves_pending: the results' values do not depend on what is pending in the operand, and
            torch leaves them pending, the same on each device.
        commutes: of two such ops on different tensors either may come first.
        smooths_labels: F.cross_entropy with label_smoothing has it write to a sum that is pending.

    >>> row = OfTorch(("clone.default",), carries_any_cut=True)
    >>> row.signed, row.pattern((2, 3)) is None
    ((), True)
    """

    rule: Any = None
    carries_any_cut: bool = False
    leaves_pending: bool = False
    commutes: bool = False
    smooths_labels: bool = False

    @property
    def signed(self) -> tuple[str, ...]:
        return ()

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        return None


class _Derived(Row):
    """A row whose signature follows from its relation."""

    is_moved: ClassVar[bool] = True

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        try:
            return self._pattern(*args, **kwargs)
        except (ValueError, IndexError, TypeError):
            return None  # torch says what is wrong

    def _pattern(self, *args: Any, **kwargs: Any) -> str | None:
        raise NotImplementedError


@dataclass(frozen=True)
class ByDimMap(_Derived):
    """A view op: ``rule`` gives a DimMap for the input's shape and the op's arguments.

    Attributes:
        strict: its overloads raise where they are not free and ``implicit_redistribution`` is
            "error"; others redistribute their input under any setting.
        wants_whole_dims: the local op needs the dims that it does not keep whole on every device:
            squeeze removes a dim only where its local size is 1 (a device that holds nothing has 0
            there), and view_as_complex a dim of size 2.
        pairs: the output's elements are pairs of the input's (view_as_complex).
        linear: what may stay pending, of all overloads; of a view that reads numbers in another way
            (real as complex, or the reverse) only sums and averages, ``(0,)``.

    >>> row = BY_OP["torch.squeeze"]
    >>> isinstance(row, ByDimMap), row.overloads[:2], row.strict, row.wants_whole_dims
    (True, ('squeeze.default', 'squeeze.dim'), True, True)
    """

    linear: Linear | tuple[int, ...] = COPIES
    strict: bool = False
    wants_whole_dims: bool = False
    pairs: bool = False

    @property
    def only_sums(self) -> bool:
        """Whether of what is pending only sums and averages may stay so."""
        return not isinstance(self.linear, Linear)

    @property
    def signed(self) -> tuple[str, ...]:
        return self.by_names

    def view(self, shape: Sequence[int], *args: Any, **kwargs: Any) -> View:
        """The op on a tensor of that shape, as a view; ``args`` as the op has them after it.

        Raises:
            ValueError, TypeError, IndexError: the op has no such arguments on such a tensor.

        >>> BY_OP["torch.permute"].view((2, 3, 4), (2, 0, 1)).output_shape
        (4, 2, 3)
        """
        dim_map: DimMap = self.rule(shape, *args, **kwargs)
        return View.of_pairs(shape) if self.pairs else view_of(shape, dim_map)

    def origins(self, shape: Shape, *args: Any) -> tuple[Shape, Origins]:
        """The output's shape, and which input dim each of its dims is, as it is."""
        return self.view(shape, *args).output_shape, self._origins(shape, *args)

    def _origins(self, shape: Shape, *args: Any) -> Origins:
        if self.pairs:  # of two elements of the last dim
            return tuple(range(len(shape) - 1))
        return origins_of_view(shape, self.rule(shape, *args))

    def _pattern(self, shape: Shape, *args: Any) -> str:
        return pattern_of_origins(len(shape), self._origins(shape, *args))

    def relation(self, *args: Any, **kwargs: Any) -> Relation:
        return relation_of_view(self.view(*args, **kwargs))


@dataclass(frozen=True)
class ByRows(_Derived):
    """A movement op: ``rule`` gives a :class:`Move`, a map of rows.

    Attributes:
        reads: how many of its operands the results are made of; None: all. The gradient of a pad is
            given what was padded, too.
        is_signed: whether ``overloads`` have a signature, where the map does not answer; those
            ``by_names`` have one anyway.
        gathers: torch's own rule gathers whatever is cut, also dims that the op leaves as they are.
        otherwise: the signature for arguments of which no map is known.

    >>> row = BY_OP["torch.flip"]
    >>> isinstance(row, ByRows), row.overloads, row.pattern((6, 4), [0])
    (True, ('flip.default',), '[d0] d1 -> [to0] d1')
    """

    reads: int | None = None
    is_signed: bool = True
    gathers: bool = False
    otherwise: str | None = None

    @property
    def signed(self) -> tuple[str, ...]:
        return (*(self.overloads if self.is_signed else ()), *self.by_names)

    def move(self, *args: Any, **kwargs: Any) -> Move | None:
        """The op on tensors of those shapes, which stand for them among the arguments; None: no map
        is known for such arguments.

        >>> BY_OP["torch.cat"].move([(2, 3), (2, 5)], 1).outputs
        ((2, 8),)
        """
        found: Move | None = self.rule(*args, **kwargs)
        return found

    def origins(self, *args: Any) -> tuple[Shape, Origins] | None:
        """Of a result of one operand the shape, and which dim of that each of its dims is."""
        move = self.move(*args)
        return None if move is None else (move.outputs[0], origins_of_move(move))

    def _pattern(self, *args: Any, **kwargs: Any) -> str | None:
        move = self.move(*args, **kwargs)
        return self.otherwise if move is None else pattern_of_move(move, self.reads)

    def relation(self, *args: Any, **kwargs: Any) -> Relation:
        move = self.move(*args, **kwargs)
        if move is None:
            raise NotOnlyMoved(f"{self.op} of {args}: no map of rows is known for such arguments")
        return relation_of_move(move)


class Step(NamedTuple):
    """One step of an op that is several: a row, and its arguments after the tensor."""

    row: ByDimMap | ByRows
    args: tuple[Any, ...]


@dataclass(frozen=True)
class BySteps(_Derived):
    """An op that is several steps, each a view or a movement: the same elements in new dims, as
    pixel_shuffle, or windows of two dims. ``rule`` gives the steps.

    Attributes:
        is_signed: whether ``overloads`` have a signature, where the steps do not answer; those
            ``by_names`` have one anyway.
        is_wrong_in_torch: torch derives a rule of the op that is not right on all placements.

    >>> row: BySteps = STEPS["pixel_shuffle.default"]
    >>> [step.row.op for step in row.steps((8, 4, 4), 2)]
    ['Tensor.view', 'torch.permute', 'Tensor.view']
    """

    is_signed: bool = True
    is_wrong_in_torch: bool = False

    @property
    def signed(self) -> tuple[str, ...]:
        return (*(self.overloads if self.is_signed else ()), *self.by_names)

    def steps(self, shape: Shape, *args: Any) -> list[Step] | None:
        """From the operand's shape and the arguments; None: none are known."""
        found: list[Step] | None = self.rule(shape, *args)
        return found

    def origins(self, shape: Shape, *args: Any) -> tuple[Shape, Origins] | None:
        """Of the result the shape, and which dim of the operand each of its dims is."""
        steps = self.steps(shape, *args)
        now: Origins = tuple(range(len(shape)))
        for step in steps or ():
            found = step.row.origins(shape, *step.args)
            if found is None:
                return None
            shape = found[0]
            now = tuple([None if d is None else now[d] for d in found[1]])
        return None if steps is None else (shape, now)

    def _pattern(self, shape: Shape, *args: Any) -> str | None:
        """Each device runs the op on its rows. So a dim has a name where it goes through also of
        twice the sizes: three channels in three groups stay as they are, and those of one device,
        say one, are not three groups.
        """
        some, others = (self.origins(tuple([k * n for n in shape]), *args) for k in (1, 2))
        if some is None or others is None:
            return None
        through = [d if d == other else None for d, other in zip(some[1], others[1])]
        return pattern_of_origins(len(shape), through)

    def relation(self, shape: Shape, *args: Any, **kwargs: Any) -> Relation:
        steps = self.steps(shape, *args, **kwargs)
        if steps is None:
            name = self.overloads[0]
            raise NotOnlyMoved(f"{name} of {args}: no map of rows is known for such arguments")

        def then(first: Relation, step: Step) -> Relation:
            return compose(first, step.row.relation(first.outputs[0], *step.args))

        return reduce(then, steps, Relation.same(shape))
