"""Loaders of engines of twelve kinds, from trainers of seven, on real processes: bit for bit what
the loader makes of whole tensors, and no byte more than a count.
"""

import loaders_worker
import pytest
from gloo import run

ALL, SOME = loaders_worker.WAYS, loaders_worker.WAYS[2:5]
ENGINES = {
    "beside the trainer": (6, [4, 5], ALL),
    "on the trainer's ranks": (4, [2, 1], ALL),
    "half on the trainer's": (5, [3, 4], SOME),
}


@pytest.mark.processes
@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ENGINES)
def test_loaders_of_engines(where, tmp_path):
    world, engines, ways = ENGINES[where]
    run(world, tmp_path, (loaders_worker.loads, engines, None, ways))


@pytest.mark.processes
@pytest.mark.costly
def test_an_engine_of_four_ranks(tmp_path):
    kinds = ["grouped_heads", "replicated_heads", "padded_heads", "experts_transposed"]
    run(4, tmp_path, (loaders_worker.loads, [3, 0, 1, 2], kinds))
