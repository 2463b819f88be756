"""Redistribution as a cluster runs it, over gloo: ranks that are not in step, stages, threads,
compiled ranks beside one that is not. A hang fails.
"""

import cluster_worker
import pytest
from gloo import spawn

pytestmark = pytest.mark.processes


def run(world, folder, *jobs):
    spawn(cluster_worker.begin, world, "several", world, str(folder / "rendezvous"), *jobs)


@pytest.mark.costly
def test_replicas_stages_and_threads(tmp_path):
    run(8, tmp_path, ("replicas_out_of_step",), ("stages_alone",))


@pytest.mark.costly
def test_threads(tmp_path):
    run(5, tmp_path, ("threads",), ("averages",))


@pytest.mark.costly
def test_memory_that_lies_otherwise(tmp_path):
    run(5, tmp_path, ("lying_otherwise",))


@pytest.mark.costly
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_rank_that_runs_eagerly_beside_compiled_ones(dynamic, share, tmp_path):
    run(5, tmp_path, ("one_rank_eager", dynamic, share(5, 2)))


@pytest.mark.costly
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_what_inductor_computes(dynamic, some_of, tmp_path):
    names = some_of([*cluster_worker.OF_INDUCTORS], 5)
    run(2, tmp_path, ("under_inductor", dynamic, names))
