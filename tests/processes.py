"""What the processes that tests start find."""

import os
from pathlib import Path

TESTS = Path(__file__).parent


def search_path(*folders):
    """PYTHONPATH for one, with what tests have it import first (children/sitecustomize.py)."""
    return os.pathsep.join(map(str, (*folders, TESTS / "children")))
