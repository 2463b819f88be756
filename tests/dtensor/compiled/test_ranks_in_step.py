"""The graphs of all ranks have the same collectives in the same passes, and of each exchange one
rank sends what another receives; also where a rank has nothing to send or to receive. Compiled as
Inductor's partitioner cuts them (its min-cut), each rank in a process of its own.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import search_path

# All share four processes, which take longer to start than most of them.
pytestmark = pytest.mark.costly

HERE = Path(__file__).parents[1]
PATIENCE = 400  # seconds


# By torch alone as well: gradients of parts of a split that are not used are plain tensors; and of
# sizes that are symbols the rest, more often than here.
REFUSED = (
    "got mixed torch.Tensor and DTensor",
    "cannot be interpreted as an integer",
    "was invalid, but is output",
    "Cannot call numel() on tensor with symbolic sizes",
)
# Of programs that write in place, by torch alone as well, of which the most are wrong besides: it
# takes back what is a view of a mutated input by as_strided, and looks up what is of symbolic sizes
# by their hash.
REFUSED_WRITES = (*REFUSED, "as_strided", "RuntimeError when making fake tensor call")


@pytest.fixture(scope="module")
def ranks():
    """The four, which import torch once: with a hash seed of its own each, as ranks have."""
    path = search_path(HERE, HERE.parent, HERE.parent.parent)
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "steps_of_ranks.py", str(rank)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    yield started
    for rank in started:
        rank.kill()
        rank.communicate()


def run(ranks, *asked):
    """Of each rank, of each program: what was found."""
    for rank in ranks:
        print(*asked, file=rank.stdin, flush=True)
    late = threading.Timer(PATIENCE, lambda: [rank.kill() for rank in ranks])
    late.start()
    try:
        return [json.loads(rank.stdout.readline()) for rank in ranks]
    finally:
        late.cancel()


def with_others(sizes):
    """Of all ranks, without what each gives itself: the fake backend's are not quite a plan's."""
    return [[*row[:rank], 0, *row[rank + 1 :]] for rank, row in enumerate(sizes)]


def assert_in_step(program, is_line, found, refused=REFUSED):
    """Of one program, the graphs of all ranks."""
    if all(isinstance(one, str) and any(text in one for text in refused) for one in found):
        return
    assert not any(isinstance(one, str) for one in found), (program, found)
    names = [[[call[0] for call in graph] for graph in one] for one in found]
    assert all(one == names[0] for one in names), (program, names)
    if not is_line:
        return  # on one mesh dim all ranks are in each group
    for calls in zip(*[[call for graph in one for call in graph] for one in found]):
        if len(calls[0]) == 4:
            receives, sends = (with_others([call[i] for call in calls]) for i in (2, 3))
            assert receives == [list(column) for column in zip(*sends)], (program, calls)


def assert_all_in_step(ranks, first, last, is_dynamic=0, writes=0):
    refused = REFUSED_WRITES if writes else REFUSED
    for found in zip(*run(ranks, first, last, is_dynamic, writes)):
        one = found[0]
        assert_in_step(one["program"], one["is_line"], [of["graphs"] for of in found], refused)


@pytest.fixture
def count(share):
    """How many programs: each is compiled four times."""
    return share(10, 30)


@pytest.mark.costly  # beside test_compiled_order.py, which records the order as well
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_graphs_of_all_ranks_have_the_same_collectives(ranks, first, count):
    assert_all_in_step(ranks, first, first + count)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_graphs_for_any_sizes_have_the_same_collectives(ranks, first, count):
    """Also where some ranks have no row or one, of which the compiler makes constants."""
    assert_all_in_step(ranks, first, first + count, is_dynamic=1)


@pytest.mark.costly
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_graphs_for_any_of_more_sizes_have_the_same_collectives(ranks, first, count):
    """The same programs of more rows, of which no constants are made."""
    assert_all_in_step(ranks, first, first + count, is_dynamic=1, writes=3)


def test_rows_are_no_other_dim_of_as_many(ranks, count):
    """Of what has gradients, for any sizes: columns that are as many as a rank's rows stay a symbol
    where these are a number; and ops on a column of a matrix are not looked up by its stride. All
    ranks compile all.
    """
    for found in zip(*run(ranks, 100, 100 + count, 1, 2)):
        assert_in_step(found[0]["program"], True, [of["graphs"] for of in found], ())


@pytest.mark.parametrize(
    ("is_dynamic", "writes"),
    [(0, 1), (0, 2), (1, 1)],
    ids=["static", "static, with gradients", "any sizes"],
)
def test_graphs_that_write_to_slices_have_the_same_collectives(ranks, is_dynamic, writes, count):
    assert_all_in_step(ranks, 100, 100 + count, is_dynamic, writes)


@pytest.mark.parametrize(
    ("seed", "writes"),
    [
        pytest.param(30, 3, id="blocks of 11 rows in two pieces each, of which one leaves a rest"),
        pytest.param(81, 0, id="slices of which two ranks have one row: contiguous in any case"),
        pytest.param(50, 3, id="sizes that are numbers once the backward pass is traced"),
        pytest.param(54, 0, id="more such sizes"),
        pytest.param(75, 0, id="and more", marks=pytest.mark.costly),
        pytest.param(9, 0, id="no rows of as many columns as a sum of sizes"),
    ],
)
@pytest.mark.one_in(4)
def test_ranks_learn_the_same_of_any_sizes(ranks, seed, writes):
    for found in zip(*run(ranks, seed, seed + 1, 1, writes)):
        assert_in_step(found[0]["program"], False, [of["graphs"] for of in found], ())


def test_a_backward_graph_has_no_collective_of_no_use(ranks):
    """What two ranks save has other sizes than what the others do, so they save other tensors."""
    assert_all_in_step(ranks, 37, 38)
