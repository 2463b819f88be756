"""The pytest fixture ``no_communication``, which an entry point makes known (pyproject.toml)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def no_communication() -> Iterator[None]:
    """Nothing may be sent in the test: :func:`cute_sharding.no_communication` around it."""
    import cute_sharding

    with cute_sharding.no_communication():
        yield
