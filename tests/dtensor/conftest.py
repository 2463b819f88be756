"""One fake process group of eight ranks for all tests of the adapter, and torch's own rules in
force at the start of each.
"""

from pathlib import Path

import pytest
import torch.distributed as dist
import unmeasured
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding

REPOSITORY = Path(__file__).parent.parent.parent

unmeasured.write_no_trace()


def pytest_collection_finish():
    unmeasured.time_no_guards()


@pytest.fixture(scope="session", autouse=True)
def process_group():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def stock_rules():
    cute_sharding.disable()
    cute_sharding.stats(reset=True)
    yield
    cute_sharding.disable()
