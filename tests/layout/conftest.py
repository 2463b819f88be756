import pytest


@pytest.fixture(scope="session")
def count(share):
    """How many cases of each operation another implementation is asked for."""
    return share(2000, 20)
