"""The loop of examples/engine.py, which starts its processes itself."""

import subprocess
import sys

import pytest
from processes import REPOSITORY, environment


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.costly
def test_the_engine_says_what_one_device_does_at_every_step():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "engine.py")],
        env=environment(str(REPOSITORY), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("20 steps: logits as on one device")
    assert "receives 18,432 bytes of the 34,560 of whole tensors" in line
