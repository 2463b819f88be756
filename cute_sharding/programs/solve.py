"""The cheapest way to run a program, and the proof that none is cheaper.

The choices of a program are a mixed integer program (:mod:`.choices`). If the program has layers
that repeat, those are first tied, which gives a way to run it, and averaged, which gives a bound
(:mod:`.folding`). Where these are equal the program is solved, however many layers it has; where
they are not, fewer layers count as alike, and at last none.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import gcd, inf

from cute_sharding.programs.choices import Choices, Weigh, bring, written
from cute_sharding.programs.folding import Names, names_by_looking_further
from cute_sharding.programs.linear import Model, Optimum
from cute_sharding.programs.program import Op, Placing, Price, Program, Solved, Way

# A proof that leaves so little of the weight is one, as the solver computes with fractions.
PROVED = 1e-9
FIRST_LOOK, WORTHWHILE = 9, 2


def solve(program: Program, *, weigh: Weigh | None = None, seconds: float | None = None) -> Solved:
    """The cheapest way to run a program.

    Args:
        program: what its ops can do.
        weigh: makes a number of a price, at least 0 and additive; None: bytes, and of equal bytes
            the number of collectives.
        seconds: stop after that time with the best that was found by then.

    Raises:
        ImportError: scipy is not installed.
        ValueError: the program cannot run: no ways of its ops fit together.
        TimeoutError: nothing was found in ``seconds``.
    """
    end = inf if seconds is None else time.monotonic() + seconds
    choices = Choices(with_sources(program), weigh or bytes_first(program))
    best, least = None, 0.0
    for near, further, furthest in folded(choices):
        model = written(choices, near, further, further)
        found = model.optimum(_left(end))
        if found is not None:
            tied = _solved(choices, near, model, found)
            if best is None or tied.weight < best.weight:
                best = tied
        if near is not furthest:
            found = written(choices, further, near, furthest).optimum(_left(end), whole=False)
        if found is not None:
            least = max(least, found.bound)
        if best is not None and best.weight <= least * (1 + PROVED):
            return replace(best, least=min(least, best.weight))
    raise ValueError("no ways fit")


def folded(choices: Choices) -> Iterator[tuple[Names, Names, Names]]:
    """What is tied, what is added up, and what is looked at, each finer than the one before: first
    what is alike if one looks around no further than a few ops, and at last the program as it is.
    """
    ops, look = len(choices.program.ops), FIRST_LOOK
    names = names_by_looking_further(choices.program)
    seen = list(islice(names, look))
    while len(set(seen[-1].ops)) <= ops / WORTHWHILE:
        yield seen[look - 5], seen[look - 3], seen[look - 1]
        look *= 2
        seen += islice(names, look - len(seen))
    yield (choices.own,) * 3


def _left(end: float) -> float | None:
    return None if end == inf else end - time.monotonic()


def _solved(choices: Choices, columns: Names, model: Model, found: Optimum) -> Solved:
    """All that follows from which ways are taken and to where values are brought."""
    program = choices.program
    taken = {name for name, number in model.number.items() if found.values[number] > 0.5}
    taken_ways = {name[1]: name[2] for name in taken if name[0] == "way"}
    brought = {name[1:3]: name[4] for name in taken if name[0] == "bring"}
    lies: dict[int, Placing] = {}
    made: dict[int, Placing] = {}
    copies: dict[int, list[Placing]] = defaultdict(list)
    ways: list[int] = []
    price = Price()
    for o, op in enumerate(program.ops):
        ways.append(taken_ways[columns.kinds[o]])
        way = op.ways[ways[-1]]
        price = price.plus(way.price)
        for v, needed in zip(op.operands, way.operands):
            if needed not in (lies[v], *copies[v]):
                copies[v].append(needed)
                price = price.plus(program.moves[program.kinds[v]][lies[v], needed])
        for i, (v, placing) in enumerate(zip(op.results, way.results)):
            made[v], lies[v] = placing, brought[columns.kinds[o], i]
            if lies[v] != placing:
                price = price.plus(program.moves[program.kinds[v]][placing, lies[v]])
    given = [v for v, (o, _) in choices.places.items() if not program.ops[o].operands]
    weight = choices.weigh(price)
    return Solved(ways=tuple(ways), lies=lies, made=made, copies=copies, price=price,
        least=min(found.bound, weight), weight=weight)


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


def with_sources(program: Program) -> Program:
    """The program with an op, before all others, that makes each value that is given."""
    sources = [Op((), (v,), (Way((), (placing,)),)) for v, placing in program.given.items()]
    return replace(
        program,
        ops=(*sources, *program.ops),
        given={},
        fixed=program.fixed | program.given.keys(),
    )
