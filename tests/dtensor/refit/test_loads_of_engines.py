"""Loads of engines on real processes."""

import load_worker
import loader_cases
import pytest
from gloo import run


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_drawn_loaders(share, tmp_path):
    run(6, tmp_path, (load_worker.drawn, 0, share(400, 40)))


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_programs(tmp_path):
    run(6, tmp_path, *[(program,) for program in load_worker.PROGRAMS])


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_what_loaders_do(tmp_path):
    run(1, tmp_path, *[(case,) for case in loader_cases.CASES])
