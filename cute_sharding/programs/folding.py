"""Which ops and values of a program are alike: what they are, and all that is around them as far as
one looks.

Layers that repeat are alike but for the first and the last ones, and the further one looks, the
more of those differ. Colour refinement finds it in time that grows with the program alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cute_sharding.programs.program import Program


class LayerNames(NamedTuple):
    """Names for ops, for their kinds (an op without a kind is one by itself) and for values; what
    has one name is alike.
    """

    ops: Sequence[int]
    kinds: Sequence[int]
    values: Mapping[int, int]


def kinds_of(program: Program) -> list[list[int]]:
    """The ops of each kind."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for o, op in enumerate(program.ops):
        found[("alone", o) if op.kind is None else ("kind", op.kind)].append(o)
    return list(found.values())


def own_names(program: Program) -> LayerNames:
    """Nothing is alike but the ops of a kind."""
    kinds = [0] * len(program.ops)
    for k, ops in enumerate(kinds_of(program)):
        for o in ops:
            kinds[o] = k
    values = {v: v for op in program.ops for v in op.results}
    return LayerNames(range(len(program.ops)), kinds, values)


def names_by_looking_further(program: Program) -> Iterator[LayerNames]:
    """What is alike if one looks no further than each op and value; one step further; and so on."""
    kinds = kinds_of(program)
    places = {v: (o, i) for o, op in enumerate(program.ops) for i, v in enumerate(op.results)}
    readers: dict[int, list[tuple[int, int]]] = {v: [] for v in places}
    for o, op in enumerate(program.ops):
        for i, v in enumerate(op.operands):
            readers[v].append((o, i))
    distinct = {id(op.ways): op.ways for op in program.ops}  # ops share them, and they are long
    ways = dict(zip(distinct, _numbered(distinct.values())))
    many = {**Counter(op.call for op in program.ops), None: 1}
    ops = _numbered((ways[id(op.ways)], op.as_lies, many[op.call]) for op in program.ops)
    first = _numbered(
        (
            program.kinds[v],
            v in program.fixed,
            v in program.kept,
            v in program.within,
            v in program.alone,
        )
        for v in places
    )
    values = dict(zip(places, first))
    while True:
        of_kinds = [0] * len(ops)
        for members, name in zip(kinds, _numbered(tuple(sorted(ops[o] for o in m)) for m in kinds)):
            for o in members:
                of_kinds[o] = name
        yield LayerNames(ops, of_kinds, values)
        seen = _numbered(
            (
                ops[o],
                of_kinds[o],
                tuple([values[v] for v in op.operands]),
                tuple([values[v] for v in op.results]),
            )
            for o, op in enumerate(program.ops)
        )
        around = _numbered(
            (values[v], ops[o], of_kinds[o], i, tuple(sorted([(ops[r], j) for r, j in readers[v]])))
            for v, (o, i) in places.items()
        )
        values = dict(zip(places, around))
        ops = seen


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
