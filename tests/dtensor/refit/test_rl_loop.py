"""The loop of examples/rl_loop.py, which starts its processes itself."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.costly
def test_the_generator_says_what_the_trainer_does_at_every_step():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "rl_loop.py")],
        env=environment(str(REPOSITORY), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("20 steps, ") and "its logits are the trainer's" in line
