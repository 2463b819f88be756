"""What a view that is not free is told: where to redistribute first, and why."""

import pytest

from cute_sharding.propagation.carry import carry
from cute_sharding.propagation.suggestions import MOST, parts_that_do_not_divide, suggested_targets
from cute_sharding.relations.table import BY_OP


def view_of(shape, target):
    return BY_OP["Tensor.view"].view(shape, target)


@pytest.mark.parametrize(
    ("shape", "target", "mesh", "cuts", "suggested"),
    [
        # 2 heads on 4 devices: all of them, then the batch, then the sequence; no strided sequence.
        ((4, 16, 32), (4, 16, 2, 16), (4,), ((2, 1),), [(None,), ((0, 1),), ((1, 1),)]),
        # A batch that has fewer rows than devices comes after a sequence that divides.
        ((2, 16, 32), (2, 16, 2, 16), (4,), ((2, 1),), [(None,), ((1, 1),)]),
        # What does not block the view stays as it is.
        (
            (4, 16, 128),
            (4, 16, 2, 64),
            (2, 4),
            ((0, 1), (2, 1)),
            [((0, 1), None), ((0, 1), (1, 1))],
        ),
        # Rows that do not divide, flattened: torch's redistribution to columns cannot be viewed.
        ((7, 4), (28,), (3,), ((0, 1),), [(None,)]),
    ],
)
def test_in_the_order_of_what_they_cost_later(shape, target, mesh, cuts, suggested):
    found = suggested_targets(view_of(shape, target), cuts, mesh)
    assert [target.source for target in found][: len(suggested)] == suggested
    assert len(found) <= MOST
    for each in found:
        after = carry(view_of(shape, target), each.source, mesh)
        assert after.blocked is None and after.cuts == each.output


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
