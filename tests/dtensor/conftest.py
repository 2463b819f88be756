"""One fake process group of eight ranks for all tests of the adapter, and torch's own rules in
force at the start of each.
"""

import os
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding

REPOSITORY = Path(__file__).parent.parent.parent

# Of a test's parameters, make test runs one in so many, and says how many it has left out: these
# tests compile and start processes, and on a slow machine all of them take half an hour. make
# thorough, and make releases, run all. Which ones is a matter of their names alone.
ONE_IN = 1 if os.environ.get("CUTE_SHARDING_THOROUGH") == "1" else 6


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
