"""Signatures derived from a map of rows or from a DimMap.

A dim that goes into every result unchanged, in every call, gets a name; all others are whole. So an
op that moves rows is written once, as a map of them, and the map also gives the cuts that the op
carries for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cute_sharding.relations.dim_map import DimMap, DimSpec, InputDim, Split
from cute_sharding.relations.moves import Move
from cute_sharding.relations.table.names import Shape, text

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
