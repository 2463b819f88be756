"""One fake process group of eight ranks for all tests of the adapter, and torch's own rules in
force at the start of each.
"""

import os
import re
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding

# Of a test's parameters, make test runs one in so many, and says how many it has left out: these
# tests compile and start processes, and on a slow machine all of them take half an hour. make
# thorough, and make releases, run all. Which ones is a matter of their names alone.
ONE_IN = 1 if os.environ.get("CUTE_SHARDING_THOROUGH") == "1" else 5


def pytest_collection_modifyitems(config, items):
    folder = Path(__file__).parent
    tests = defaultdict(list)
    for item in items:
        if folder in item.path.parents:
            tests[item.path, getattr(item, "originalname", item.name)].append(item)
    named = [str(argument) for argument in config.args if "::" in str(argument)]
    left_out = set()
    for parameters in tests.values() if not named else ():
        ordered = sorted(parameters, key=lambda item: crc32(item.name.encode()))
        left_out |= {*ordered[-(-len(ordered) // ONE_IN) :]}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def process_group():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def stock_rules():
    cute_sharding.disable()
    cute_sharding.reset_stats()
    yield
    cute_sharding.disable()


REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A search path with which the package looks installed to another process: the metadata alone,
    with the entry points of pyproject.toml, and this repository.
    """
    text = (REPOSITORY / "pyproject.toml").read_text()
    section = re.search(r'\[project\.entry-points\."torch\.backends"\]\n(.*?)\n\n', text, re.S)[1]
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "cute_sharding-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cute-sharding\nVersion: 0.1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\n" + section.replace('"', "") + "\n"
    )
    return os.pathsep.join([str(folder), str(REPOSITORY)])
