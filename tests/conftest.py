"""Shared by all tests; its place also puts this folder on the path, for `import enumeration`."""

import os
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A search path with which the package looks installed to another process: the metadata alone,
    with the entry points of pyproject.toml, and this repository.
    """
    text = (REPOSITORY / "pyproject.toml").read_text()
    section = re.search(r'\[project\.entry-points\."torch\.backends"\]\n(.*?)\n\n', text, re.S)[1]
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "cute_sharding-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cute-sharding\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\n" + section.replace('"', "") + "\n"
    )
    return os.pathsep.join([str(folder), str(REPOSITORY)])
