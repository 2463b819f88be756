"""The pages a user reads are true: their examples run, and the generated ones are what the
code says.
"""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/how-it-works.md", "docs/redistribution.md", "docs/ops.md"]
)
def test_examples_run(page):
    failed, attempted = doctest.testfile(str(ROOT / page), module_relative=False)
    assert attempted >= 4
    assert failed == 0


@pytest.mark.parametrize("generator", ["generate_rules.py", "generate_gallery.py"])
def test_generated_pages_are_up_to_date(generator):
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / generator), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
