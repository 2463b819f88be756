"""A transformer as a new user would write it trains unchanged under the flags, as on one device."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, search_path

PROGRAM = Path(__file__).parent.parent / "transformer_program.py"
SECONDS = 300


@pytest.mark.costly
@pytest.mark.one_in(8)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("by", ["heads", "sequence"])
@pytest.mark.parametrize("flag", ["USE_CUTE_VIEW_PROPAGATION", "USE_CUTE_SHARDING"])
def test_it_trains_as_one_device(flag, by, how):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), by, how],
        env=environment(search_path(), **{flag: "1", "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout.count("trains as one device") == 4, done.stderr[-4000:]
