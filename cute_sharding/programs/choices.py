"""What can be chosen in a program, and what each choice weighs, as a linear program.

Ops choose ways, and values where they lie; what a reader needs and a value is not, is a copy. All
of that is linear in variables that are 0 or 1:

- ``way``: the ops of a kind take this way. One of them is taken.
- ``bring``: a result is made so and then brought there. One of them is taken of the placing in
  which the result is made, none of the others.
- ``take``: a reader takes the value, which lies so, as that. It takes what it needs, from where the
  value lies.
- ``copy``: the value, which lies so, is copied to that. A reader that takes it so needs the copy,
  and any number of readers may take it.

If ways and brings are 0 or 1, the others are by themselves. As a reader takes a value in one
variable for each *pair* of placings, the least weight of fractions is near that of whole numbers,
and mostly equal to it.

The variables have the names of ops and values, so a model can be written for a program whose
layers are alike in far fewer variables, in two ways. *Tied*, what is alike does the same: a way to
run the program, if not the best. *Averaged*, a variable stands for the average of those that are
alike, and rows that are alike are added up: then there are fewer rows than the program has, so no
way to run the program weighs less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, TypeAlias

from cute_sharding.programs.folding import LayerNames, kinds_of, own_names
from cute_sharding.programs.linear import Column, Model, Terms, library
from cute_sharding.programs.program import OpWay, Placing, Price, Program, ValueMove

# Makes a number of a price.
Weigh: TypeAlias = Callable[[Price], float]
# For placings, the ways that need or make them.
ByPlacing: TypeAlias = Mapping[Placing, Sequence[int]]


@dataclass(frozen=True)
class Choices:
    """What can be chosen in a program of which each value is made by an op.

    Attributes:
        sources: the first so many ops make what was given.
        spares_memory: choices that weigh no less than others, but may hold less, are kept.
        counts_shares: copies before ops on lists weigh what they do if all travel together.
    """

    program: Program
    sources: int
    weigh: Weigh
    spares_memory: bool = False
    counts_shares: bool = True

    @cached_property
    def own(self) -> LayerNames:
        return own_names(self.program)

    @cached_property
    def kinds(self) -> Sequence[Sequence[int]]:
        """The ops of each kind."""
        return kinds_of(self.program)

    @cached_property
    def places(self) -> Mapping[int, tuple[int, int]]:
        """Of each value the op that makes it, and its position among the results."""
        return {
            v: (o, i) for o, op in enumerate(self.program.ops) for i, v in enumerate(op.results)
        }

    @cached_property
    def readers(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Of each value the ops that read it, and its positions among their operands."""
        found: dict[int, list[tuple[int, int]]] = {v: [] for v in self.places}
        for o, op in enumerate(self.program.ops):
            for i, v in enumerate(op.operands):
                found[v].append((o, i))
        return found

    @cached_property
    def _weights(self) -> dict[Placing, dict[tuple[Placing, Placing], float]]:
        return {
            kind: {pair: self.weigh(price) for pair, price in prices.items()}
            for kind, prices in self.program.moves.items()
        }

    def weight(self, v: int, source: Placing, target: Placing) -> float:
        """Of bringing a value there; infinite if it cannot be."""
        if source == target:
            return 0
        return self._weights.get(self.program.kinds[v], {}).get((source, target), inf)

    @cached_property
    def _weights_of_copies(self) -> dict[tuple[Hashable, Placing, Placing, int], float]:
        return {}

    def weight_of_copy(self, v: int, source: Placing, target: Placing) -> float:
        """Of a copy. Before a call of many ops, as on lists of weights, all copies travel together:
        what they share counts as if all operands were copies, so never for too much.
        """
        alone, together = self.weight(v, source, target), self._together(v)
        if together <= 1 or not 0 < alone < inf:
            return alone
        if self.program.shared is None or not self.counts_shares:
            return alone
        kind = self.program.kinds[v]
        key = (kind, source, target, together)
        if key not in self._weights_of_copies:
            saved = self.program.shared([ValueMove(kind, source, target)] * 2)
            self._weights_of_copies[key] = alone - self.weigh(saved) * (1 - 1 / together)
        return self._weights_of_copies[key]

    def _together(self, v: int) -> int:
        """The most copies that a call can take that reads the value."""
        ops = self.program.ops
        return max([self._many[ops[o].call] for o, _ in self.readers[v]], default=1)

    @cached_property
    def _many(self) -> Mapping[Hashable, int]:
        """Of each call of several ops how many operands may be copies; 1 for others."""
        ops = self.program.ops
        found = dict.fromkeys([op.call for op in ops], 0)
        for op in ops:
            found[op.call] += len(op.operands) - len(op.as_lies)
        many = Counter(op.call for op in ops)
        return {call: n if call is not None and many[call] > 1 else 1 for call, n in found.items()}

    @cached_property
    def _found(self) -> dict[tuple[int, bool, int], ByPlacing]:
        return {}

    def _by_placing(self, ways: Sequence[OpWay], of_results: bool, position: int) -> ByPlacing:
        key = (id(ways), of_results, position)
        if key not in self._found:
            found: dict[Placing, list[int]] = defaultdict(list)
            for w, way in enumerate(ways):
                found[(way.results if of_results else way.operands)[position]].append(w)
            self._found[key] = found
        return self._found[key]

    def needed(self, o: int, position: int) -> ByPlacing:
        """The ways of an op that need an operand so."""
        return self._by_placing(self.program.ops[o].ways, False, position)

    def made(self, v: int) -> ByPlacing:
        """The ways of its op that make a value so."""
        o, position = self.places[v]
        return self._by_placing(self.program.ops[o].ways, True, position)

    @cached_property
    def _brought(self) -> dict[tuple[int, int], Sequence[tuple[Placing, Placing]]]:
        return {}

    def brought(self, v: int) -> Sequence[tuple[Placing, Placing]]:
        """From where to where a value may be brought as it is made, with all that ops of the kind
        make; all stay in place if one must.
        """
        o, position = self.places[v]
        kind = self.own.kinds[o]
        if (kind, position) not in self._brought:
            alike = [self.program.ops[o].results[position] for o in self.kinds[kind]]
            found = [(p, p) for p in self.made(v)]
            if not any(u in self.program.fixed for u in alike):
                found += self._worth_it(alike)
            self._brought[kind, position] = found
        return self._brought[kind, position]

    def _worth_it(self, alike: Sequence[int]) -> list[tuple[Placing, Placing]]:
        """A value is brought elsewhere if a reader must have it there as it lies, or if the copies
        that readers need weigh less from there, by more than it weighs to bring the value.
        """
        numpy = library("numpy")
        first = self.program.kinds[alike[0]]
        placings, _ = self._table(first)
        sources = [p for p in self.made(alike[0]) if p in placings]
        weight = saved = numpy.zeros((len(sources), len(placings)))
        spares = numpy.zeros_like(weight, dtype=bool)
        for v in alike:
            weights = self._table(self.program.kinds[v], first)[1]
            moved = weights[[placings[p] for p in sources]]
            as_lies, copied, most = self._needs(v)
            needed = [placings[n] for n in copied if n in placings]
            with numpy.errstate(invalid="ignore"):  # neither can be a copy: nothing is saved
                each = moved[:, None, needed] - weights[None, :, needed]
            each = numpy.sort(numpy.nan_to_num(each, nan=0, posinf=inf).clip(0), axis=2)
            if v in self.program.alone:  # all readers may have a copy there
                each = each[..., -1:].repeat(most, axis=2)
            weight, saved = weight + moved, saved + each[..., -most:].sum(axis=2)
            spares[:, [placings[q] for q in as_lies if q in placings]] = True
            if self.spares_memory:
                sizes = numpy.array([self.size(v, q) for q in placings])
                spares |= sizes < sizes[[placings[p] for p in sources]][:, None]
                spares[:, needed] = True
        worth = (weight < inf) & (spares | (saved > weight))
        names = list(placings)
        return [(sources[p], names[q]) for p, q in zip(*worth.nonzero()) if sources[p] != names[q]]

    def _table(self, kind: Hashable, order: Hashable = None) -> tuple[dict[Placing, int], Any]:
        """The placings between which values of a kind move, by number, and what the moves weigh;
        as those of another kind are numbered.
        """
        key = (kind, kind if order is None else order)
        if key not in self._tables:
            numpy = library("numpy")
            pairs = self._weights.get(key[1], {})
            number = {p: k for k, p in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
            table = numpy.full((len(number), len(number)), inf)
            for (p, q), weight in self._weights.get(kind, {}).items():
                if p in number and q in number:
                    table[number[p], number[q]] = weight
            numpy.fill_diagonal(table, 0)
            self._tables[key] = number, table
        return self._tables[key]

    @cached_property
    def _tables(self) -> dict[tuple[Hashable, Hashable], tuple[dict[Placing, int], Any]]:
        return {}

    @cached_property
    def _needs_of(self) -> dict[int, tuple[set[Placing], set[Placing], int]]:
        return {}

    def _needs(self, v: int) -> tuple[set[Placing], set[Placing], int]:
        """The placings that readers need of a value as it lies, those that may be copies, and how
        many readers may take copies.
        """
        if v in self._needs_of:
            return self._needs_of[v]
        as_lies: set[Placing] = set()
        copied: set[Placing] = set()
        most = 0
        for o, i in self.readers[v]:
            if i in self.program.ops[o].as_lies:
                as_lies.update(self.needed(o, i))
            else:
                copied.update(self.needed(o, i))
                most += 1
        self._needs_of[v] = as_lies, copied, most
        return self._needs_of[v]

    def lies(self, v: int) -> Mapping[Placing, Sequence[Placing]]:
        """How a value may lie, and for each of these how it is then made."""
        found: dict[Placing, list[Placing]] = defaultdict(list)
        for p, q in self.brought(v):
            found[q].append(p)
        return found

    def is_shared(self, v: int) -> bool:
        """Whether several readers may take one copy."""
        return v not in self.program.alone and self._needs(v)[2] > 1

    def copied(self, v: int) -> Sequence[tuple[Placing, Placing]]:
        """From where to where a value may be copied, if not for nothing."""
        return [
            (p, q)
            for p in self.lies(v)
            for q in self._needs(v)[1]
            if 0 < self.weight(v, p, q) < inf
        ]

    def size(self, v: int, placing: Placing) -> int:
        """The bytes of a value on the fullest device."""
        return self.program.sizes.get(self.program.kinds[v], {}).get(placing, 0)


# -- the linear program ----------------------------------------------------------------------------


def written(choices: Choices, columns: LayerNames, rows: LayerNames, seen: LayerNames) -> Model:
    """The choices of a program as a linear program.

    Args:
        choices: of the program.
        columns: what is alike has the same variables.
        rows: what is alike is said in one row, a sum.
        seen: of ops that are alike so, one is looked at. As fine as rows and columns are, and one
            step further.
    """
    model = Model()
    times = Counter(seen.ops)
    first = {name: o for o, name in reversed(list(enumerate(seen.ops)))}
    for name, o in first.items():
        op = choices.program.ops[o]
        kind = columns.kinds[o]
        ways = [("way", kind, w) for w in range(len(op.ways))]
        for way, column in zip(op.ways, ways):
            model.column(column, times[name] * choices.weigh(way.price), whole=True)
        model.row(("way", rows.kinds[o]), [(1, column) for column in ways], 1, 1, times[name])
        for v in op.results:
            _make(model, choices, columns, rows, v, times[name])
    for name, o in first.items():
        for position in range(len(choices.program.ops[o].operands)):
            _read(model, choices, columns, rows, (o, position), times[name])
    return model


def _make(
    model: Model, choices: Choices, columns: LayerNames, rows: LayerNames, v: int, times: int
) -> None:
    """A value is brought from where it is made to one placing, and may be copied from there."""
    o, position = choices.places[v]
    made: dict[Placing, Terms] = {
        p: [(-1, ("way", columns.kinds[o], w)) for w in ways] for p, ways in choices.made(v).items()
    }
    for p, q in choices.brought(v):
        column = bring(choices, columns, v, p, q)
        model.column(column, times * choices.weight(v, p, q), whole=True)
        made[p].append((1, column))
    for p, terms in made.items():
        model.row(("bring", rows.kinds[o], position, p), terms, 0, 0, times)
    if choices.is_shared(v):
        for p, q in choices.copied(v):
            model.column(("copy", columns.values[v], p, q), times * choices.weight_of_copy(v, p, q))


def _read(
    model: Model,
    choices: Choices,
    columns: LayerNames,
    rows: LayerNames,
    reader: tuple[int, int],
    times: int,
) -> None:
    """A reader takes a value as it needs it."""
    o, position = reader
    op = choices.program.ops[o]
    v, kind = op.operands[position], columns.kinds[o]
    needed, lies = choices.needed(o, position), choices.lies(v)
    row = (rows.ops[o], position)
    needs: dict[Placing, Terms] = {
        q: [(-1, ("way", kind, w)) for w in ways] for q, ways in needed.items()
    }
    lying: dict[Placing, Terms] = {
        q: [(-1, bring(choices, columns, v, p, q)) for p in made] for q, made in lies.items()
    }
    if position in op.as_lies:
        for q in {**needed, **lies}:
            terms = [(-factor, column) for factor, column in lying.get(q, ())]
            model.row(("lies", *row, q), [*terms, *needs.get(q, ())], 0, 0, times)
        return
    for p in lies:
        for q in needed:
            weight = choices.weight(v, p, q)
            if weight == inf:
                continue
            taken = take(columns, reader, v, p, q)
            lying[p].append((1, taken))
            needs[q].append((1, taken))
            if weight and choices.is_shared(v):
                model.column(taken)
                copy = ("copy", columns.values[v], p, q)
                model.row(("copy", *row, p, q), [(1, copy), (-1, taken)], 0, inf, times)
            else:
                model.column(taken, times * choices.weight_of_copy(v, p, q))
    for p, terms in lying.items():
        model.row(("from", *row, p), terms, 0, 0, times)
    for q, terms in needs.items():
        model.row(("to", *row, q), terms, 0, 0, times)


def bring(choices: Choices, columns: LayerNames, v: int, p: Placing, q: Placing) -> Column:
    o, position = choices.places[v]
    return ("bring", columns.kinds[o], position, p, q)


def take(columns: LayerNames, reader: tuple[int, int], v: int, p: Placing, q: Placing) -> Column:
    return ("take", columns.ops[reader[0]], reader[1], columns.values[v], p, q)


def coarser(names: Iterable[Column], near: LayerNames, further: LayerNames) -> Iterator[Column]:
    """Ways, brings and takes, by coarser names."""
    ops, kinds = dict(zip(further.ops, near.ops)), dict(zip(further.kinds, near.kinds))
    values = {name: near.values[v] for v, name in further.values.items()}
    for what, *rest in names:
        if what in ("way", "bring"):
            yield (what, kinds[rest[0]], *rest[1:])
        elif what == "take":
            yield (what, ops[rest[0]], rest[1], values[rest[2]], *rest[3:])
