"""Checkpoints, state dicts, local tensors and pictures of tensors of any placements, over gloo."""

import pytest
import state_worker
from gloo import run

pytestmark = pytest.mark.processes


@pytest.mark.costly
@pytest.mark.parametrize("seed", [0, 1])
def test_checkpoints(seed, tmp_path):
    run(4, tmp_path, (state_worker.checkpoints, str(tmp_path), seed, 12))


def test_state_dicts(share, tmp_path):
    run(
        4,
        tmp_path,
        (state_worker.state_dicts, str(tmp_path)),
        (state_worker.on_meta, str(tmp_path)),
        (state_worker.round_trips, str(tmp_path), 0, share(20, 3)),
    )
