"""Real processes over gloo: views and redistributions as programs run them, with uneven shards,
empty ranks, and ranks outside of the mesh.
"""

import movement_worker
import processes_worker as worker
import pytest
from gloo import run, spawn

pytestmark = pytest.mark.processes


@pytest.mark.costly
def test_views_on_three(share, tmp_path):
    run(3, tmp_path, (worker.views, [0, 1, 2], share(60, 12)))


def test_views_on_four(share, tmp_path):
    meshes = [0, 1, 2, 3], [[0, 1], [2, 3]]
    run(
        4,
        tmp_path,
        *[(worker.views, ranks, share(30, 6)) for ranks in meshes],
        (worker.slices,),
    )


def test_movements(share, tmp_path):
    run(
        4,
        tmp_path,
        *[
            (movement_worker.movements, ranks, share(60, 12))
            for ranks in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]])
        ],
    )


def test_writes_to_movements_and_reads(share, tmp_path):
    run(
        4,
        tmp_path,
        *[
            (movement_worker.writes_and_reads, ranks, share(40, 12))
            for ranks in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]])
        ],
    )


@pytest.mark.costly
def test_movements_in_models_and_in_graphs(tmp_path):
    run(4, tmp_path, (movement_worker.movement_models,), (movement_worker.compiled_movements,))


INSIDE, INPUTS = movement_worker.WRITTEN_INSIDE, movement_worker.WRITTEN_INPUTS


@pytest.mark.costly
@pytest.mark.parametrize(
    ("dynamic", "backend", "names"),
    [
        (False, "aot_eager", [*INSIDE, *INPUTS]),
        (False, "inductor", ["slices of one", "the slice"]),
        # torch takes no slice of a sharded dim as an input of any size
        (True, "aot_eager", [*INSIDE, "the tensor"]),
    ],
    ids=["static", "inductor", "any sizes"],
)
def test_compiled_writes(dynamic, backend, names, tmp_path):
    run(2, tmp_path, (movement_worker.compiled_writes, dynamic, backend, names))


@pytest.mark.costly
def test_views_that_compiled_programs_return(tmp_path):
    returned = movement_worker.views_returned  # movement, and sizes that are symbols
    run(3, tmp_path, *[(returned, *on) for on in [(False, False), (True, False), (True, True)]])


@pytest.mark.costly
def test_drawn_compiled_writes(share, tmp_path):
    drawn = movement_worker.drawn_compiled_writes
    run(3, tmp_path, *[(drawn, share(12, 12), gradients) for gradients in (False, True)])


@pytest.mark.costly
def test_slices_of_any_size_in_one_graph(tmp_path):
    run(4, tmp_path, (movement_worker.slices_of_any_size,))


@pytest.mark.costly
def test_movements_of_any_size_in_one_graph(some_of, tmp_path):
    names = some_of([*movement_worker.OF_ANY_SIZE], 10)
    run(4, tmp_path, (movement_worker.movements_of_any_size, names))


@pytest.mark.costly
@pytest.mark.parametrize(
    "mesh", [[3, 1, 2, 0], [[3, 1], [2, 0]], [[0, 3], [2, 1]], [2, 0], [0, 1, 2, 3]], ids=str
)
@pytest.mark.one_in(5)
def test_meshes_whose_ranks_do_not_ascend(mesh, tmp_path):
    run(4, tmp_path, (worker.distributed, mesh))


def test_redistributions(share, tmp_path):
    run(
        4,
        tmp_path,
        *[
            (worker.redistributions, ranks, share(40, 6))
            for ranks in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]])
        ],
    )


def test_redistributions_with_the_collectives_of_other_backends(share, tmp_path):
    run(
        4,
        tmp_path,
        *[
            (worker.natively, ranks, share(20, 4))
            for ranks in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]])
        ],
    )


def test_writes(tmp_path):
    run(4, tmp_path, (worker.writes, [0, 1]), (worker.writes, [[0, 1], [2, 3]]))


def test_what_is_gathered_once(tmp_path):
    run(
        4,
        tmp_path,
        (worker.gathered, [0, 1, 2, 3]),
        (worker.gathered, [[0, 1], [2, 3]]),
    )


def test_meshes_smaller_than_the_world(share, tmp_path):
    """Ranks outside come through unharmed; exchanges over two mesh dims need a group of their own
    there.
    """
    run(
        5,
        tmp_path,
        *[
            (job, ranks, share(20, 10))
            for ranks in ([3, 1, 4], [[4, 1], [2, 0]])
            for job in (
                worker.views,
                worker.redistributions,
                movement_worker.writes_and_reads,
            )
        ],
    )


@pytest.mark.costly
@pytest.mark.parametrize("case", range(worker.COMPILED))
def test_compiled_programs(case, tmp_path):
    run(4, tmp_path, (worker.compiled, case))


@pytest.mark.costly
@pytest.mark.parametrize("case", range(worker.COMPILED_ONCE))
def test_programs_compiled_once_for_several_shapes(case, tmp_path):
    run(4, tmp_path, (worker.compiled_once, case))


def test_a_process_that_dies(tmp_path):
    spawn(worker.dying, 3, 3, str(tmp_path / "rendezvous"), str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [
        "RuntimeError True",
        "RuntimeError True",
    ]


def test_fully_sharded_over_tensor_parallel(tmp_path):
    run(6, tmp_path, (worker.fully_sharded,))
