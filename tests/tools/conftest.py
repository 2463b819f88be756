"""As in tests/dtensor: a fake process group, and torch's own rules in force at first."""

import pytest


@pytest.fixture(autouse=True)
def adapter(process_group, stock_rules):
    pass
