"""Engines that are worlds of their own, by the interfaces of vLLM and verl."""

import subprocess
import sys

import pytest
import worlds_worker
from gloo import spawn
from processes import REPOSITORY, environment


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("job", ["groups", "streams", "vllm", "verl"])
def test_a_trainer_and_an_engine(job, tmp_path):
    spawn(worlds_worker.start, worlds_worker.TRAINERS + worlds_worker.WORKERS, str(tmp_path), job)


def test_a_rank_outside_of_the_group_is_named():
    from cute_sharding.integrations.groups import join

    with pytest.raises(ValueError, match="rank 4 is not a rank of a group of 4 processes"):
        join("127.0.0.1", 1, rank=4, size=4)


def test_nothing_is_imported_before_it_is_asked_for():
    program = (
        "import sys, cute_sharding.dtensor, cute_sharding.tools;"
        "assert not any('integrations' in name for name in sys.modules if 'cute' in name)"
    )
    subprocess.run(
        [sys.executable, "-c", program], env=environment(str(REPOSITORY)), check=True, timeout=100
    )
