"""Checkpoints of any mesh into tensors on any other, on real processes."""

import checkpoint_programs
import checkpoints_worker
import pytest
from gloo import run


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_drawn_checkpoints(share, tmp_path):
    run(
        4,
        tmp_path,
        (checkpoints_worker.drawn, 0, share(160, 16), str(tmp_path)),
        (checkpoints_worker.drawn_files, 0, share(160, 16), str(tmp_path)),
    )


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_programs(tmp_path):
    run(
        4,
        tmp_path,
        *[(program, str(tmp_path / program.__name__)) for program in checkpoint_programs.PROGRAMS],
    )
