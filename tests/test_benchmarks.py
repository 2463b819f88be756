"""Benchmarks: make bench-smallest runs all of them, and PyTorch's columns are PyTorch's."""

import os

import pytest

from benchmarks.__main__ import SMALLEST, commands
from benchmarks.sides import torch_alone, with_flags


def test_each_has_a_smallest_size():
    assert commands() == sorted(SMALLEST)


def flags():
    """Runs in a process of a side."""
    return {name for name in os.environ if name.startswith("USE_CUTE_")}, is_on()


def is_on():
    import sys

    if "cute_sharding" not in sys.modules:
        return None
    return sys.modules["cute_sharding"].is_enabled()


def imports_it():
    import cute_sharding

    return cute_sharding.__version__


@pytest.mark.costly
def test_sides(monkeypatch):
    monkeypatch.setenv("USE_CUTE_SHARDING", "1")
    with torch_alone(poses_as=(0, 2)) as torchs:
        assert torchs.call(flags) == [(set(), None)]
        with pytest.raises(RuntimeError, match="PyTorch alone has imported cute_sharding"):
            torchs.call(imports_it)
    with with_flags({"USE_CUTE_REDISTRIBUTION": "1"}, poses_as=(0, 2)) as here:
        assert here.call(flags) == [({"USE_CUTE_REDISTRIBUTION"}, True)]
