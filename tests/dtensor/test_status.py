"""python -m cute_sharding status: in a process of its own, as a person runs it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from test_imports import environment

import cute_sharding
from cute_sharding import _autoload, status


def run(site, *arguments, **flags):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cute_sharding", "status", *arguments],
        env=environment(site, **flags),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("flags", "on", "code"),
    [
        ({}, None, 0),
        (
            {"USE_CUTE_SHARDING": "1"},
            {
                "views": True,
                "redistribution": True,
                "implicit_redistribution": False,
                "ops": True,
                "movement": True,
            },
            0,
        ),
        (
            {
                "USE_CUTE_SHARDING": "1",
                "USE_CUTE_REDISTRIBUTION": "0",
                "USE_CUTE_IMPLICIT_REDISTRIBUTION": "Replicate",
                "USE_CUTE_OPS": "0",
            },
            {
                "views": True,
                "redistribution": False,
                "implicit_redistribution": "replicate",
                "ops": False,
                "movement": False,
            },
            0,
        ),
        ({"USE_CUTE_VIEW_PROPAGATION": "perhaps"}, None, 1),
    ],
    ids=str,
)
def test_it_says_what_is_on_and_checks_that_it_works(site, flags, on, code):
    result = run(site, "--json", **flags)
    assert result.returncode == code, result.stderr
    found = json.loads(result.stdout)
    assert (
        found["on"] == on
        and found["torch"] == torch.__version__
        and found["flags"] == {flag: flags.get(flag) for flag in status.FLAGS}
    )
    assert [check["ours"] for check in found["checks"]] == [
        "right, and nothing is moved",
        "right, in 1 collective",
    ]
    assert bool(found["replaced"]) == (on is not None)
    if on:
        assert found["why"] == "switched on by the environment"
        assert ("the sharding rule of aten.view.default" in found["replaced"]) == on["views"]
    shown = run(site, **flags).stdout
    assert ("\noff: " in shown) == (on is None) and ("perhaps" in shown) == (
        "perhaps" in str(flags)
    )


def test_it_says_why_a_flag_has_come_to_nothing(site):
    result = run(site, USE_CUTE_SHARDING="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 1 and "off: torch has not asked for this package" in result.stdout


def test_it_leaves_the_settings_as_they_are():
    with cute_sharding.enabled(implicit_redistribution="replicate"):
        before = cute_sharding.settings()
        found = status.status()
        assert (
            cute_sharding.settings() == before
            and found["on"]["implicit_redistribution"] == "replicate"
        )
        assert status.is_well({**found, "flags": {}}), found["checks"]
    assert cute_sharding.settings() is None


def test_a_check_that_fails_is_said():
    found = {
        "flags": {"USE_CUTE_SHARDING": None},
        "on": None,
        "checks": [{"what": "a view", "ours": "WRONG DATA", "torch": "right"}],
    }
    assert not status.is_well(found)
    assert status.is_well(
        {
            **found,
            "checks": [{"what": "a view", "ours": "right, and nothing is moved", "torch": "right"}],
        }
    )
    assert not status.is_well({"flags": {"USE_CUTE_SHARDING": "1"}, "on": None, "checks": []})


SETTINGS = ("views", "redistribution", "implicit_redistribution", "ops", "movement")
NOTHING = dict.fromkeys(status.FLAGS, "")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, None),
        ({_autoload.EVERYTHING_FLAG: "0"}, None),
        ({_autoload.EVERYTHING_FLAG: "on"}, (True, True, False, True, True)),
        (
            {_autoload.EVERYTHING_FLAG: "1", _autoload.OPS_FLAG: "off"},
            (True, True, False, False, False),
        ),
        ({_autoload.EVERYTHING_FLAG: "1", _autoload.FLAG: "0"}, (False, True, False, True, False)),
        (
            {_autoload.EVERYTHING_FLAG: "1", _autoload.REDISTRIBUTION_FLAG: "no"},
            (True, False, False, True, True),
        ),
        (
            {_autoload.EVERYTHING_FLAG: "1", _autoload.MOVEMENT_FLAG: "0"},
            (True, True, False, True, False),
        ),
        ({_autoload.MOVEMENT_FLAG: "1"}, (True, False, False, True, True)),
        ({_autoload.EVERYTHING_FLAG: "0", _autoload.FLAG: "1"}, (True, False, False, True, False)),
        (
            {
                _autoload.EVERYTHING_FLAG: "1",
                _autoload.FLAG: "0",
                _autoload.REDISTRIBUTION_FLAG: "0",
            },
            None,
        ),
        (
            {_autoload.FLAG: "1", _autoload.IMPLICIT_FLAG: " CHEAPEST "},
            (True, False, "cheapest", True, False),
        ),
        ({_autoload.FLAG: "1", _autoload.IMPLICIT_FLAG: "0"}, (True, False, False, True, False)),
    ],
    ids=str,
)
def test_what_the_flags_ask_for(flags, wanted):
    asked = _autoload.from_environment({**NOTHING, **flags})
    assert asked == (None if wanted is None else dict(zip(SETTINGS, wanted)))
    if asked is not None:
        with cute_sharding.enabled(**asked):
            on = cute_sharding.settings()
            assert tuple([getattr(on, name) for name in SETTINGS]) == wanted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({_autoload.EVERYTHING_FLAG: "2"}, "USE_CUTE_SHARDING='2' is neither on nor off"),
        (
            {_autoload.FLAG: "1", _autoload.IMPLICIT_FLAG: "1"},
            "USE_CUTE_IMPLICIT_REDISTRIBUTION='1' is none of cheapest, replicate and 0",
        ),
        (
            {_autoload.REDISTRIBUTION_FLAG: "1", _autoload.IMPLICIT_FLAG: "cheapest"},
            "says what views may do, and none are switched on: set USE_CUTE_VIEW_PROPAGATION=1",
        ),
        (
            {_autoload.MOVEMENT_FLAG: "1", _autoload.FLAG: "0"},
            "USE_CUTE_MOVEMENT='1' needs views and other ops as well",
        ),
    ],
)
def test_flags_that_make_no_sense_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        _autoload.from_environment({**os.environ, **NOTHING, **flags})
