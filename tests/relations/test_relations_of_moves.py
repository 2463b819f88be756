"""Every row of the movement table as a relation, beside what torch makes of index arrays."""

import math
import random

import movements
import pytest
import torch
from drawn_moves import carried_out

from cute_sharding.relations import NotOnlyMoved
from cute_sharding.relations.moves import relation_of_move
from cute_sharding.relations.table import MOVEMENTS, STEPS, relation_of
from cute_sharding.relations.table.movement import ROWS

MOVED = [row.op for row in ROWS if row.op not in movements.SUMS]


def test_every_row_is_looked_at():
    assert {row.op for row in MOVEMENTS.values()} == {*MOVED, *movements.SUMS}


@pytest.mark.parametrize("op", MOVED)
def test_an_op_as_a_relation(op):
    rng = random.Random(op)
    found = 0
    while found < 120:
        case = movements.draw(rng, (op,), most=300)
        if case.move is None:
            continue
        found += 1
        relation = relation_of_move(case.move)
        given = movements.elements(case)
        results = carried_out(relation, given)
        for k, want in enumerate(wanted(case, given)):
            # The oracle marks rows that come from nowhere; the op fills them.
            want = torch.where(want == movements.NOWHERE, int(case.move.fill), want)
            assert torch.equal(results[k], want), case


def wanted(case, given):
    if case.op in ("torch.tril", "torch.triu"):
        return [getattr(torch, case.op.removeprefix("torch."))(given[0], *case.args)]
    return [torch.as_tensor(x) for x in movements.results(case, given)]


@pytest.mark.parametrize("op", movements.SUMS)
def test_sums_have_no_relation(op):
    case = movements.draw(random.Random(op), (op,))
    while case.move is None:
        case = movements.draw(random.Random(), (op,))
    given = case.shapes if op in movements.TOGETHER else case.shapes[0]
    with pytest.raises(NotOnlyMoved, match="the op adds up rows of the input"):
        relation_of(op, given, *case.args)


@pytest.mark.parametrize(
    ("name", "shape", "args"),
    [
        ("pixel_shuffle.default", (2, 8, 3, 4), (2,)),
        ("pixel_unshuffle.default", (2, 3, 4, 6), (2,)),
        ("channel_shuffle.default", (2, 6, 3, 4), (3,)),
        ("im2col.default", (2, 3, 5, 6), ([2, 3], [1, 1], [1, 0], [2, 1])),
        ("squeeze_copy.dim", (2, 1, 3), (1,)),
    ],
)
def test_steps_are_one_relation(name, shape, args):
    """One after the other they give what the op gives; a pad of a step is filled with 0."""
    given = torch.arange(1, 1 + math.prod(shape)).reshape(shape)
    op, overload = name.split(".")
    wanted = getattr(getattr(torch.ops.aten, op), overload)(given.double(), *args)
    (found,) = carried_out(STEPS[name].relation(shape, *args), [given])
    assert torch.equal(found.double(), wanted)
