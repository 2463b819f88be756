"""The least price of a program, by a mixed integer program.

Ops choose ways, and values where they lie; what a reader needs and a value is not, is a copy. All
of that is linear in variables that are 0 or 1:

- ``way``: the ops of a kind take this way; one of them is taken.
- ``bring``: the value is made so and then brought there; one of them is taken of the placing in
  which the value is made, none of the others.
- ``take``: a reader takes the value, which lies so, as that; it takes what it needs, from where
  the value lies. These are numbers of any size to the solver: they are 0 or 1 as the others are.
- ``copy``: the value, which lies so, is copied to that; as often as the reader that takes it most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, inf
from typing import Any, TypeAlias

from cute_sharding.programs.program import Op, Placing, Price, Program, Solved, Way

GIVEN = "given"

# One number for a price.
Weigh: TypeAlias = Callable[[Price], float]


def solve(program: Program, *, weigh: Weigh | None = None, seconds: float | None = None) -> Solved:
    """The cheapest way to run a program.

    Args:
        program: what its ops can do.
        weigh: makes a number of a price, at least 0 and additive; None: bytes, and of equal bytes
            the number of collectives.
        seconds: stop after that time with the best that was found by then.

    Raises:
        ImportError: scipy is not installed.
        ValueError: the program cannot run, since no way of some op can be reached; or nothing was
            found in ``seconds``.
    """
    weigh = weigh or bytes_first(program)
    chances = _Chances(_made(program), weigh)
    model = _model(chances)
    values, bound = model.optimum(seconds)
    ways, lies = _chosen(chances, model, values)
    return _solved(chances, ways, lies, bound)


def bytes_first(program: Program) -> Weigh:
    """Bytes, and a fraction of a byte for a collective, so little that no bytes are spent to save
    collectives.
    """
    prices = [way.price for op in program.ops for way in op.ways]
    moves = [price for prices in program.moves.values() for price in prices.values()]
    unit = gcd(*[price.received for price in (*prices, *moves)]) or 1
    most = sum(max((way.price.collectives for way in op.ways), default=0) for op in program.ops)
    moved = sum(len(op.operands) + len(op.results) for op in program.ops)
    most += moved * max((price.collectives for price in moves), default=0)
    return lambda price: price.received + price.collectives * unit / (1 + most)


# -- what can be chosen ----------------------------------------------------------------------------


def _made(program: Program) -> Program:
    """The program with an op that makes each value that is given."""
    sources = [
        Op((), (v,), (Way((), (placing,)),), what=GIVEN) for v, placing in program.given.items()
    ]
    return replace(
        program,
        ops=(*sources, *program.ops),
        given={},
        fixed=program.fixed | program.given.keys(),
    )


@dataclass(frozen=True)
class _Chances:
    """What can be chosen in a program, of which all values are made by ops.

    Attributes:
        groups: the ops of a kind, for each kind; an op without a kind is one by itself.
    """

    program: Program
    weigh: Weigh

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        found: dict[Hashable, list[int]] = defaultdict(list)
        for o, op in enumerate(self.program.ops):
            found[("alone", o) if op.kind is None else ("kind", op.kind)].append(o)
        return [tuple(ops) for ops in found.values()]

    @cached_property
    def group(self) -> dict[int, int]:
        """Of each op."""
        return {o: g for g, ops in enumerate(self.groups) for o in ops}

    @cached_property
    def maker(self) -> dict[int, tuple[int, int]]:
        """Of each value the group that makes it, and the position among the results."""
        return {
            v: (self.group[o], position)
            for o, op in enumerate(self.program.ops)
            for position, v in enumerate(op.results)
        }

    @cached_property
    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """Of each value the ops that read it, and the positions among their operands."""
        found: dict[int, list[tuple[int, int]]] = {v: [] for v in self.maker}
        for o, op in enumerate(self.program.ops):
            for position, v in enumerate(op.operands):
                found[v].append((o, position))
        return found

    def weight(self, v: int, source: Placing, target: Placing) -> float:
        """Of bringing a value there."""
        if source == target:
            return 0
        price = self.program.moves.get(self.program.kinds[v], {}).get((source, target))
        return inf if price is None else self.weigh(price)

    def needed(self, o: int, position: int) -> dict[Placing, list[int]]:
        """For each placing of an operand the ways that need it."""
        found: dict[Placing, list[int]] = defaultdict(list)
        for w, way in enumerate(self.program.ops[o].ways):
            found[way.operands[position]].append(w)
        return found

    def makes(self, g: int, position: int) -> dict[Placing, list[int]]:
        """For each placing of a result the ways that make it."""
        found: dict[Placing, list[int]] = defaultdict(list)
        for w, way in enumerate(self.program.ops[self.groups[g][0]].ways):
            found[way.results[position]].append(w)
        return found

    @cached_property
    def brought(self) -> dict[tuple[int, int], dict[tuple[Placing, Placing], float]]:
        """Of each group and position of a result, from where it may be brought where as it is made,
        and what all of that costs; all stay in place if one must.
        """
        values: dict[tuple[int, int], list[int]] = defaultdict(list)
        for v, maker in self.maker.items():
            values[maker].append(v)
        found = {}
        for maker, alike in values.items():
            made = self.makes(*maker)
            targets = {p: {p} for p in made}
            if not any(v in self.program.fixed for v in alike):
                for p, q in self.program.moves.get(self.program.kinds[alike[0]], ()):
                    if p in made:
                        targets[p].add(q)
            weights = {
                (p, q): sum(self.weight(v, p, q) for v in alike) for p in made for q in targets[p]
            }
            found[maker] = {pair: weight for pair, weight in weights.items() if weight < inf}
        return found

    def lies(self, v: int) -> dict[Placing, list[Placing]]:
        """How a value may lie, and for each of these how it is then made."""
        found: dict[Placing, list[Placing]] = defaultdict(list)
        for p, q in self.brought[self.maker[v]]:
            found[q].append(p)
        return found


# -- the mixed integer program ---------------------------------------------------------------------

Column: TypeAlias = "tuple[Any, ...]"
Terms: TypeAlias = "list[tuple[float, Column]]"


@dataclass
class _Model:
    """Variables from 0 to 1 and what each weighs; rows, of which each is a sum that is equal to a
    number, or at least that.
    """

    weights: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    number: dict[Column, int] = field(default_factory=dict)
    rows: dict[Hashable, tuple[dict[int, float], float, float]] = field(default_factory=dict)

    def column(self, name: Column, weight: float = 0, whole: bool = False) -> None:
        """A variable, if it is not there yet."""
        if name not in self.number:
            self.number[name] = len(self.weights)
            self.weights.append(weight)
            self.whole.append(whole)

    def row(
        self, name: Hashable, terms: Iterable[tuple[float, Column]], low: float, high: float
    ) -> None:
        sums: dict[int, float] = defaultdict(float)
        for times, column in terms:
            sums[self.number[column]] += times
        self.rows[name] = (sums, low, high)

    def optimum(self, seconds: float | None) -> tuple[Sequence[float], float]:
        """The variables at the least weight that was found, and a bound from below.

        Raises:
            ValueError: there is none.
        """
        optimize, sparse = _scipy()
        entries = [
            (times, r, column)
            for r, (sums, _, _) in enumerate(self.rows.values())
            for column, times in sums.items()
        ]
        times, row, column = zip(*entries)
        matrix = sparse.csr_array((times, (row, column)), (len(self.rows), len(self.weights)))
        scale = max(self.weights) or 1
        options: dict[str, Any] = {"mip_rel_gap": 0}
        if seconds is not None:
            options["time_limit"] = seconds
        found = optimize.milp(
            [weight / scale for weight in self.weights],
            integrality=self.whole,
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(
                matrix,
                [low for _, low, _ in self.rows.values()],
                [high for _, _, high in self.rows.values()],
            ),
            options=options,
        )
        if found.x is None:
            raise ValueError(found.message)
        return found.x, inf if found.status == 0 else found.mip_dual_bound * scale


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ImportError(
            f"a plan of a program needs scipy, which cannot be imported ({error}): run "
            'pip install "cute-sharding[plan]"',
            name="scipy",
        ) from error
    return optimize, sparse


def _model(chances: _Chances) -> _Model:
    model = _Model()
    for g, ops in enumerate(chances.groups):
        ways = chances.program.ops[ops[0]].ways
        for w in range(len(ways)):
            weight = sum(chances.weigh(chances.program.ops[o].ways[w].price) for o in ops)
            model.column(("way", g, w), weight, whole=True)
        model.row(("way", g), [(1, ("way", g, w)) for w in range(len(ways))], 1, 1)
        for position in range(len(chances.program.ops[ops[0]].results)):
            _bring(model, chances, g, position)
    for v in chances.maker:
        _read(model, chances, v)
    return model


def _bring(model: _Model, chances: _Chances, g: int, position: int) -> None:
    """A result is brought from where it is made to one placing."""
    brought = chances.brought[g, position]
    for pair, weight in brought.items():
        model.column(("bring", g, position, *pair), weight, whole=True)
    for p, ways in chances.makes(g, position).items():
        terms: Terms = [(1, ("bring", g, position, *pair)) for pair in brought if pair[0] == p]
        terms += [(-1, ("way", g, w)) for w in ways]
        model.row(("bring", g, position, p), terms, 0, 0)


def _read(model: _Model, chances: _Chances, v: int) -> None:
    """All readers take a value as they need it."""
    maker, lies = chances.maker[v], chances.lies(v)

    def lying(q: Placing) -> list[Column]:
        return [("bring", *maker, p, q) for p in lies.get(q, ())]

    for o, position in chances.readers[v]:
        needed = chances.needed(o, position)
        g, reader = chances.group[o], ("take", o, position)
        if position in chances.program.ops[o].as_lies:
            for q in {*needed, *lies}:
                terms: Terms = [(1, column) for column in lying(q)]
                terms += [(-1, ("way", g, w)) for w in needed.get(q, ())]
                model.row((*reader, q), terms, 0, 0)
            continue
        takes = [(p, q) for p in lies for q in needed if chances.weight(v, p, q) < inf]
        for p, q in takes:
            model.column((*reader, p, q))
            if p != q:
                model.column(("copy", v, p, q), chances.weight(v, p, q))
                model.row((*reader, p, q), [(1, ("copy", v, p, q)), (-1, (*reader, p, q))], 0, inf)
        for p in lies:
            terms = [(1, (*reader, *pair)) for pair in takes if pair[0] == p]
            model.row((*reader, "of", p), [*terms, *[(-1, c) for c in lying(p)]], 0, 0)
        for q, ways in needed.items():
            terms = [(1, (*reader, *pair)) for pair in takes if pair[1] == q]
            terms += [(-1, ("way", g, w)) for w in ways]
            model.row((*reader, "as", q), terms, 0, 0)


# -- what was chosen -------------------------------------------------------------------------------


def _chosen(
    chances: _Chances, model: _Model, values: Sequence[float]
) -> tuple[list[int], dict[int, Placing]]:
    """The way of each op, and how each value lies."""
    taken = {name for name, number in model.number.items() if values[number] > 0.5}
    ways = {name[1]: name[2] for name in taken if name[0] == "way"}
    lies = {name[1:3]: name[4] for name in taken if name[0] == "bring"}
    return (
        [ways[chances.group[o]] for o in range(len(chances.program.ops))],
        {v: lies[maker] for v, maker in chances.maker.items()},
    )


def _solved(
    chances: _Chances, ways: Sequence[int], lies: Mapping[int, Placing], bound: float
) -> Solved:
    """All that follows from the choices."""
    program = chances.program
    made: dict[int, Placing] = {}
    copies: dict[int, list[Placing]] = {v: [] for v in lies}
    price = Price()
    for op, w in zip(program.ops, ways):
        way = op.ways[w]
        price = price.plus(way.price)
        for v, needed in zip(op.operands, way.operands):
            if needed not in (lies[v], *copies[v]):
                copies[v].append(needed)
                price = price.plus(program.moves[program.kinds[v]][lies[v], needed])
        for v, p in zip(op.results, way.results):
            made[v] = p
            if lies[v] != p:
                price = price.plus(program.moves[program.kinds[v]][p, lies[v]])
    weight = chances.weigh(price)
    given = sum(op.what == GIVEN for op in program.ops)
    return Solved(
        ways=tuple(ways[given:]),
        lies=lies,
        made={v: made[v] for op in program.ops[given:] for v in op.results},
        copies={v: tuple(placings) for v, placings in copies.items() if placings},
        price=price,
        least=min(bound, weight),
        weight=weight,
    )
