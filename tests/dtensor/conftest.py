"""For all tests of the adapter: a fake process group, and torch's own rules in force at first."""

import pytest
import unmeasured

unmeasured.write_no_trace()


def pytest_collection_finish():
    unmeasured.time_no_guards()


@pytest.fixture(autouse=True)
def adapter(process_group, stock_rules):
    pass
