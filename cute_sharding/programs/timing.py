"""When values are brought elsewhere: as they are made, or before they are read. They receive as
much, but what is brought before one call, or after it, travels together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cute_sharding.programs.choices import Choices
from cute_sharding.programs.program import OpWay, Placing, Price, ValueMove

# Rounding of sums of seconds, as a part of a sum.
ROUNDED = 1e-14

# Before or after a call.
Moment: TypeAlias = "tuple[bool, Hashable]"


class TimedMove(NamedTuple):
    """A move, its moment, and its place: the op and the position of the value there."""

    moment: Moment
    place: tuple[int, int]
    move: ValueMove


# By the op and the position.
MovesByPlace: TypeAlias = "dict[tuple[int, int], ValueMove]"


@dataclass(frozen=True)
class Timing:
    """The moves of a program of which each op takes a way."""

    choices: Choices
    ways: Sequence[OpWay]

    def moves_of(self, v: int, lies: Placing) -> Iterator[TimedMove]:
        """The moves of a value that lies so after it is made."""
        program, (o, i) = self.choices.program, self.choices.places[v]
        kind, made = program.kinds[v], self.ways[o].results[i]
        if made != lies:
            yield TimedMove(self._moment(o, True), (o, i), ValueMove(kind, made, lies))
        copied = set[Placing]()
        for reader in self.choices.readers[v]:
            needed = self.ways[reader[0]].operands[reader[1]]
            if needed != lies and (v in program.alone or needed not in copied):
                copied.add(needed)
                yield TimedMove(self._moment(reader[0]), reader, ValueMove(kind, lies, needed))

    def _moment(self, o: int, is_after: bool = False) -> Moment:
        call = self.choices.program.ops[o].call
        return is_after, ("op", o) if call is None else ("call", call)

    def price(self, lies: Mapping[int, Placing]) -> Price:
        """The price of all that is exchanged if values lie so.

        Raises:
            KeyError: a value cannot be brought to where it is needed.
        """
        price = self._price(self._moments(lies).values())
        for way in self.ways:
            price = price.plus(way.price)
        return price

    def weight(self, lies: Mapping[int, Placing]) -> float:
        """What the linear program weighs: each move by itself, but for the part of copies that is
        counted as shared.
        """
        choices, price, shared = self.choices, Price(), 0.0
        program = choices.program
        for way in self.ways:
            price = price.plus(way.price)
        for v in choices.places:
            for (is_after, _), _, move in self.moves_of(v, lies[v]):
                price = price.plus(program.at_once([move]))
                if not is_after:
                    _, *ends = move
                    shared += choices.weight(v, *ends) - choices.weight_of_copy(v, *ends)
        return choices.weigh(price) - shared

    def best(self, lies: Mapping[int, Placing]) -> dict[int, Placing]:
        """How values lie if those of which all readers take one copy are brought there at the best
        time. That is as they are made, which is less to be told; but later, if that weighs less
        because other values are brought elsewhere then.
        """
        either, weigh = [*self._either(lies)], self.choices.weigh
        found = {**lies, **{v: made for alike, made, _ in either for v in alike}}
        moments = self._moments(found)
        for alike, made, needed in either:
            late, early = ([*self._moves(alike, placing)] for placing in (made, needed))
            before = {of.moment: moments[of.moment] for of in (*late, *early)}
            after = {moment: dict(moves) for moment, moves in before.items()}
            for moment, place, _ in late:
                del after[moment][place]
            for moment, place, move in early:
                after[moment][place] = move
            price = self._price(before.values())
            more = self._price(after.values()).minus(price)
            if weigh(more) <= ROUNDED * weigh(price):
                moments.update(after)
                found.update(dict.fromkeys(alike, needed))
        return found

    def _moves(self, values: Iterable[int], lies: Placing) -> Iterator[TimedMove]:
        for v in values:
            yield from self.moves_of(v, lies)

    def _moments(self, lies: Mapping[int, Placing]) -> dict[Moment, MovesByPlace]:
        """The moves at each moment."""
        found = defaultdict[Moment, MovesByPlace](dict)
        for v in self.choices.places:
            for moment, place, move in self.moves_of(v, lies[v]):
                found[moment][place] = move
        return found

    def _price(self, moments: Iterable[MovesByPlace]) -> Price:
        price = Price()
        for moves in moments:
            price = price.plus(self.choices.program.at_once([moves[at] for at in sorted(moves)]))
        return price

    def _either(self, lies: Mapping[int, Placing]) -> Iterator[tuple[list[int], Placing, Placing]]:
        """Values that lie as they are made or as all their readers need them, and may do either:
        those that are alike, how they are made, and how they are needed.
        """
        choices = self.choices
        ops = choices.program.ops
        for kind in choices.kinds:
            for i, made in enumerate(self.ways[kind[0]].results):
                alike = [ops[o].results[i] for o in kind]
                readers = [reader for v in alike for reader in choices.readers[v]]
                needs = {self.ways[o].operands[j] for o, j in readers}
                if (
                    len(needs) == 1
                    and needs != {made}
                    and {lies[v] for v in alike} <= {made, *needs}
                    and all(choices.readers[v] for v in alike)
                    and choices.program.fixed.isdisjoint(alike)
                    and not any(j in ops[o].as_lies for o, j in readers)
                ):
                    yield alike, made, needs.pop()
