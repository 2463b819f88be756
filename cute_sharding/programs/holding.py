"""What the fullest device holds while a program runs, and rows that keep it within a limit.

A value is held from the op that makes it to the last that reads it, or a view of it; one that is
given, from the start; one that is kept, to the end. One that is brought elsewhere is, while its op
runs, held twice. A copy is held from the first reader that takes it to the last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from math import inf

from cute_sharding.programs.choices import Choices, bring, take
from cute_sharding.programs.folding import LayerNames
from cute_sharding.programs.linear import Column, Model, Terms
from cute_sharding.programs.program import OpWay, Placing


@dataclass(frozen=True)
class Occupancy:
    """When the values of a program are held. Moments are the numbers of ops, while they run."""

    choices: Choices

    @cached_property
    def spans(self) -> Mapping[int, tuple[int, int]]:
        """The first and the last moment of each value that has memory of its own."""
        program = self.choices.program
        last, start = len(program.ops) - 1, self.choices.sources - 1
        found: dict[int, tuple[int, int]] = {}
        for v, (o, _) in self.choices.places.items():
            end = max([o, start, *[reader for reader, _ in self.choices.readers[v]]])
            if v in program.kept:
                end = last
            owner = v
            while owner in program.within:
                owner = program.within[owner]
            begin, before = found.get(owner, (max(o, start), end))
            found[owner] = (begin, max(before, end))
        return found

    def copiers(self, v: int) -> Sequence[tuple[int, int]]:
        """The readers that may take a copy."""
        ops = self.choices.program.ops
        return [(o, i) for o, i in self.choices.readers[v] if i not in ops[o].as_lies]

    def held(self, ways: Sequence[OpWay], lies: Mapping[int, Placing]) -> list[int]:
        """The bytes of the fullest device at each moment."""
        changes = [0] * (len(ways) + 1)

        def hold(first: int, last: int, size: int) -> None:
            changes[first] += size
            changes[last + 1] -= size

        for v, (first, last) in self.spans.items():
            hold(first, last, self.choices.size(v, lies[v]))
            o, position = self.choices.places[v]
            made = ways[o].results[position]
            if made != lies[v]:
                hold(o, o, self.choices.size(v, made))
        for v in self.choices.places:
            taken: dict[Placing, list[int]] = defaultdict(list)
            for o, i in self.copiers(v):
                taken[ways[o].operands[i]].append(o)
            for placing, readers in taken.items():
                if placing != lies[v]:
                    hold(min(readers), max(readers), self.choices.size(v, placing))
        return list(accumulate(changes))[:-1]

    def limit(self, model: Model, columns: LayerNames, moment: int, limit: float | Column) -> None:
        """Add a row: at a moment, what is tied so holds at most a limit, or a part of ``most`` that
        is a variable.
        """
        terms = self._values(columns, self._alive(moment), moment)
        for v in self.choices.places:
            terms += self._copies(model, columns, v, moment)
        if isinstance(limit, (int, float)):
            _at_most(model, moment, terms, limit)
        else:
            _at_most(model, moment, [*terms, (-self.most, limit)], 0, self.most)

    def limit_average(self, model: Model, columns: LayerNames, moment: int, limit: float) -> None:
        """Add a row: at a moment, averages hold at most a limit, if copies are left out, and values
        of which not all that are alike are held are as small as they can be.
        """
        alike = Counter(self._name(columns, v) for v in self.choices.places)
        alive = self._alive(moment)
        held = Counter(self._name(columns, v) for v in alive)
        whole = [v for v in alive if held[self._name(columns, v)] == alike[self._name(columns, v)]]
        rest = sum(
            min(self.choices.size(v, q) for _, q in self.choices.brought(v))
            for v in set(alive).difference(whole)
        )
        _at_most(model, moment, self._values(columns, whole, moment), limit - rest, limit)

    def _name(self, columns: LayerNames, v: int) -> tuple[int, int]:
        o, position = self.choices.places[v]
        return columns.kinds[o], position

    def _alive(self, moment: int) -> list[int]:
        return [v for v, (first, last) in self.spans.items() if first <= moment <= last]

    def _values(self, columns: LayerNames, values: Sequence[int], moment: int) -> Terms:
        choices = self.choices
        terms: Terms = []
        for v in values:
            makes = moment == choices.places[v][0]
            for p, q in choices.brought(v):
                size = choices.size(v, q) + (choices.size(v, p) if makes and p != q else 0)
                terms.append((size, bring(choices, columns, v, p, q)))
        return terms

    @cached_property
    def most(self) -> int:
        """No fewer bytes than are ever held."""
        choices = self.choices
        return sum(
            (2 + len(choices.readers[v]))
            * max(choices.program.sizes.get(choices.program.kinds[v], {}).values(), default=0)
            for v in choices.places
        )

    def _copies(self, model: Model, columns: LayerNames, v: int, moment: int) -> Terms:
        """The copies of a value that are held: a reader takes it now, or one did and one will."""
        copiers = self.copiers(v)
        now = [reader for reader in copiers if reader[0] == moment]
        before = [reader for reader in copiers if reader[0] < moment]
        after = [reader for reader in copiers if reader[0] > moment]
        if not now and not (before and after):
            return []
        names = tuple(
            tuple(sorted([(columns.ops[o], i) for o, i in each])) for each in (now, before, after)
        )
        terms: Terms = []
        for q in {q for reader in copiers for q in self.choices.needed(*reader)}:
            size = self.choices.size(v, q)
            if not size:
                continue
            column = ("held", columns.values[v], q, names)
            terms.append((size, column))
            if column in model.number:
                continue
            model.column(column)
            for reader in now:
                model.row(
                    (*column, reader), [(1, column), *self._taken(columns, v, reader, q)], 0, inf
                )
            for pair in product(before, after):
                both = [t for reader in pair for t in self._taken(columns, v, reader, q)]
                model.row((*column, *pair), [(1, column), *both], -1, inf)
        return terms

    def _taken(self, columns: LayerNames, v: int, reader: tuple[int, int], q: Placing) -> Terms:
        """Less 1 if the reader takes a copy there."""
        if q not in self.choices.needed(*reader):
            return []
        return [
            (-1, take(columns, reader, v, p, q))
            for p in self.choices.lies(v)
            if p != q and self.choices.weight(v, p, q) < inf
        ]


def _at_most(model: Model, moment: int, terms: Terms, limit: float, unit: float = 0) -> None:
    """In parts of the limit, as the solver's tolerance is absolute."""
    unit = unit or limit or 1
    model.row(
        ("held", moment), [(size / unit, column) for size, column in terms], -inf, limit / unit
    )
