"""The solver of programs against brute force: all ways, and for each value all placings."""

import random
from collections import defaultdict
from itertools import product

import pytest
from drawn_programs import drawn_program

from cute_sharding.programs.program import Price
from cute_sharding.programs.solve import bytes_first, solve


def least(program, weigh):
    """The least weight of all choices; None if there is none. How the ways are chosen, each value
    by itself lies where it costs least.
    """
    groups = defaultdict(list)
    for o, op in enumerate(program.ops):
        groups[("alone", o) if op.kind is None else op.kind].append(o)
    best = None
    for choice in product(*[range(len(program.ops[ops[0]].ways)) for ops in groups.values()]):
        ways = {o: w for ops, w in zip(groups.values(), choice) for o in ops}
        weight = sum(weigh(op.ways[ways[o]].price) for o, op in enumerate(program.ops))
        for values, made in _together(program, groups, ways):
            weights = [_of_value(program, weigh, ways, values, made, q) for q in _all(program)]
            found = [each for each in weights if each is not None]
            if not found:
                break
            weight += min(found)
        else:
            best = weight if best is None else min(best, weight)
    return best


def _all(program):
    return sorted({p for prices in program.moves.values() for pair in prices for p in pair})


def _together(program, groups, ways):
    """Values that are brought elsewhere together, and how they are made."""
    for v, placing in program.given.items():
        yield [v], placing
    for ops in groups.values():
        first = program.ops[ops[0]]
        for position, placing in enumerate(first.ways[ways[ops[0]]].results):
            yield [program.ops[o].results[position] for o in ops], placing


def _of_value(program, weigh, ways, values, made, lies):
    """What it costs that the values lie there, and all copies of them; None if they cannot."""
    if lies != made and any(v in program.fixed or v in program.given for v in values):
        return None
    weight = 0
    for v in values:
        moves = {**program.moves[program.kinds[v]], (lies, lies): Price(), (made, made): Price()}
        copies = set()
        for o, op in enumerate(program.ops):
            for i, (operand, needed) in enumerate(zip(op.operands, op.ways[ways[o]].operands)):
                if operand == v and i in op.as_lies and needed != lies:
                    return None
                if operand == v:
                    copies.add(needed)
        for pair in [(made, lies), *[(lies, copy) for copy in copies]]:
            if pair not in moves:
                return None
            weight += weigh(moves[pair])
    return weight


def of_first_ways(program):
    """What it costs that each op takes its first way, and copies are made as they are needed."""
    lies, price, copies = dict(program.given), Price(), set()
    for op in program.ops:
        price = price.plus(op.ways[0].price)
        for v, needed in zip(op.operands, op.ways[0].operands):
            if needed != lies[v] and (v, needed) not in copies:
                copies.add((v, needed))
                price = price.plus(program.moves[program.kinds[v]][lies[v], needed])
        lies.update(zip(op.results, op.ways[0].results))
    return price


def drawn(seed, ops):
    rng = random.Random(seed)
    return drawn_program(rng, rng.randint(1, ops), mesh=rng.choice([(2,), (4,), (2, 2)]))


@pytest.mark.parametrize("seed", range(300))
def test_small_programs_have_the_least_price(seed):
    program = drawn(seed, 8)
    weigh = bytes_first(program)
    solved = solve(program)
    assert solved.weight == solved.least == weigh(solved.price)
    assert solved.weight == pytest.approx(least(program, weigh), rel=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_programs_are_never_dearer_than_their_first_ways(seed):
    program = drawn(seed, 60)
    solved = solve(program)
    assert solved.price <= of_first_ways(program)
    assert solved.least == solved.weight
