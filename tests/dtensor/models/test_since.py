"""Only what has changed is sent, and what is written to is as if all had been."""

import pytest
import since_worker
from gloo import run


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("prepared", [False, True])
def test_drawn_updates(prepared, share, tmp_path):
    run(4, tmp_path, (since_worker.drawn_updates, 0, share(120, 10), prepared))


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_programs(tmp_path):
    run(4, tmp_path, *[(program,) for program in since_worker.PROGRAMS])
