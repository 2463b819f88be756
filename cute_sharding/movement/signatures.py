"""The signatures that follow from what an op does to rows: of movement ops from their moves, of ops
of several steps from these, of copies of views from their DimMaps.

A dim that goes into every result as it is, in every call, has a name; all others are whole. So an
op that moves rows is written once, as a map of them, and what it carries along for nothing is read
off it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cute_sharding.movement.steps import SEVERAL, Several, Step
from cute_sharding.movement.table import BY_OP as MOVES
from cute_sharding.movement.table import TABLE, Signed
from cute_sharding.movement.table import Row as MoveRow
from cute_sharding.ops.rules.names import Rule, text
from cute_sharding.ops.table import BY_OVERLOAD, COPIES, Row
from cute_sharding.relations.moves import Move, Shape
from cute_sharding.views import BY_OP as VIEWS
from cute_sharding.views import TABLE as TABLE_OF_VIEWS
from cute_sharding.views import Row as ViewRow
from cute_sharding.views import view_of
from cute_sharding.views.dim_map import DimMap, InputDim

# Of each dim of a result the operand's dim that it is, if it is one as it is.
Origins = Sequence["int | None"]


def pattern_of_move(move: Move, reads: int | None = None) -> str:
    """What a move says of dims, as :func:`cute_sharding.ops.parse` reads it. Of operands from
    ``reads`` on the op reads the sizes alone, which are those of its results.

    >>> pattern_of_move(MOVES["torch.roll"].move((8, 4), 2, 0))
    '[d0] d1 -> [to0] d1'
    >>> pattern_of_move(MOVES["torch.cat"].move([(8, 4), (8, 6)], 1))
    'd0 [d1], d0 [d1] -> d0 [to1]'
    >>> pattern_of_move(MOVES["torch.unbind"].move((2, 3), 1))  # all results are alike
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
    # Of a result of several operands, where another has other rows in the dim.
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
    """The same of one operand of ``ndim`` dims and one result.

    >>> pattern_of_origins(3, (0, None, 2))
    'd0 [d1] d2 -> d0 [to1] d2'
    """
    operand = text([f"d{d}" if d in origins else f"[d{d}]" for d in range(ndim)])
    result = [f"[to{k}]" if d is None else f"d{d}" for k, d in enumerate(origins)]
    return f"{operand} -> {text(result)}"


def origins_of_view(dim_map: DimMap) -> Origins:
    """Of each dim of the output the input's dim that it is.

    >>> origins_of_view(VIEWS["torch.flatten"].rule((2, 3, 4), 1))
    (0, None)
    """
    return tuple([spec.input_dim if isinstance(spec, InputDim) else None for spec in dim_map])


def origins_of_steps(shape: Shape, steps: Sequence[Step]) -> Origins | None:
    """The same of what comes of several steps; None: one of them has no map.

    >>> origins_of_steps((2, 8, 3), SEVERAL["rot90.default"].rule((2, 8, 3), 1, (0, 1)))
    (None, 0, 2)
    """
    now: Origins = tuple(range(len(shape)))
    for step in steps:
        if step.op in VIEWS:
            dim_map = VIEWS[step.op].rule(shape, *step.args)
            found = origins_of_view(dim_map)
            shape = tuple(view_of(shape, dim_map).output_shape)
        else:
            move = MOVES[step.op].move(shape, *step.args)
            if move is None:
                return None
            (link,), bound = move.links, move.bound(0)
            came = {
                other.dim: one.dim
                for one, other in link.pairs
                if one.dim is not None and one.dim not in bound
            }
            shape = move.outputs[0]
            found = [came.get(d) for d in range(len(shape))]
        now = tuple([None if d is None else now[d] for d in found])
    return now


def _of_move(row: MoveRow, otherwise: str | None) -> Rule:
    def rule(*args: Any, **kwargs: Any) -> str | None:
        move = row.move(*args, **kwargs)
        return otherwise if move is None else pattern_of_move(move, row.reads)

    return rule


def _of_steps(several: Several) -> Rule:
    """Each device runs the op on its rows. So a dim has a name where it goes through also of twice
    the sizes: three channels in three groups stay as they are, and those of one device, say one,
    are not three groups.
    """

    def origins(x: Shape, args: Sequence[Any]) -> Origins | None:
        steps = several.rule(x, *args)
        return None if steps is None else origins_of_steps(x, steps)

    def rule(x: Shape, *args: Any) -> str | None:
        some, others = (origins(tuple([k * n for n in x]), args) for k in (1, 2))
        if some is None or others is None:
            return None
        through = [d if d == other else None for d, other in zip(some, others)]
        return pattern_of_origins(len(x), through)

    return rule


def _of_view(view: ViewRow) -> Rule:
    return lambda x, *args: pattern_of_origins(len(x), origins_of_view(view.rule(x, *args)))


def _where_it_is_defined(rule: Rule) -> Rule:
    """None for arguments that are wrong: torch says what is."""

    def found(*args: Any, **kwargs: Any) -> str | None:
        try:
            return rule(*args, **kwargs)
        except (ValueError, IndexError, TypeError):
            return None

    return found


def _rows() -> Iterator[Row]:
    """The row of each op that moves rows, as the table of ops has them."""
    for move in TABLE:
        if move.signed is not None:
            names = (*move.overloads, *move.signed.also)
            yield _row(names, move.signed, _of_move(move, move.signed.otherwise))
    for name, several in SEVERAL.items():
        if several.signed is not None:
            yield _row((name,), several.signed, _of_steps(several))
    for view in TABLE_OF_VIEWS:
        if view.signed:
            yield _row(view.signed, Signed(COPIES), _of_view(view))


def _row(names: tuple[str, ...], signed: Signed, rule: Rule) -> Row:
    return Row(
        names,
        _where_it_is_defined(rule),
        linear=signed.linear,
        filled=signed.filled,
        of_numbers=True,
    )


DERIVED: tuple[Row, ...] = (*_rows(),)
"""The rows that follow from maps of rows, one for each op.

>>> [row.pattern((6, 4), [0]) for row in DERIVED if "flip.default" in row.overloads]
['[d0] d1 -> [to0] d1']
"""

SIGNATURES: dict[str, Row] = {
    **BY_OVERLOAD,
    **{name: row for row in DERIVED for name in row.overloads},
}
"""All rows by overload: those of the table of ops, and those that follow from maps of rows.

>>> SIGNATURES["mm.default"].pattern(), SIGNATURES["tril.default"].pattern((2, 6, 4))
('m k, k n -> m n', 'd0 [d1] [d2] -> d0 [to1] [to2]')
"""
