"""What the processes that tests start find."""

import os
from pathlib import Path

from cute_sharding._settings import FLAGS

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent


def search_path(*folders):
    """PYTHONPATH for one, with what tests have it import first (children/sitecustomize.py)."""
    return os.pathsep.join(map(str, (*folders, TESTS / "children")))


def environment(site, **flags):
    """The environment without flags of ours but these."""
    result = {
        name: value
        for name, value in os.environ.items()
        if name not in (*FLAGS, "TORCH_DEVICE_BACKEND_AUTOLOAD")
    }
    return {**result, "PYTHONPATH": site, **flags}
