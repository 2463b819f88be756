"""What enable says to torches other than those that were checked."""

import subprocess
import sys
import warnings

import pytest
import torch
from processes import REPOSITORY

import cute_sharding
from cute_sharding.dtensor.bookkeeping import versions


@pytest.fixture
def running(monkeypatch):
    """Another version of torch, in a process that has not been warned."""
    monkeypatch.setattr(versions, "_warned", False)
    return lambda version: monkeypatch.setattr(torch, "__version__", version)


def warnings_of(action):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [(warning.category, str(warning.message)) for warning in found]


def switch_often():
    for _ in range(3):
        cute_sharding.enable()
        with cute_sharding.enabled(redistribution=True):
            assert cute_sharding.is_enabled()
        cute_sharding.disable()


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0", (2, 13)),
        ("2.15.0+cu132", (2, 15)),
        ("2.15.0a0+git1234567", (2, 15)),
        ("2.16.0a0+git", (2, 16)),
        ("2.16.0.dev20260101+cpu", (2, 16)),
        ("3.0", (3, 0)),
        ("main", None),
    ],
)
def test_versions_are_read(running, version, release):
    running(version)
    assert versions.release() == release


def test_this_torch_was_checked(running):
    assert warnings_of(switch_often) == []


@pytest.mark.parametrize("version", ["2.13.0", "2.14.1", "2.15.0+cu132", "2.15.0a0+git1234567"])
def test_checked_versions_are_not_warned_of(running, version):
    running(version)
    assert warnings_of(switch_often) == []


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git", "3.0.0", "main"])
def test_newer_ones_are_warned_of_once_in_a_process_and_go_on(running, version):
    running(version)
    [(category, message)] = warnings_of(switch_often)
    assert category is RuntimeWarning
    assert "PyTorch 2.13 to 2.15" in message and f"PyTorch {version}" in message


def test_the_warning_points_at_who_enables(running):
    running("2.16.0")
    with pytest.warns(RuntimeWarning) as found:
        cute_sharding.enable()
    assert found[0].filename == __file__


@pytest.mark.parametrize("version", ["2.12.1", "2.9.0+cpu", "1.13.1"])
def test_older_ones_are_refused_and_nothing_changes(running, version):
    running(version)
    with pytest.raises(RuntimeError, match=rf"PyTorch 2\.13 to 2\.15.*PyTorch {version[:3]}"):
        cute_sharding.enable()
    assert not cute_sharding.is_enabled()
    cute_sharding.disable()


def test_older_ones_are_refused_by_name_though_they_lack_what_the_adapter_imports():
    program = """
import torch
import torch.distributed.tensor._ops._view_ops as rules
torch.__version__ = "2.9.1"
del rules.propagate_shape_and_sharding
import cute_sharding
cute_sharding.enable()
"""
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert found.returncode and found.stderr.strip().splitlines()[-1].startswith(
        "RuntimeError: cute_sharding works with PyTorch 2.13 to 2.15, but PyTorch 2.9.1 is"
    ), found.stderr
