"""Movement ops, run on all devices at once: every device ends with what index arrays say, and
receives what it lacks, each element once.
"""

import numpy as np
import pytest
import torch
from enumeration import devices
from movements import (
    DONE,
    DRAWN,
    SUMS,
    cases,
    collapsed,
    elements,
    is_ever_free,
    lacking,
    locals_of,
    results,
    run,
)

from cute_sharding.exchange import Exchange
from cute_sharding.propagation.movements import chosen
from cute_sharding.propagation.solver import Budget, carried
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.table.movement import ROWS

# A row among zeros: what it is made of has no such dim. A triangle: rows stay where they are.
UNTOUCHED = ("select's gradient", "torch.tril", "torch.triu")
OPS = tuple(op for op in DRAWN if op not in (*SUMS, *UNTOUCHED))


def prepared(case, choice):
    """Index arrays: what each device holds of the operands, and is to hold of the results."""
    given = elements(case)
    operands = [locals_of(x.numpy(), case.mesh, c) for x, c in zip(given, case.cuts)]
    arrays = [array.numpy() for array in results(case, given)]
    wanted = [locals_of(array, case.mesh, c) for array, c in zip(arrays, choice.cuts)]
    return operands, arrays, wanted


@pytest.mark.one_in(8)
@pytest.mark.parametrize("op", OPS)
def test_everyone_ends_with_its_rows_and_receives_what_it_lacks(op):
    communicated = 0
    for case, choice in cases(op, 160, ops=(op,)):
        operands, _, wanted = prepared(case, choice)
        given = operands
        if case.op == "torch.diagonal":
            given = [collapsed(case, choice.exchange, operands[0])]
        after, received = run(choice.exchange, given)
        for device in devices(case.mesh):
            for got, want in zip(after[device], [of[device] for of in wanted], strict=True):
                assert got.shape == want.shape and (got == want).all(), (case, choice.cuts, device)
        assert received == lacking(operands, wanted), (case, choice.cuts)
        assert choice.exchange.received_elements == max(received.values())
        assert choice.exchange.communicates == (max(received.values()) > 0)
        communicated += choice.exchange.communicates
    assert communicated > 5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("op", SUMS)
def test_sums_are_added_where_they_belong(op):
    for case, choice in cases(op, 120, ops=(op,)):
        rng = np.random.default_rng(len(str(case)))
        (shape,), (sizes, *args) = case.shapes, case.args
        gradient = rng.integers(1, 9, shape)
        index = DONE[SUMS[op]](torch.arange(int(np.prod(sizes))).reshape(sizes), *args)
        whole = np.zeros(int(np.prod(sizes)), int)
        np.add.at(whole, index.numpy().reshape(-1), gradient.reshape(-1))
        whole = whole.reshape(sizes)
        operands = collapsed(case, choice.exchange, locals_of(gradient, case.mesh, case.cuts[0]))
        after, received = run(choice.exchange, [operands], add=True)
        want = locals_of(whole, case.mesh, choice.cuts[0])
        for device in devices(case.mesh):
            assert (after[device][0] == want[device]).all(), (case, choice.cuts, device)
        assert choice.exchange.received_elements == max(received.values())


def is_replicated_for_few_rows(case, choice, arrays):
    """Whether the results are replicated on a mesh dim that cuts an operand, and have a dim of
    fewer rows than devices.
    """
    cut = [m for m, n in enumerate(case.mesh) if n > 1 and any(c[m] for c in case.cuts)]
    return any(all(cuts[m] is None for cuts in choice.cuts) for m in cut) and all(
        0 < min(array.shape, default=0) < np.prod(case.mesh) for array in arrays
    )


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("shape", "slice_", "cuts", "mesh", "expected"),
    [
        ((64, 32), (1, 0, 1), ((1, 1),), (4,), (None,)),
        ((64, 32), (1, 31, 32), ((1, 1),), (4,), (None,)),
        ((64, 32), (1, 0, 3), ((1, 1),), (4,), (None,)),
        ((64, 32), (1, 0, 4), ((1, 1),), (4,), ((1, 4),)),  # all on the first device
        ((64, 32), (1, 0, 1), ((0, 1), (1, 1)), (2, 2), ((0, 1), None)),
        ((64, 32), (0, 0, 1), ((0, 1), (0, 1)), (2, 2), (None, None)),
        ((2, 32), (0, 0, 1), ((0, 1),), (4,), ((0, 1),)),  # few rows to begin with
        ((8, 0), (0, 0, 1), ((0, 1),), (4,), ((0, 1),)),
    ],
)
def test_results_with_fewer_rows_than_devices_are_replicated(shape, slice_, cuts, mesh, expected):
    move = BY_OP["Tensor.__getitem__"].move(shape, *slice_)
    assert chosen(move, (cuts,), mesh).cuts == (expected,)


@pytest.mark.costly
def test_free_placements_are_found():
    """Whether there are any is found by trying all. But for results with fewer rows than devices,
    which are replicated.
    """
    free, found = 0, 0
    sizes = {"meshes": [(2,), (4,), (2, 2), (2, 3), (8,)], "sizes": [0, 1, 2, 3, 4, 6, 8, 12]}
    for case, choice in cases(7, 700, ops=OPS, most=60, **sizes):
        operands, arrays, _ = prepared(case, choice)
        if choice.exchange.received_elements and is_replicated_for_few_rows(case, choice, arrays):
            continue
        if is_ever_free(case.mesh, arrays, operands):
            free += 1
            found += choice.exchange.received_elements == 0
    assert free > 300 and found >= 0.995 * free, (found, free)


@pytest.mark.parametrize(
    ("op", "args", "devices"),
    [
        ("torch.cat", ([(8, 2), (1, 2), (8, 2)], 0), 3),
        ("torch.nn.functional.pad", ((2, 2), (0, 0, 15, 0)), 2),
        ("torch.nn.functional.pad", ((3, 2), (0, 0, 11, 3)), 2),
        ("torch.nn.functional.pad", ((50, 2), (0, 0, 51, 0)), 8),
        ("torch.nn.functional.pad", ((23, 2), (0, 0, 78, 0)), 4),
    ],
)
def test_free_placements_are_found_of_more_rows(op, args, devices):
    """Whose split factors are others than those of the operands."""
    move = BY_OP[op].move(*args)
    cuts = [((0, 1) if shape[0] > 1 else None,) for shape in move.inputs]
    found = chosen(move, tuple(cuts), (devices,))
    assert found.exchange.received_elements == 0


@pytest.mark.parametrize(
    ("op", "args", "cuts", "received"),
    [
        ("torch.roll", (1, 0), (0, 1), 64),
        ("torch.roll", (100, 0), (0, 1), 6400),
        ("torch.flip", ((0,),), (0, 1), 128 * 64),
        ("Tensor.__getitem__", (0, 0, 512), (0, 1), 64 * 64),
        ("Tensor.__getitem__", (0, 1, None), (0, 1), 64),
        ("torch.split", (512, 0), (0, 1), 2 * 64 * 64),
        ("torch.nn.functional.pad", ((0, 0, 2, 0),), (0, 1), 5 * 64),
        ("Tensor.unfold", (0, 3, 1), (0, 1), 2 * 64),
        ("torch.split", (32, 1), (1, 2), 0),
    ],
)
def test_what_a_device_receives_of_1024_rows_on_8_devices(op, args, cuts, received):
    found = chosen(BY_OP[op].move((1024, 64), *args), ((cuts,),), (8,))
    assert found.exchange.received_elements == received


def test_planning_does_not_depend_on_the_number_of_rows():
    """A thousand times as many rows are as many copies."""
    for op in ("torch.roll", "torch.flip"):
        counts = []
        for n in (1 << 10, 1 << 20):
            args = (n // 8 + 3, 0) if op == "torch.roll" else ((0,),)
            exchange = chosen(BY_OP[op].move((n + 1, 4), *args), (((0, 2),),), (8,)).exchange
            part = exchange.part(3)
            counts.append(sum(len(c) for c in (*part.packs, *part.unpacks)))
        assert counts[0] == counts[1], op


def test_a_copy_is_sent_once_though_many_windows_need_it():
    move = BY_OP["Tensor.unfold"].move((32,), 0, 5, 1)
    exchange = Exchange.on_mesh(move, (4,), ((((0, 1),),),), ((((0, 1),), ()),))
    assert [exchange.received_by(k) for k in range(4)] == [3, 3, 3, 3]


def test_ops_that_touch_no_cut_dim_are_not_for_us():
    for row in ROWS:
        if row.op in ("torch.roll", "torch.flip", "Tensor.__getitem__"):
            assert (
                chosen(
                    row.move((4, 6), [1], [0])
                    if row.op == "torch.roll"
                    else row.move((4, 6), (0,))
                    if row.op == "torch.flip"
                    else row.move((4, 6), 0, 1),
                    (((1, 1),),),
                    (2,),
                )
                is None
            )


def test_all_rows_of_the_table_are_drawn():
    assert {row.op for row in ROWS} == set(DRAWN)


def test_spare_mesh_dims_cut_the_results_where_less_is_received_then():
    """A roll by a row has a halo for that; a flip moves all rows, fewer if a device holds fewer."""
    shard = ((0, 1), None, None)
    roll = BY_OP["torch.roll"]
    halo = chosen(roll.move((32, 48), 1, 0), (shard,), (2, 2, 2), spare=(1, 2))
    assert halo.cuts == (shard,) and halo.exchange.received_elements == 48
    for move in (BY_OP["torch.flip"].move((32, 48), [0]), roll.move((32, 48), 16, 0)):
        kept = chosen(move, (shard,), (2, 2, 2))
        assert kept.cuts == (shard,) and kept.exchange.received_elements == 16 * 48
        one = chosen(move, (shard,), (2, 2, 2), spare=(1,))
        assert one.cuts[0][0] == (0, 1) and one.cuts[0][1] and one.cuts[0][2] is None
        assert one.exchange.received_elements == 16 * 48 // 2
        both = chosen(move, (shard,), (2, 2, 2), spare=(1, 2))
        assert all(both.cuts[0]) and both.exchange.received_elements == 16 * 48 // 4
    assert chosen(move, (((0, 1), (1, 1)),), (2, 2), spare=()).cuts == (((0, 1), (1, 1)),)
    assert chosen(move, (((0, 1), None),), (2, 1), spare=(1,)).cuts == (((0, 1), None),)


def test_options_are_looked_for_until_one_can_be_carried():
    """Each once; the next are not, if the search ends there."""
    looked_at = []

    def options(decided, _):
        for option in (2, 2, 1, 0):
            looked_at.append((*decided, option))
            yield option

    def carry(decided, _, option):
        return True if option < 2 else None

    found = carried(2, options, carry, True, Budget(4))
    assert next(found) == ((1, 1), True)
    assert looked_at == [(2,), (2,), (1,), (1, 2), (1, 2), (1, 1)]
    assert list(found) == []  # four steps, and 2 is tried once for each
