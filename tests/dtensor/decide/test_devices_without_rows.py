"""Ops where some device has no rows: it adds nothing to reductions, and raises no error alone."""

from itertools import product

import pytest
import torch
from few_rows_programs import FAMILIES, LOSSES, WITH_ROWS
from op_programs import compare
from simulation import assert_holds, distribute, number, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


def test_norms_of_devices_without_elements():
    with ranks_of((2,)), cute_sharding.enabled():
        for order in (float("inf"), float("-inf"), 2.0, -1.0):
            for placement in (_StridedShard(0, split_factor=5), Shard(0)):
                x = distribute(number((1, 3)) + 1, (2,), [placement])
                with plain():
                    expected = torch.linalg.vector_norm(number((1, 3)) + 1, order)
                with cute_sharding.enabled(redistribution=True):
                    assert_holds(
                        torch.linalg.vector_norm(x, order).redistribute(placements=[Replicate()]),
                        expected,
                    )
        assert distribute(number((1,)) + 2, (2,), [_StridedShard(0, split_factor=3)]).item() == 2.0


def test_norms_of_devices_without_elements_of_other_dims():
    """What is cut is not reduced: a device without rows has a norm of none, and nothing moves."""
    with ranks_of((4,)), cute_sharding.enabled():
        for order, placement, dim in product(
            (float("inf"), float("-inf"), -1.0),
            (_StridedShard(0, split_factor=2), Shard(0)),
            (1, [1], -1, [-1]),
        ):
            x = distribute(number((3, 5)) + 1, (4,), [placement])
            with plain():
                expected = torch.linalg.vector_norm(number((3, 5)) + 1, order, dim)
            with CommDebugMode() as communicated:
                norm = torch.linalg.vector_norm(x, order, dim)
            assert communicated.get_total_counts() == 0
            assert norm.placements == x.placements
            assert_holds(norm, expected)


@pytest.mark.parametrize("placement", [_StridedShard(0, split_factor=2), Shard(0)], ids=str)
def test_extremes_of_devices_without_elements(placement):
    """As a row that is left of a view, or of a reduction, on more devices than rows."""
    with ranks_of((4,)), cute_sharding.enabled():
        for extreme in (torch.max, torch.min, torch.amax, torch.amin, lambda x: x.amax(0)):
            for shape in ((3, 5), (1, 4)):
                with plain():
                    expected = extreme(number(shape) + 1)
                assert_holds(extreme(distribute(number(shape) + 1, (4,), [placement])), expected)
        rows = distribute(number((3, 5)) + 1, (4,), [placement]).amax(1)
        assert rows.placements == (placement,)
        x = distribute(number((1, 4)) > 1, (4,), [placement])
        with plain():
            expected = torch.all(number((1, 4)) > 1, (1,)).max()
        assert_holds(torch.all(x, (1,)).max(), expected)


EVERY = {name: row for family in FAMILIES.values() for name, row in family.items()}


def on_one_device(function, operands):
    """What is raised there, forward or backward; None if nothing is."""
    with plain():
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
        try:
            result = function(*leaves)
            if result.requires_grad:
                result.sum().backward()
        except Exception as error:
            return error
    return None


def check(name, rows, flags, cut):
    """On four devices, of which all but one have no rows of one: the values and gradients of one
    device; an error only if one device raises one, or without a rule for the op.
    """
    function, operands = EVERY[name]
    with plain():
        fulls = operands(rows)
    placements = [[cut if x.ndim and x.shape[0] == rows else Replicate()] for x in fulls]
    raised = on_one_device(function, fulls)
    with ranks_of((4,)):
        if raised is None:
            try:
                compare(function, fulls, (4,), placements, f"{name} of {rows} rows", **flags)
            except NotImplementedError as error:
                assert "does not have a sharding strategy" in str(error)
        else:
            with pytest.raises(Exception, match=r"[\s\S]"):
                compare(function, fulls, (4,), placements, name, **flags)


@pytest.mark.one_in(60)
@pytest.mark.parametrize("flags", [{}, {"redistribution": True, "movement": True}], ids=str)
@pytest.mark.parametrize("cut", [Shard(0), _StridedShard(0, split_factor=2)], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_few_rows(name, cut, flags):
    for rows in (1, 3) if name in WITH_ROWS else (0, 1, 3):
        check(name, rows, flags, cut)


@pytest.mark.parametrize("ops", [True, False])
@pytest.mark.parametrize("name", [name for name in LOSSES if name.endswith("mean")])
def test_means_of_few_rows(name, ops):
    for rows in (1,) if name in WITH_ROWS else (0, 1):
        check(name, rows, {"ops": ops}, Shard(0))
