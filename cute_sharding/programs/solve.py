"""The cheapest way to run a program, and the proof that none is cheaper.

The choices of a program are a mixed integer program (:mod:`.choices`). If the program has layers
that repeat, those are first averaged, which gives a bound, and tied, which gives a way to run it
(:mod:`.folding`). Where these are equal the program is solved, however many layers it has; where
they are not, fewer layers count as alike, and at last none.

Averages also say how much dearer the program is at least with each choice. What is too dear is left
out of what is tied, which is then solved in little time.

Within a limit of memory, only those moments get a row in which some solution held more. Averages
are then computed last, with rows for the same moments.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from math import gcd, inf
from typing import NoReturn

from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs.choices import Choices, Weigh, coarser, written
from cute_sharding.programs.folding import LayerNames, names_by_looking_further
from cute_sharding.programs.holding import Occupancy
from cute_sharding.programs.linear import Column, Model, Optimum
from cute_sharding.programs.program import (
    FreeValues,
    Op,
    OpWay,
    Placing,
    Price,
    Program,
    Solved,
    ValueMove,
)
from cute_sharding.programs.timing import Timing

# What the solver's tolerances leave open: a bound that is so near, as a part, is reached.
NEAR = 1e-9
# Averages that cost more than the bound by this part of it are left out of what is tied at first.
PROMISING = 0.02
# If a price is greater by this part than what could travel together allows, one looks once more.
SHARED_IN_VAIN = 1e-3
# How many steps one looks around an op at first, for what is alike; and the least part of the ops
# that must then be left out.
FIRST_LOOK, WORTHWHILE = 3, 1 / 2


def solve(
    program: Program,
    *,
    weigh: Weigh | None = None,
    memory_limit: int | None = None,
    gap: float = 0.02,
    seconds: float | None = None,
) -> Solved:
    """The cheapest way to run a program.

    Args:
        program: what its ops can do.
        weigh: makes a number of a price, at least 0 and additive; None: :func:`bytes_first`.
        memory_limit: the bytes that a device may hold at once.
        gap: within a limit of memory, be content with what weighs so much more than the bound, as
            a part of its weight. Without a limit what is found is the cheapest, but for what moves
            share that run at once.
        seconds: stop after that time with the best that was found by then; that the ops take their
            first ways, if nothing else.

    Raises:
        ImportError: scipy is not installed.
        MemoryLimitError: no way to run the program keeps within the limit.
        TimeoutError: nothing was found in ``seconds``, and the first ways do not do.
        ValueError: the program cannot run: no ways of its ops fit together.
    """
    numbered, placings = with_numbers(program)
    search = _Search(
        Choices(
            with_sources(numbered),
            len(program.given) + len(program.free),
            weigh or bytes_first(program),
            spares_memory=memory_limit is not None,
        ),
        memory_limit=inf if memory_limit is None else memory_limit,
        gap=0.0 if memory_limit is None else gap,
        end=inf if seconds is None else time.monotonic() + seconds,
    )
    best = search.best()
    weight, least = search.weight(best), best.least
    if memory_limit is None and weight > least * (1 + SHARED_IN_VAIN):
        # Less travels together than could: perhaps it is better to count on nothing.
        try:
            other = replace(search, choices=replace(search.choices, counts_shares=False)).best()
            best = min(best, other, key=search.weight)
        except TimeoutError:
            pass
        weight = search.weight(best)
    reached = weight * (1 - NEAR) <= least
    best = replace(best, weight=weight, least=weight if reached else least)
    return with_placings(best, placings)


def folded(choices: Choices) -> Iterator[tuple[LayerNames, LayerNames, LayerNames]]:
    """Names of what is alike, each finer than the one before: first if one looks around no further
    than a few ops, and at last the program as it is.
    """
    names = names_by_looking_further(choices.program)
    seen, look = list(islice(names, FIRST_LOOK + 5)), FIRST_LOOK
    while len(set(seen[-1].ops)) <= WORTHWHILE * len(choices.program.ops):
        yield seen[look], seen[look + 2], seen[look + 4]
        seen += islice(names, look + 1)
        look += look + 1
    yield (choices.own,) * 3


@dataclass
class _Search:
    """
    Attributes:
        end: when to stop, by the clock.
        moments: those at which more was held than may be.
    """

    choices: Choices
    memory_limit: float
    gap: float
    end: float
    moments: set[int] = field(default_factory=set)

    @cached_property
    def holding(self) -> Occupancy:
        return Occupancy(self.choices)

    def of_first_ways(self) -> Solved | None:
        """What the program does without a plan; None if it cannot, or not within the limit."""
        program = self.choices.program
        lies = {v: op.ways[0].results[i] for op in program.ops for i, v in enumerate(op.results)}
        if any(
            op.ways[0].operands[i] != lies[op.operands[i]] for op in program.ops for i in op.as_lies
        ):
            return None
        try:
            solved, held = self.solved([0] * len(program.ops), lies, 0.0)
        except KeyError:
            return None
        return None if peaks(held, self.memory_limit) else solved

    def best(self) -> Solved:
        """The best that is found, as the linear program weighs it."""
        best, least = self.of_first_ways(), 0.0
        for names in folded(self.choices):
            try:
                found, bound = self.between(*names, least)
            except TimeoutError:
                if best is None:
                    raise
                break
            if bound is None:
                self.refuse(*names)
            if found is not None and (best is None or self.order(found) < self.order(best)):
                best = found
            least = max(least, bound)
            if self.is_enough(best, least):
                break
        assert best is not None, "the last names are the program's own, of which nothing is tied"
        return replace(best, least=best.weight if best.weight * (1 - NEAR) <= least else least)

    def weight(self, found: Solved) -> float:
        """Of the price, in which what travels together is counted once."""
        return self.choices.weigh(found.price)

    def order(self, found: Solved) -> tuple[float, float]:
        """What is less for what is better."""
        return found.weight, self.weight(found)

    def is_enough(self, found: Solved | None, least: float) -> bool:
        """Whether no way to run the program weighs less, but for the gap."""
        return found is not None and found.weight * (1 - self.gap - NEAR) <= least

    def between(
        self, near: LayerNames, further: LayerNames, furthest: LayerNames, least: float
    ) -> tuple[Solved | None, float | None]:
        """The cheapest way to run the program in which all that is alike does the same, if there is
        one; and what no way weighs less than, None if there is no way.
        """
        if near is furthest:
            found = self.tied(near, further)
            return found, None if found is None else found.least
        if self.memory_limit < inf:
            found = self.tied(near, further)
            if self.is_enough(found, least):
                return found, least
        model = written(self.choices, further, near, furthest)
        for moment in self.moments:
            self.holding.limit_average(model, further, moment, self.memory_limit)
        average = self._optimum(model, whole=False)
        if average is None:
            return None, None
        if self.memory_limit == inf:
            most = PROMISING * average.bound
            dear = [name for name, k in model.number.items() if average.more[k] > most]
            found = self.tied(near, further, coarser(dear, near, further))
            if found is None or found.weight > average.bound + most:
                found = self.tied(near, further)
        return found, average.bound

    def tied(
        self, near: LayerNames, further: LayerNames, closed: Iterable[Column] = ()
    ) -> Solved | None:
        """The cheapest way to run the program in which all that is alike does the same, and some
        choices are not made; None if there is none.
        """
        model = written(self.choices, near, further, further)
        model.closed.update(closed)
        for moment in self.moments:
            self.holding.limit(model, near, moment, self.memory_limit)
        while True:
            found = self._optimum(model)
            if found is None:
                return None
            solved, held = self.chosen(near, model, found)
            over = peaks(held, self.memory_limit)
            if not over:
                return solved
            for moment in over:
                if ("held", moment) in model.rows:  # within the solver's tolerance of the limit
                    model.forbid(("held", moment), found)
                else:
                    self.holding.limit(model, near, moment, self.memory_limit)
            self.moments.update(over)

    def refuse(self, near: LayerNames, further: LayerNames, furthest: LayerNames) -> NoReturn:
        """
        Raises:
            MemoryLimitError, ValueError: there is no way to run the program.
        """
        own = self.choices.own
        least = self.least_peak(near, further) or self.least_peak(own, own)
        if least is None:
            raise ValueError(
                "the program cannot run: no ways of its ops fit together. Give its ops more ways, "
                "or list more moves of its values"
            )
        peak, moment = least
        limit = int(self.memory_limit)
        at = moment - self.choices.sources
        where = "the start" if at < 0 else self.choices.program.ops[moment].what or f"op {at}"
        raise MemoryLimitError(
            f"no way to run the program keeps every device within memory_limit={limit} "
            f"bytes: the least that was found is {peak} bytes, at {where}. Pass "
            f"memory_limit={peak} or more, shard weights or inputs over more devices, or keep "
            "fewer values",
            limit=limit,
            least=peak,
        )

    def least_peak(self, near: LayerNames, further: LayerNames) -> tuple[int, int] | None:
        """The least bytes in which the program can run if all that is alike does the same, and when
        they are held; None if it cannot run.
        """
        model = written(self.choices, near, further, further)
        model.weights = [0.0] * len(model.weights)
        model.column(("peak",), 1)
        moments: set[int] = set()
        while True:
            found = self._optimum(model)
            if found is None:
                return None
            solved, held = self.chosen(near, model, found)
            moment = held.index(solved.peak)
            if moment in moments:
                return solved.peak, moment
            moments.add(moment)
            self.holding.limit(model, near, moment, ("peak",))

    def _optimum(self, model: Model, whole: bool = True) -> Optimum | None:
        seconds = None if self.end == inf else self.end - time.monotonic()
        return model.optimum(seconds, self.gap, whole)

    def chosen(self, names: LayerNames, model: Model, found: Optimum) -> tuple[Solved, list[int]]:
        """A solution of a model, and the bytes that are held at each moment."""
        taken = [name for name, number in model.number.items() if found.values[number] > 0.5]
        taking = {name[1]: name[2] for name in taken if name[0] == "way"}
        brought = {name[1:3]: name[4] for name in taken if name[0] == "bring"}
        numbers = [taking[names.kinds[o]] for o in range(len(self.choices.program.ops))]
        lies = {v: brought[names.kinds[o], i] for v, (o, i) in self.choices.places.items()}
        return self.solved(numbers, lies, found.bound, may_wait=self.memory_limit == inf)

    def solved(
        self,
        numbers: Sequence[int],
        lies: Mapping[int, Placing],
        bound: float,
        may_wait: bool = False,
    ) -> tuple[Solved, list[int]]:
        """All that follows from which ways are taken and how values lie, and the bytes that are
        held at each moment. ``may_wait``: values are brought elsewhere at the best time.

        Raises:
            KeyError: a value cannot be brought to where it is needed.
        """
        program, sources = self.choices.program, self.choices.sources
        ways = [op.ways[w] for op, w in zip(program.ops, numbers)]
        timing = Timing(self.choices, ways)
        weight = timing.weight(lies)
        if may_wait:
            lies = timing.best(lies)
        made = [dict(zip(op.results, way.results)) for op, way in zip(program.ops, ways)]
        held = self.holding.held(ways, lies)
        solved = Solved(
            ways=tuple(numbers[sources:]),
            lies=lies,
            made={v: placing for of in made[sources:] for v, placing in of.items()},
            price=timing.price(lies),
            least=min(bound, weight),
            weight=weight,
            peak=max(held, default=0),
        )
        return solved, held


def peaks(held: Sequence[int], limit: float) -> list[int]:
    """The moments of greatest bytes, of all times in which they are above the limit.

    >>> peaks([1, 5, 6, 5, 1, 7], 4)
    [2, 5]
    """
    times = groupby(range(len(held)), lambda moment: held[moment] > limit)
    return [max(moments, key=held.__getitem__) for is_over, moments in times if is_over]


def bytes_first(program: Program) -> Weigh:
    """Bytes that are received. Among equal bytes, those that are held of free values, if there are
    some; else the number of collectives. Both count for so little that no bytes are spent on them.
    """
    unit = gcd(*[price.received for price in _prices(program)]) or 1
    if program.free:
        most = _most_held(program)
        return lambda price: price.received + price.held * unit / (1 + most)
    moves = [price for prices in program.moves.values() for price in prices.values()]
    most = sum(max((way.price.collectives for way in op.ways), default=0) for op in program.ops)
    moved = sum(len(op.operands) + len(op.results) for op in program.ops)
    most += moved * max((price.collectives for price in moves), default=0)
    return lambda price: price.received + price.collectives * unit / (1 + most)


def seconds_first(program: Program) -> Weigh:
    """Seconds, and the bytes that are held of free values for less than any exchange takes."""
    unit = min([price.seconds for price in _prices(program) if price.seconds], default=1.0)
    most = _most_held(program)
    return lambda price: price.seconds + price.held * unit / (1 + most)


def _prices(program: Program) -> Iterator[Price]:
    for op in program.ops:
        yield from (way.price for way in op.ways)
    for prices in program.moves.values():
        yield from prices.values()


def _most_held(program: Program) -> int:
    return sum(max(price.held for price in _held_of(program, free)) for free in program.free)


def _held_of(program: Program, free: FreeValues) -> list[Price]:
    """For each placing of free values what it costs: what is held of them."""
    sizes = [program.sizes.get(program.kinds[v], {}) for v in free.values]
    return [Price(held=sum(of.get(placing, 0) for of in sizes)) for placing in free.placings]


def with_numbers(program: Program) -> tuple[Program, Mapping[Placing, Placing]]:
    """The program with numbers in place of placings, and the placings of the numbers: they are
    looked up a million times, and a tuple of placements is slow to look up.
    """
    number: dict[Placing, int] = {}

    def of(placing: Placing) -> Placing:
        return number.setdefault(placing, len(number))

    def numbers(placings: Iterable[Placing]) -> tuple[Placing, ...]:
        return tuple(map(of, placings))

    ways = {id(op.ways): op.ways for op in program.ops}  # ops share them
    told = {
        key: tuple([OpWay(numbers(way.operands), numbers(way.results), way.price) for way in each])
        for key, each in ways.items()
    }
    placings: dict[Placing, Placing] = {}

    def shared(moves: Sequence[ValueMove]) -> Price:
        ends = [(kind, placings[source], placings[target]) for kind, source, target in moves]
        return program.shared([ValueMove(*each) for each in ends])  # type: ignore[misc]

    found = replace(
        program,
        ops=tuple([replace(op, ways=told[id(op.ways)]) for op in program.ops]),
        given={v: of(placing) for v, placing in program.given.items()},
        free=tuple([replace(free, placings=numbers(free.placings)) for free in program.free]),
        moves={
            kind: {(of(p), of(q)): price for (p, q), price in prices.items()}
            for kind, prices in program.moves.items()
        },
        sizes={
            kind: {of(placing): size for placing, size in sizes.items()}
            for kind, sizes in program.sizes.items()
        },
        shared=program.shared and shared,
    )
    placings.update({n: placing for placing, n in number.items()})
    return found, placings


def with_placings(solved: Solved, placings: Mapping[Placing, Placing]) -> Solved:
    """What was solved by numbers, with the placings of the numbers."""
    return replace(
        solved,
        lies={v: placings[q] for v, q in solved.lies.items()},
        made={v: placings[q] for v, q in solved.made.items()},
    )


def with_sources(program: Program) -> Program:
    """The program with an op, before all others, that makes each value that is given; and those
    that are free in one of their placings.
    """
    sources = [Op((), (v,), (OpWay((), (placing,)),)) for v, placing in program.given.items()]
    for free in program.free:
        many = len(free.values)
        ways = [
            OpWay((), (placing,) * many, price)
            for placing, price in zip(free.placings, _held_of(program, free))
        ]
        sources.append(Op((), free.values, tuple(ways)))
    return replace(
        program,
        ops=(*sources, *program.ops),
        given={},
        free=(),
        fixed=program.fixed.union(*[op.results for op in sources]),
    )
