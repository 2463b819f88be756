"""The solver of programs against brute force: all ways, and for each value all placings."""

import pickle
import random
import re
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from drawn_programs import drawn_program, freed, in_layers

from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs import solve
from cute_sharding.programs.linear import Model
from cute_sharding.programs.program import FreeValues, Op, OpWay, Price, Program
from cute_sharding.programs.solve import bytes_first


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
        copies = []
        for o, op in enumerate(program.ops):
            for i, (operand, needed) in enumerate(zip(op.operands, op.ways[ways[o]].operands)):
                if operand == v and i in op.as_lies and needed != lies:
                    return None
                if operand == v and (v in program.alone or needed not in copies):
                    copies.append(needed)
        for pair in [(made, lies), *[(lies, copy) for copy in copies]]:
            if pair not in moves:
                return None
            weight += weigh(moves[pair])
    return weight


def least_within(program, weigh, limit):
    """The least weight of all choices that hold no more than the limit, and the least that any
    choice holds.
    """
    groups = defaultdict(list)
    for o, op in enumerate(program.ops):
        groups[("alone", o) if op.kind is None else op.kind].append(o)
    best = smallest = None
    for choice in product(*[range(len(program.ops[ops[0]].ways)) for ops in groups.values()]):
        ways = {o: w for ops, w in zip(groups.values(), choice) for o in ops}
        together = list(_together(program, groups, ways))
        own = sum(weigh(op.ways[ways[o]].price) for o, op in enumerate(program.ops))
        options = []
        for values, made in together:
            weights = {q: _of_value(program, weigh, ways, values, made, q) for q in _all(program)}
            options.append([(q, each) for q, each in weights.items() if each is not None])
        for chosen in product(*options):
            lies = {v: q for (values, _), (q, _) in zip(together, chosen) for v in values}
            made = {v: p for values, p in together for v in values}
            weight = own + sum(each for _, each in chosen)
            peak = max(_held(program, ways, made, lies), default=0)
            smallest = peak if smallest is None else min(peak, smallest)
            if peak <= limit and (best is None or weight < best):
                best = weight
    return best, smallest


def _held(program, ways, made, lies):
    """Bytes before the first op, and while each op runs."""
    for moment in range(-1, len(program.ops)):
        total = 0
        for v, placing in lies.items():
            sizes = program.sizes[program.kinds[v]]
            makers = [o for o, op in enumerate(program.ops) if v in op.results] or [-1]
            family = {v}
            for u in sorted(lies):  # views come after what they are views of
                if program.within.get(u) in family:
                    family.add(u)
            uses = [o for o, op in enumerate(program.ops) if family & {*op.operands, *op.results}]
            last = len(program.ops) if family & program.kept else max(uses, default=-1)
            if v not in program.within and makers[0] <= moment <= last:
                total += sizes[placing]
                if makers[0] == moment and made[v] != placing:
                    total += sizes[made[v]]
            taken = defaultdict(list)
            for o, op in enumerate(program.ops):
                for u, needed in zip(op.operands, op.ways[ways[o]].operands):
                    if u == v and needed != placing:
                        taken[needed].append(o)
            for copy, readers in taken.items():
                if min(readers) <= moment <= max(readers):
                    total += sizes[copy]
        yield total


def of_first_ways(program):
    """What it costs that each op takes its first way, and copies are made as they are needed."""
    lies, price, copies = dict(program.given), Price(), set()
    for op in program.ops:
        price = price.plus(op.ways[0].price)
        for v, needed in zip(op.operands, op.ways[0].operands):
            if needed != lies[v] and (v in program.alone or (v, needed) not in copies):
                copies.add((v, needed))
                price = price.plus(program.moves[program.kinds[v]][lies[v], needed])
        lies.update(zip(op.results, op.ways[0].results))
    return price


def of_all_placings(program, weigh, least_of):
    """``least_of`` the program with free values in each of their placings, and what is held of
    them.
    """
    found = []
    for chosen in product(*[free.placings for free in program.free]):
        given, held = dict(program.given), 0
        for free, placing in zip(program.free, chosen):
            given |= dict.fromkeys(free.values, placing)
            held += sum(program.sizes[program.kinds[v]][placing] for v in free.values)
        best = least_of(replace(program, given=given, free=()))
        if best is not None:
            found.append(best + weigh(Price(held=held)))
    return min(found, default=None)


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


@pytest.mark.parametrize("seed", range(100))
def test_free_values_lie_where_all_weighs_least(seed):
    rng = random.Random(seed)
    program = freed(rng, drawn(seed, 6))
    weigh = bytes_first(program)
    expected = of_all_placings(program, weigh, lambda each: least(each, weigh))
    solved = solve(program)
    assert solved.weight == solved.least == weigh(solved.price)
    assert solved.weight == pytest.approx(expected, rel=1e-9)
    for free in program.free:
        assert {solved.lies[v] for v in free.values} < {*free.placings, None}
        assert len({solved.lies[v] for v in free.values}) == 1


@pytest.mark.parametrize("seed", range(30))
def test_free_values_keep_within_a_limit(seed):
    rng = random.Random(seed)
    program = freed(rng, drawn_program(rng, 3, ways=2, mesh=rng.choice([(2,), (4,)])))
    weigh = bytes_first(program)
    peak = solve(program).peak
    for limit in (peak, peak - rng.randint(1, 1 + peak // 2)):
        expected = of_all_placings(program, weigh, lambda each: least_within(each, weigh, limit)[0])
        if expected is None:
            with pytest.raises(MemoryLimitError):
                solve(program, memory_limit=limit, gap=0)
            continue
        solved = solve(program, memory_limit=limit, gap=0)
        assert solved.peak <= limit
        assert solved.weight == pytest.approx(expected, rel=1e-9)


def test_free_values_are_held_in_parts_if_it_costs_nothing_or_must_be():
    """Two weights that ops need whole, one after the other, and one that they need in any way."""
    moves = {"weight": {("S0", "R"): Price(6, 1)}}
    whole, either = (tuple(OpWay((p,), ("R",)) for p in some) for some in (["R"], ["R", "S0"]))
    ops = tuple(Op((v,), (v + 3,), ways) for v, ways in enumerate((whole, whole, either)))
    kinds = dict.fromkeys(range(3), "weight") | dict.fromkeys(range(3, 6), "result")
    free = tuple(FreeValues((v,), ("R", "S0")) for v in range(3))
    sizes = {"weight": {"R": 8, "S0": 2}}
    program = Program(ops, {}, moves, kinds, sizes=sizes, kept=frozenset(range(3)), free=free)
    solved = solve(program)
    assert ([solved.lies[v] for v in range(3)], solved.price.received) == (["R", "R", "S0"], 0)
    assert (solved.peak, solved.price.held) == (18, 18)
    limited = solve(program, memory_limit=14)
    assert ([limited.lies[v] for v in range(3)], limited.price.received) == (["S0"] * 3, 12)


@pytest.mark.parametrize("seed", range(60))
def test_programs_are_never_dearer_than_their_first_ways(seed):
    program = drawn(seed, 60)
    solved = solve(program)
    assert solved.price <= of_first_ways(program)
    assert solved.least == solved.weight


@pytest.mark.parametrize("seed", range(60))
def test_small_programs_keep_within_a_limit(seed):
    rng = random.Random(seed)
    program = drawn_program(rng, 4, ways=2, mesh=rng.choice([(2,), (4,)]))
    weigh = bytes_first(program)
    free = solve(program)
    _, smallest = least_within(program, weigh, inf)
    for limit in {free.peak, *[rng.randint(smallest - 1, free.peak) for _ in range(3)]}:
        expected, _ = least_within(program, weigh, limit)
        if expected is None:
            with pytest.raises(
                MemoryLimitError, match=f"Pass memory_limit={smallest} or"
            ) as raised:
                solve(program, memory_limit=limit, gap=0)
            again = pickle.loads(pickle.dumps(raised.value))  # as from a process of its own
            assert (again.limit, again.least, str(again)) == (limit, smallest, str(raised.value))
            continue
        solved = solve(program, memory_limit=limit, gap=0)
        assert solved.peak <= limit
        assert solved.weight == solved.least == pytest.approx(expected, rel=1e-9)


def as_it_is(program, **limits):
    """Solved without looking for what is alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[bytes_first.__module__], "WORTHWHILE", 0)
        return solve(program, **limits)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_out_at_first_loses_nothing(seed, monkeypatch):
    """However little is left in, and however the averages are found."""
    monkeypatch.setattr(sys.modules[bytes_first.__module__], "PROMISING", 0)
    monkeypatch.setattr(sys.modules[Model.__module__], "MANY", 0)
    test_layers_that_are_alike_lose_nothing(seed)


@pytest.mark.parametrize("seed", range(20))
def test_layers_with_free_values_lose_nothing(seed):
    test_layers_that_are_alike_lose_nothing(seed, free=True)


@pytest.mark.parametrize("seed", range(40))
def test_layers_that_are_alike_lose_nothing(seed, free=False):
    rng = random.Random(seed)
    mesh = rng.choice([(2,), (4,), (2, 2)])
    program = in_layers(drawn_program(rng, rng.randint(2, 6), mesh=mesh), rng.randint(10, 30))
    if program is None:
        return
    if free:
        program = freed(rng, program, together=0)
    try:
        expected = as_it_is(program)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            solve(program)
        return
    solved = solve(program)
    assert solved.weight == solved.least == pytest.approx(expected.weight, rel=1e-9)


def test_first_ways_are_taken_if_there_is_no_time():
    program = drawn(0, 60)
    solved = solve(program, seconds=0)
    assert (solved.ways, solved.lies, solved.price) == (
        (0,) * len(program.ops),
        program.given | solved.made,
        of_first_ways(program),
    )
    assert solved.least == 0 < solved.weight


def test_a_program_that_cannot_run_says_so():
    ways = (OpWay(("R",), ("R",)),)
    program = Program(
        (Op((0,), (1,), ways),), {0: "S0"}, {"matrix": {}}, {0: "matrix", 1: "matrix"}
    )
    with pytest.raises(ValueError, match="no ways of its ops fit together"):
        solve(program)
    with pytest.raises(ValueError, match="no ways of its ops fit together"):
        solve(program, memory_limit=1)


def test_a_program_without_ops():
    solved = solve(Program((), {0: "R"}, {}, {0: "matrix"}, sizes={"matrix": {"R": 8}}))
    assert (solved.ways, solved.weight, solved.peak, solved.lies) == ((), 0, 8, {0: "R"})
    assert solve(Program((), {}, {}, {})).peak == 0


def test_scipy_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r'pip install "cute-sharding\[plan\]"'):
        solve(drawn(0, 3))
