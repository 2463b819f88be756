"""Redistribution between meshes: on real processes, where each rank sees its own."""

import across_worker
import pytest
from gloo import run

pytestmark = pytest.mark.processes


@pytest.mark.one_in(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("prepared", [False, True])
def test_drawn_pairs_of_meshes(world, prepared, share, tmp_path):
    run(world, tmp_path, (across_worker.across, 0, share(300, 4), prepared))
