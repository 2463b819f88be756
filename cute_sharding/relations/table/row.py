"""The rows of the table: one op, or several with the same relation, and the relation between their
operands and results; and the signatures that follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeAlias

from cute_sharding.relations.moves import Move, NotOnlyMoved, relation_of_move, relation_of_view
from cute_sharding.relations.relation import Relation, compose
from cute_sharding.relations.signature import (
    COPIED,
    FILLED,
    LINEAR,
    NOT_FOLDED,
    Folding,
    Linear,
)
from cute_sharding.relations.table.kernels import Kernel
from cute_sharding.relations.table.names import Shape, text, without_missing
from cute_sharding.relations.view import DimMap, DimSpec, InputDim, Split, View, view_of

# -- row -------------------------------------------------------------------------------------------
# The rows of the table: one op, or several with the same relation, and the relation between their
# operands and results.
#
# There are as many kinds of row as ways to write a relation: by the names of dims (``Row`` itself),
# by a DimMap (``ByDimMap``: views), by the rows of a dim (``ByRows``: movement), by steps that are
# rows of these two kinds (``BySteps``). Each kind has a signature; all but the first also know
# which operand element each result element is. For an op without a relation, a row states what else
# is known (``OfTorch``).
#
# A rule is called with the op's arguments, with shapes for tensors. If it returns None, nothing is
# known for these arguments.


class Windowing(NamedTuple):
    """What a device makes of the rows that its windows read.

    Attributes:
        name: of the function that runs the op on them (dtensor/run/halos.py).
        fill: the value of the rows before the first and after the last, which are padding.
        leading: the number of dims before those that may be read in windows; 0: each is, from the
            first that is.
        tiles: whether the op as it is is right on windows that lie side by side, whatever number
            of them a device has.
    """

    name: str = ""
    fill: float = 0
    leading: int = 0
    tiles: bool = False


NO_WINDOWS = Windowing()


@dataclass(frozen=True, eq=False)
class Row:
    """One op, or several with the same relation, which this class writes by the names of dims.

    Attributes:
        overloads: the aten overloads.
        rule: a pattern, as :func:`cute_sharding.relations.parse` reads it, for the tensors among
            the arguments in order, with those in lists and options; or a function from arguments
            to a pattern. If the rule is a pattern, an operand that ends in ``?`` is left out where
            the argument in its place is None.
        reduce: the reduction that a cut of a contracted dim leaves pending: "sum", "avg", "max",
            "min"; or a function of the arguments; None: contracted dims must not be cut.
        linear: the operands whose pending reductions may stay pending; positions: those in which
            the result is linear, each by itself.
        filled: the names of which every device must have rows, since the op refuses to run on none
            or torch's kernel divides by their number; or a function of the arguments; True: all.
        shares: an average may be pending over unequal blocks: the op then runs so that each block
            is weighted by its share of the "elements", or, for losses that give their weight as a
            second result, of the "rows" (dtensor/decide/local.py).
        empty: the op's result on no rows is neutral for the pending reduction, as for sums: a
            device may have no rows.
        fold: how an op folds, if its signature has folded dims.
        picks_as_torch: picked rows stay pending whatever their reduction receives, as on torch: a
            residual stream begins with them, and is to lie as one of picks from a whole table.
        counts_back: the numbers of an index may be negative; they then count from the end.
        windows: how an op runs, if its signature has dims of which a row reads several.
        op: its name in torch, such as ``torch.permute`` or ``Tensor.expand``.
        by_names: overloads that only the signature answers.
        kernel: what the op's kernel needs of its local arguments.
        writes: the names of arguments that the op writes to although its schema in torch does not
            say so.
        has_function: torch's dispatcher may have a function of its own for the op, which it calls
            without asking the propagator.
        made_of: the ops that torch replaces the op by, before a DTensor meets it.
        in_parts: whether the op is always taken apart as torch does it except in inference mode.
            torch would derive a rule from rules that it derives for the parts, which may take
            minutes, and gathers where parts fold.
        makes_constants: whether torch replaces the op by ops of which some make tensors of numbers,
            before a DTensor meets it.
        note: a remark for readers of the table.

    Attributes of one or two kinds of row:
        wants_whole_dims: of a view, whether dims that the local op does not keep must be whole on
            every device: squeeze removes a dim only if its local size is 1 (it is 0 on a device
            that holds nothing), and view_as_complex needs a dim of size 2.
        reads: of a movement, how many of its operands the results are made of; None: all. The
            gradient of a pad also gets the padded operand.
        is_signed: of a movement or of steps, whether ``overloads`` have a signature for when the
            map or the steps do not answer; those ``by_names`` have one anyway.
        gathers: of a movement, whether torch's own rule gathers every cut dim, even those that the
            op leaves unchanged.
        otherwise: of a movement, the signature for arguments without a known map.
        is_wrong_in_torch: of steps, whether torch derives a rule that is wrong on some placements.
        carries_any_cut: of torch's ops, whether torch's rule is right on any cut, since the op
            treats all rows alike.
        leaves_pending: of torch's ops, whether the results' values do not depend on a pending
            reduction of the operand, and torch leaves them pending; they are the same everywhere.
        smooths_labels: of torch's ops, whether F.cross_entropy with label_smoothing lets the op
            write to a pending sum.
        counts: of torch's ops, whether the op counts numbers, up to the greatest.

    >>> row = Row(("mm.default",), "m k, k n -> m n", "sum", linear=(0, 1))
    >>> row.pattern(), row.reduction()
    ('m k, k n -> m n', 'sum')
    """

    overloads: tuple[str, ...]
    rule: Any = None
    reduce: str | Callable[..., str | None] | None = None
    linear: Linear | tuple[int, ...] = ()
    filled: bool | frozenset[str] | Callable[..., bool | frozenset[str]] = False
    shares: str | None = None
    empty: bool = False
    fold: Folding = NOT_FOLDED
    picks_as_torch: bool = False
    counts_back: bool = False
    windows: Windowing = NO_WINDOWS
    op: str = ""
    by_names: tuple[str, ...] = ()
    kernel: Kernel | None = None
    writes: tuple[str, ...] = ()
    has_function: bool = False
    made_of: str = ""
    makes_constants: bool = False
    in_parts: bool = False
    note: str = ""
    wants_whole_dims: bool = False
    reads: int | None = None
    is_signed: bool = True
    gathers: bool = False
    otherwise: str | None = None
    is_wrong_in_torch: bool = False
    carries_any_cut: bool = False
    leaves_pending: bool = False
    smooths_labels: bool = False
    counts: bool = False

    # Whether result elements are operand elements or sums of them: then the op has a relation, from
    # which the rest follows. Its rule computes with the numbers among the arguments; in a compiled
    # program those that may differ in another call are given as ThisCall (names.py).
    is_moved: ClassVar[bool] = False

    @property
    def signed(self) -> tuple[str, ...]:
        """The overloads that the signature answers if nothing else does."""
        return self.overloads

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        """The op's signature for these arguments; None: none is known."""
        if isinstance(self.rule, str):
            return without_missing(self.rule, args)
        found: str | None = self.rule(*args, **kwargs)
        return found

    def reduction(self, *args: Any, **kwargs: Any) -> str | None:
        """The reduction that a cut contracted dim leaves pending; None: such dims are whole."""
        return self.reduce(*args, **kwargs) if callable(self.reduce) else self.reduce

    def commuting(self, *args: Any, **kwargs: Any) -> Linear | tuple[int, ...]:
        """The operands whose pending reductions may stay pending, for these arguments."""
        return self.linear

    def has_rows(self, *args: Any, **kwargs: Any) -> bool | frozenset[str]:
        """The names of which each device must have rows, for these arguments; True: all."""
        return self.filled(*args, **kwargs) if callable(self.filled) else self.filled

    def relation(self, *args: Any, **kwargs: Any) -> Relation:
        """The relation that says which operand element each result element is.

        Raises:
            NotOnlyMoved: the op computes, adds elements up, or nothing is known for these
            arguments.
            ValueError, TypeError, IndexError: it takes no such arguments on such tensors.

        >>> print(BY_OP["torch.cat"].relation([(2, 3), (1, 3)], 0))
        (2, 3), (1, 3) -> (3, 3)
          operand 0 6:1 -> result 0 6:1
          operand 1 3:1 -> result 0 6 + 3:1
        """
        raise NotOnlyMoved(
            f"{self.overloads[0]} computes new values instead of only moving elements"
        )


class OfTorch(Row):
    """An op without a relation: torch's own rule answers.

    >>> row = OfTorch(("clone.default",), carries_any_cut=True)
    >>> row.signed, row.pattern((2, 3)) is None
    ((), True)
    """

    @property
    def signed(self) -> tuple[str, ...]:
        return ()

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        return None


class _Derived(Row):
    """A row whose signature is derived from its relation."""

    is_moved: ClassVar[bool] = True

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        try:
            return self._pattern(*args, **kwargs)
        except (ValueError, IndexError, TypeError):
            return None  # torch reports what is wrong

    def _pattern(self, *args: Any, **kwargs: Any) -> str | None:
        raise NotImplementedError


class ByDimMap(_Derived):
    """A view op: ``rule`` gives a DimMap for the input's shape and the op's arguments; or, where an
    output element is several input elements, a :class:`View`. For a view that reads numbers in
    another way (real as complex, or the reverse) only sums and averages may stay pending: it says
    ``linear=(0,)``. For one that reads bits in another way, nothing may: ``linear=()``.

    >>> row = BY_OP["torch.squeeze"]
    >>> isinstance(row, ByDimMap), row.overloads[:2], row.wants_whole_dims
    (True, ('squeeze.default', 'squeeze.dim'), True)
    """

    def may_stay(self, reduce_op: str | None, view: View | None = None) -> bool:
        """Whether a pending reduction may stay pending; ``reduce_op`` is None for one whose
        placement has more to it than the op's name, such as a mask. Of a tensor whose elements the
        view repeats there would be more to reduce.
        """
        if isinstance(self.linear, Linear):
            return view is None or not view.repeats
        return 0 in self.linear and reduce_op in LINEAR

    @property
    def signed(self) -> tuple[str, ...]:
        return self.by_names

    def view(self, shape: Sequence[int], *args: Any, **kwargs: Any) -> View:
        """The op as a view of a tensor of that shape; ``args``: the op's further arguments.

        Raises:
            ValueError, TypeError, IndexError: the op takes no such arguments on such a tensor.

        >>> BY_OP["torch.permute"].view((2, 3, 4), (2, 0, 1)).output_shape
        (4, 2, 3)
        """
        found: DimMap | View = self.rule(shape, *args, **kwargs)
        return found if isinstance(found, View) else view_of(shape, found)

    def origins(self, shape: Shape, *args: Any) -> tuple[Shape, Origins]:
        """The output's shape, and for each output dim the input dim that it is unchanged."""
        return self.view(shape, *args).output_shape, self._origins(shape, *args)

    def _origins(self, shape: Shape, *args: Any) -> Origins:
        found: DimMap | View = self.rule(shape, *args)
        if isinstance(found, View):
            came = {to: d for d, to in found.kept.items()}
            return tuple([came.get(to) for to in range(found.rank)])
        return origins_of_view(shape, found)

    def _pattern(self, shape: Shape, *args: Any) -> str:
        return pattern_of_origins(len(shape), self._origins(shape, *args))

    def relation(self, *args: Any, **kwargs: Any) -> Relation:
        if not self.linear:  # the same bits, and other numbers
            return super().relation(*args, **kwargs)
        return relation_of_view(self.view(*args, **kwargs))


class ByRows(_Derived):
    """A movement op: ``rule`` gives a :class:`Move`, a map of rows.

    >>> row = BY_OP["torch.flip"]
    >>> isinstance(row, ByRows), row.overloads, row.pattern((6, 4), [0])
    (True, ('flip.default',), '[d0] d1 -> [to0] d1')
    """

    @property
    def signed(self) -> tuple[str, ...]:
        return (*(self.overloads if self.is_signed else ()), *self.by_names)

    def move(self, *args: Any, **kwargs: Any) -> Move | None:
        """The op's map of rows, with shapes for the tensors among the arguments; None: no map is
        known for these arguments.

        >>> BY_OP["torch.cat"].move([(2, 3), (2, 5)], 1).outputs
        ((2, 8),)
        """
        found: Move | None = self.rule(*args, **kwargs)
        return found

    def origins(self, *args: Any) -> tuple[Shape, Origins] | None:
        """The one result's shape, and for each of its dims the one operand's dim that it is."""
        move = self.move(*args)
        return None if move is None else (move.outputs[0], origins_of_move(move))

    def _pattern(self, *args: Any, **kwargs: Any) -> str | None:
        move = self.move(*args, **kwargs)
        return self.otherwise if move is None else pattern_of_move(move, self.reads)

    def commuting(self, *args: Any, **kwargs: Any) -> Linear | tuple[int, ...]:
        """Those that the row names. Rows that are added up are so in each contribution, and a row
        that is filled in is so on every device: then fewer reductions may stay.
        """
        move = self.move(*args, **kwargs) if isinstance(self.linear, Linear) else None
        if move is None:
            return ()
        return self.linear._replace(  # type: ignore[union-attr]
            kept=LINEAR if move.adds else COPIED if move.fill == 0 else FILLED
        )

    def relation(self, *args: Any, **kwargs: Any) -> Relation:
        move = self.move(*args, **kwargs)
        if move is None:
            raise NotOnlyMoved(
                f"cute_sharding does not know which rows {self.op} reads for the arguments {args}"
            )
        return relation_of_move(move)


class RowStep(NamedTuple):
    """One step of a :class:`BySteps` op: a row, and its arguments after the tensor."""

    row: ByDimMap | ByRows
    args: tuple[Any, ...]


class BySteps(_Derived):
    """An op that is several steps, each a view or a movement: the same elements in new dims (as
    pixel_shuffle), or windows of two dims. ``rule`` gives the steps.

    >>> row: BySteps = STEPS["pixel_shuffle.default"]
    >>> [step.row.op for step in row.steps((8, 4, 4), 2)]
    ['Tensor.view', 'torch.permute', 'Tensor.view']
    """

    @property
    def signed(self) -> tuple[str, ...]:
        return (*(self.overloads if self.is_signed else ()), *self.by_names)

    def steps(self, shape: Shape, *args: Any) -> list[RowStep] | None:
        """The steps, for the operand's shape and the arguments; None: none are known."""
        found: list[RowStep] | None = self.rule(shape, *args)
        return found

    def origins(self, shape: Shape, *args: Any) -> tuple[Shape, Origins] | None:
        """The result's shape, and for each of its dims the operand's dim that it is unchanged."""
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
        """Each device runs the op on its own rows. So a dim gets a name only if it is unchanged
        with twice the sizes too: three channels in three groups are unchanged, but one device's
        part, say one channel, is not three groups.
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
            raise NotOnlyMoved(
                f"cute_sharding does not know which rows {name} reads for the arguments {args}"
            )

        def then(first: Relation, step: RowStep) -> Relation:
            return compose(first, step.row.relation(first.outputs[0], *step.args))

        return reduce(then, steps, Relation.same(shape))


# -- derived ---------------------------------------------------------------------------------------
# Signatures derived from a map of rows or from a DimMap.
#
# A dim that goes into every result unchanged, in every call, gets a name; all others are whole. So
# an op that moves rows is written once, as a map of them, and the map also gives the cuts that the
# op carries for nothing.

# For each dim of a result, the operand's dim that it is unchanged; None: there is no such dim.
Origins: TypeAlias = "Sequence[int | None]"


def pattern_of_move(move: Move, reads: int | None = None) -> str:
    """The pattern of a move, as :func:`cute_sharding.relations.parse` reads it. Of the operands
    from ``reads`` on the op reads only the sizes, which are those of its results.

    >>> from cute_sharding.relations.table import BY_OP
    >>> pattern_of_move(BY_OP["torch.roll"].move((8, 4), 2, 0))
    '[d0] d1 -> [to0] d1'
    >>> pattern_of_move(BY_OP["torch.cat"].move([(8, 4), (8, 6)], 1))
    'd0 [d1], d0 [d1] -> d0 [to1]'
    >>> pattern_of_move(BY_OP["torch.unbind"].move((2, 3), 1))  # all results are alike
    'd0 [d1] -> d0'
    """
    read = range(len(move.inputs))[:reads]
    bound = [move.bound(i) for i in read]
    given: dict[tuple[int, int], str] = {}
    made: dict[tuple[int, int], str] = {}
    moved: list[tuple[int, int | None]] = []
    for source, k, pairs in move.links:
        for (d, *_), (to, *_) in pairs:
            if d is None or to is None or d in bound[source]:
                moved.append((k, to))
            else:
                name = given.setdefault((source, d), made.get((k, to), f"d{d}"))
                made[k, to] = name
    # With several operands, a dim is whole if another operand has other rows there.
    whole = {made[dim] for dim in moved if dim in made} if len(read) > 1 else ()

    def names(tensor: int, shape: Shape, of: dict[tuple[int, int], str], other: str) -> str:
        found = [of.get((tensor, d)) for d in range(len(shape))]
        return text(
            [
                f"[{name or f'{other}{d}'}]" if name is None or name in whole else name
                for d, name in enumerate(found)
            ]
        )

    operands = [names(i, move.inputs[i], given, "d") for i in read]
    results = [names(k, shape, made, "to") for k, shape in enumerate(move.outputs)]
    sized = [f"={results[0]}"] * (len(move.inputs) - len(read))
    if len({*results}) == 1:
        results = results[:1]
    return f"{', '.join([*operands, *sized])} -> {', '.join(results)}"


def pattern_of_origins(ndim: int, origins: Origins) -> str:
    """The pattern for one operand of ``ndim`` dims, 0 for a scalar, and one result.

    >>> pattern_of_origins(3, (0, None, 2))
    'd0 [d1] d2 -> d0 [to1] d2'
    >>> pattern_of_origins(0, (None,))
    '... -> [to0]'
    """
    operand = text([f"d{d}" if d in origins else f"[d{d}]" for d in range(ndim)])
    result = [f"[to{k}]" if d is None else f"d{d}" for k, d in enumerate(origins)]
    return f"{operand or '...'} -> {text(result)}"


def origins_of_view(shape: Shape, dim_map: DimMap) -> Origins:
    """For each output dim, the input dim that it is: unchanged, or split so that the first part has
    all its rows and the others are of size 1 or new.

    >>> from cute_sharding.relations.table import BY_OP
    >>> origins_of_view((2, 3, 4), BY_OP["torch.flatten"].rule((2, 3, 4), 1))
    (0, None)
    >>> origins_of_view((2, 3), BY_OP["torch.view_as_real"].rule((2, 3)))
    (0, 1, None)
    """

    def origin(spec: DimSpec) -> int | None:
        match spec:
            case InputDim(d):
                return d
            case Split(InputDim(d), sizes, 0) if sizes[0] == shape[d]:
                return d
            case _:
                return None

    return tuple(map(origin, dim_map))


def origins_of_move(move: Move) -> Origins:
    """For each dim of the one result, the dim of the one operand that it is unchanged.

    >>> from cute_sharding.relations.table import BY_OP
    >>> origins_of_move(BY_OP["torch.rot90"].move((2, 8, 3), 1, (0, 1)))
    (None, 0, 2)
    """
    (link,), bound = move.links, move.bound(0)
    came = {to.dim: one.dim for one, to in link.pairs if one.dim not in bound}
    return tuple([came.get(d) for d in range(len(move.outputs[0]))])
