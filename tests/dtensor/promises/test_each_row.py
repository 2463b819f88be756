"""What the fixed tests meet: every row of the table of relations, every kind of placement and every
number of mesh dims; the values and gradients of each are those of one device.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from golden import rows, table
from golden.cases import case_of, names, placements
from simulation import mesh_of, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_flatten, tree_unflatten

import cute_sharding
from benchmarks.op_database import RIGHT, distributed, leaves_of, on_one_device, outcome, run

TESTS = Path(__file__).parents[2]
OTHER_DEVICES = "its kernel is of another kind of device"
GOLDEN = "dtensor/promises/test_golden.py::test_a_share_of_the_table"
WRITTEN_STATISTICS = (
    "dtensor/decide/test_ops.py::test_statistics_of_batches_are_written_to_where_they_are"
)

# Rows that no case above meets, by one of their overloads: the test that does, or why none can.
ELSEWHERE = {
    "linalg_eigvals.default": "torch.linalg.eigvals comes to linalg_eig",
    "linalg_householder_product.default": GOLDEN,
    "_batch_norm_with_update.default": GOLDEN,
    "native_batch_norm.default": WRITTEN_STATISTICS,
    "native_batch_norm_backward.default": WRITTEN_STATISTICS,
    "rrelu_with_noise.default": "dtensor/decide/test_drawn_numbers.py::"
    "test_what_is_noted_beside_a_result_is_drawn_with_it",
    "scaled_dot_product_attention.default": "dtensor/decide/test_composites.py::"
    "test_ops_whose_parts_are_composite_are_taken_apart",
    "_scaled_dot_product_attention_math.default": "dtensor/decide/test_composites.py::"
    "test_ops_whose_parts_are_composite_are_taken_apart",
    "batch_norm_backward.default": OTHER_DEVICES,
    **dict.fromkeys(
        (
            *("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default"),
            *("cudnn_batch_norm.default", "cudnn_batch_norm_backward.default"),
        ),
        "dtensor/run/test_folds.py::test_batch_norms_of_other_forms_and_backends_are_the_same",
    ),
    "miopen_batch_norm.default": OTHER_DEVICES,
    "_fused_rms_norm.default": OTHER_DEVICES,
    "_fused_rms_norm_backward.default": OTHER_DEVICES,
    "_scaled_dot_product_flash_attention.default": OTHER_DEVICES,
    "_scaled_dot_product_flash_attention_backward.default": OTHER_DEVICES,
    "_scaled_dot_product_efficient_attention.default": OTHER_DEVICES,
    "_scaled_dot_product_efficient_attention_backward.default": OTHER_DEVICES,
    "_scaled_dot_product_cudnn_attention.default": OTHER_DEVICES,
    "_scaled_dot_product_cudnn_attention_backward.default": OTHER_DEVICES,
}


def with_gradients(case):
    """The arguments, of which floating tensors want gradients."""
    flat, tree = tree_flatten((case.args, case.kwargs))
    leaves = [
        x.clone().requires_grad_(case.gradients and (x.is_floating_point() or x.is_complex()))
        if isinstance(x, torch.Tensor)
        else x
        for x in flat
    ]
    return tree_unflatten(leaves, tree)


def on_mesh(case, args, kwargs, mesh, way):
    """Results and gradients of tensors that are placed in this way."""
    given = (args, kwargs)
    flat, tree = tree_flatten(given)
    numbers = {id(x): i for i, x in enumerate(leaves_of(given))}
    leaves = [
        distributed(x, mesh_of(mesh), placements(way, numbers[id(x)], x, mesh))
        if isinstance(x, torch.Tensor)
        else x
        for x in flat
    ]
    placed_args, placed_kwargs = tree_unflatten(leaves, tree)
    return run(case.function, placed_args, placed_kwargs, case.gradients)


def ways_that_differ(name, case):
    """Two ways may place a case's tensors alike: of one vector, all shards are the same."""
    found = {}
    for mesh, way in rows.ways_of(name):
        placed = [tuple(placements(way, i, x, mesh)) for i, x in enumerate(case.tensors())]
        found.setdefault((mesh, *placed), (mesh, way))
    return found.values()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", rows.chosen())
def test_values_are_those_of_one_device(name):
    if name not in names():
        pytest.skip("torch's operator database has it in another release")
    case = case_of(name)
    args, kwargs = with_gradients(case)
    with plain():
        expected = on_one_device(SimpleNamespace(op=case.function), args, kwargs, case.gradients)
    assert expected is not None, "one device gives something else each time"
    refuses = any("Error: " in line for line in table.read()[name])
    with cute_sharding.enabled(redistribution=True, movement=True):
        for mesh, way in ways_that_differ(name, case):
            with ranks_of(mesh):
                said, why = outcome(partial(on_mesh, case, args, kwargs, mesh, way), expected)
            right = said == RIGHT or (refuses and said == "raises")
            assert right, f"{way} on {mesh}: {said}: {why}"


def test_every_row_is_met():
    """By a case above, or by a test that is named here, and runs in make test."""
    unmet = [overloads for overloads in rows.unmet() if not {*overloads} & ELSEWHERE.keys()]
    assert not unmet, (
        "no fixed test meets these rows: add a program to op_programs.py and write the golden "
        "table, or name a test in ELSEWHERE"
    )


@pytest.mark.one_in(1)
@pytest.mark.parametrize("named", sorted({test for test in ELSEWHERE.values() if "::" in test}))
def test_tests_elsewhere_run_always(named):
    file, _, test = named.partition("::")
    source = (TESTS / file).read_text()
    (marks,) = re.findall(rf"((?:^@.*\n(?:^[ )\]}}].*\n)*)*)^def {test}\(", source, re.M)
    assert not re.search(r"mark\.costly", marks)
    assert "parametrize" not in marks or "one_in(1)" in marks


def test_every_kind_of_placement_and_number_of_mesh_dims_is_met():
    kinds, dims = set(), set()
    for name in rows.chosen():
        for mesh, way in rows.ways_of(name):
            dims.add(len(mesh))
            for i in range(2):
                kinds |= {*map(type, placements(way, i, torch.zeros(4, 4), mesh))}
    assert kinds == {Shard, _StridedShard, Replicate, Partial} and dims == {1, 2, 3}
    assert {*rows.ON_OTHERS} <= {way for name in rows.chosen() for way in rows.ways_of(name)}
