"""A rank does not load the graph that another compiled for blocks of another size."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, environment, search_path

PROGRAM = Path(__file__).parents[1] / "graphs_on_disk.py"


@pytest.mark.costly
@pytest.mark.processes
def test_graphs_on_disk_are_of_one_rank(tmp_path):
    flags = {"USE_CUTE_SHARDING": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for rank in (0, 3):
        subprocess.run(
            [sys.executable, PROGRAM, str(rank)],
            env=environment(search_path(REPOSITORY), **flags),
            check=True,
            timeout=300,
        )
