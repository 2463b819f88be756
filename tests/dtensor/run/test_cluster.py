"""Redistribution as a cluster runs it, over gloo: ranks that are not in step, stages, threads,
compiled ranks beside one that is not. A hang fails.
"""

import cluster_worker
import pytest
from gloo import run

pytestmark = pytest.mark.processes


@pytest.mark.costly
def test_replicas_stages_and_threads(tmp_path):
    run(8, tmp_path, (cluster_worker.replicas_out_of_step,), (cluster_worker.stages_alone,))


@pytest.mark.costly
def test_threads(tmp_path):
    run(5, tmp_path, (cluster_worker.threads,), (cluster_worker.averages,))


@pytest.mark.costly
def test_memory_that_lies_otherwise(tmp_path):
    run(5, tmp_path, (cluster_worker.lying_otherwise,))


@pytest.mark.costly
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_rank_that_runs_eagerly_beside_compiled_ones(dynamic, share, tmp_path):
    run(5, tmp_path, (cluster_worker.one_rank_eager, dynamic, share(5, 2)))


@pytest.mark.costly
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_what_inductor_computes(dynamic, some_of, tmp_path):
    names = some_of([*cluster_worker.OF_INDUCTORS], 5)
    run(2, tmp_path, (cluster_worker.under_inductor, dynamic, names))
