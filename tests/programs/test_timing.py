"""What travels together: values wait for others, if as much is received in fewer collectives."""

import random
from dataclasses import replace

import pytest
from drawn_programs import drawn_program

from cute_sharding.programs import solve
from cute_sharding.programs.program import Op, OpWay, Price, Program

MOVES = {"matrix": {("P", "R"): Price(8, 1, 3.0)}}


def shared(moves):
    """All moves at once are one collective, of one second less than each by itself."""
    return Price(0, len(moves) - 1, len(moves) - 1.0)


def program_of(ops, given, **others):
    values = {*given, *[v for op in ops for v in op.results]}
    return Program(
        tuple(ops), given, MOVES, dict.fromkeys(values, "matrix"), shared=shared, **others
    )


def maker(v, results):
    """It makes pending sums of a value."""
    return Op((v,), results, (OpWay(("S",), ("P",) * len(results)),))


def readers(values, call=None):
    """Ops that read each value as a replica, of one call or by themselves."""
    return [Op((v,), (), (OpWay(("R",), ()),), call=call) for v in values]


def test_values_wait_for_one_another():
    """Three that a call of three ops reads, and one that an op reads by itself."""
    makers = [maker(0, (v,)) for v in (1, 2, 3, 4)]
    for call, count in (("lists", 2), (None, 4)):
        ops = [*makers, *readers((1, 2, 3), call), *readers((4,))]
        solved = solve(program_of(ops, {0: "S"}))
        assert solved.price == Price(32, count, 12.0 - (4 - count))
        assert [solved.lies[v] for v in (1, 2, 3)] == ["P"] * 3


def test_results_of_an_op_do_not_wait():
    ops = [maker(0, (1, 2)), *readers((1, 2))]
    solved = solve(program_of(ops, {0: "S"}))
    assert [solved.lies[v] for v in (1, 2)] == ["R", "R"] and solved.price.collectives == 1


def test_values_wait_behind_views_of_them():
    """Which are made anywhere, but are brought nowhere else themselves."""
    makers = [maker(0, (v,)) for v in (1, 2, 3)]
    either = tuple(OpWay((p,), (p,)) for p in "RP")
    views = [Op((v,), (v + 3,), either, as_lies=frozenset((0,))) for v in (1, 2, 3)]
    within = {v + 3: v for v in (1, 2, 3)}
    ops = [*makers, *views, *readers((4, 5, 6), "lists")]
    solved = solve(program_of(ops, {0: "S"}, within=within, fixed=frozenset(within)))
    assert {solved.lies[v] for v in range(1, 7)} == {"P"} and solved.price.collectives == 1


def test_a_copy_that_is_read_again_is_shared_by_the_first_call_that_reads_it():
    makers = [maker(0, (v,)) for v in (1, 2, 3)]
    ops = [*makers, *readers((1, 2, 3), "first"), *readers((1, 2, 3), "second")]
    assert solve(program_of(ops, {0: "S"})).price == Price(24, 1, 7.0)


@pytest.mark.parametrize("seed", range(40))
def test_as_many_bytes_are_received_in_no_more_collectives(seed):
    rng = random.Random(seed)
    program = drawn_program(rng, rng.randint(2, 20), mesh=rng.choice([(2,), (4,)]))
    ops = [replace(op, call=o // 3) for o, op in enumerate(program.ops)]
    alone = solve(program).price
    together = solve(replace(program, ops=tuple(ops), shared=shared)).price
    assert together.received == alone.received
    assert together.collectives <= alone.collectives
