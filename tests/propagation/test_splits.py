"""Why a view that splits a sharded dim into parts is not free."""

import pytest

from cute_sharding.propagation.views import parts_that_do_not_divide
from cute_sharding.relations.table import BY_OP


def view_of(shape, target):
    return BY_OP["Tensor.view"].view(shape, target)


@pytest.mark.parametrize(
    ("shape", "target", "mesh", "cuts", "said"),
    [
        ((4, 16, 32), (4, 16, 2, 16), (4,), ((2, 1),), "2 x 16, and 2 is no multiple of the 4"),
        ((64, 96), (64, 3, 2, 16), (4,), ((1, 3),), "3 x 2 x 16, and 2 is no multiple of the 4"),
        ((64, 96), (64, 6, 16), (2, 2), ((1, 1), (1, 1)), "6 x 16, and 6 is no multiple of the 4"),
        ((4, 16, 192), (4, 16, 3, 4, 16), (4,), ((2, 1),), "shard each of them: _S(2,3) makes"),
        ((8, 192), (8, 3, 4, 16), (2, 4), ((0, 1), (1, 1)), "each of them: _S(1,3) makes"),
        ((4, 16, 96), (4, 16, 3, 2, 16), (4,), ((2, 1),), "4 devices that shard it: in attention"),
        ((4, 16, 32), (4, 16, 1, 6, 16), (4,), None, None),
        ((7, 4), (28,), (3,), ((0, 1),), None),
        ((6, 4), (4, 3, 2), (2,), ((0, 1),), None),
    ],
)
def test_parts_that_do_not_divide_are_said(shape, target, mesh, cuts, said):
    if cuts is None:  # not cut: nothing blocks
        shape, target, cuts = (4, 16, 96), target, (None,)
    found = parts_that_do_not_divide(view_of(shape, target), cuts, mesh, len(mesh) - 1)
    assert (found is None) if said is None else (said in found), found
