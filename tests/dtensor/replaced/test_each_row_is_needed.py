"""What is replaced in torch is needed: without a row, the test that it names fails."""

import os
import subprocess
import sys

import pytest
from processes import REPOSITORY, search_path

from cute_sharding.dtensor.replaced import patches

SECONDS = 900  # on the slowest of machines, with other work to do


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(len(patches.TABLE))
@pytest.mark.parametrize("row", patches.TABLE, ids=lambda row: row.name)
def test_its_test_fails_without(row):
    """In all processes that the test starts. (children/sitecustomize.py waits for an import, which
    pytest would do otherwise to rewrite assertions.)
    """
    options = ["-x", "-q", "-n", "0", "--one-in", "1", "-p", "no:cacheprovider", "--assert=plain"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, row.test],
        env={**os.environ, "PYTHONPATH": search_path(REPOSITORY), "WITHOUT_ROW": row.name},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1 and f"FAILED {row.test}" in done.stdout, done.stdout[-2000:]
