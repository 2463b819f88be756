"""python -m cute_sharding status: in a process of its own, as a person runs it."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from processes import environment

import cute_sharding
from cute_sharding._settings import (
    EVERYTHING,
    FLAGS,
    RETIRED,
    TABLE,
    Settings,
    from_environment,
)
from cute_sharding.tools import status

ROOT = Path(__file__).parents[3]


def run(site, *arguments, **flags):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cute_sharding", "status", *arguments],
        env=environment(site, **flags),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.costly
@pytest.mark.parametrize(
    ("flags", "on", "code"),
    [
        ({}, None, 0),
        (
            {"USE_CUTE_SHARDING": "1"},
            {
                "views": True,
                "redistribution": True,
                "ops": True,
                "movement": True,
                "network": None,
            },
            0,
        ),
        (
            {
                "USE_CUTE_SHARDING": "1",
                "USE_CUTE_REDISTRIBUTION": "0",
                "USE_CUTE_OPS": "0",
                "USE_CUTE_NETWORK": "Infiniband, NVLink",
            },
            {
                "views": True,
                "redistribution": False,
                "ops": False,
                "movement": False,
                "network": "infiniband,nvlink",
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
        and found["flags"] == {flag: flags.get(flag) for flag in FLAGS}
    )
    assert [check["ours"] for check in found["checks"]] == [
        "right, and nothing is moved",
        "right, in 1 collective",
    ]
    assert bool(found["replaced"]) == (on is not None)
    if on:
        assert found["why"] == "switched on by the environment"
        assert (
            any(name.endswith("propagate_op_sharding_non_cached") for name in found["replaced"])
        ) == on["views"]
    page = (ROOT / "docs/lists/patches.md").read_text()
    assert {*found["replaced"]} <= {*re.findall(r"^## `(.*)`$", page, re.M)}
    assert f"replaces up to {found['replaceable']} objects of PyTorch" in page
    shown = run(site, **flags).stdout
    assert shown.startswith("off: " if on is None else "on: ")
    many = f"{len(found['replaced'])} of {found['replaceable']}"
    assert f"objects of torch that are replaced now: {many}\n" in shown
    assert shown.index("checks, all") < shown.index("\nflags\n") < shown.index(many)
    assert ("off: " in shown) == (on is None) and ("perhaps" in shown) == ("perhaps" in str(flags))


@pytest.mark.costly
def test_it_says_why_a_flag_has_come_to_nothing(site):
    result = run(site, USE_CUTE_SHARDING="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 1 and "off: torch has not asked for this package" in result.stdout


def test_it_leaves_the_settings_as_they_are():
    with cute_sharding.enabled(ops=False):
        before = cute_sharding.settings()
        found = status.status()
        assert cute_sharding.settings() == before and found["on"]["ops"] is False
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


NOTHING = dict.fromkeys(FLAGS, "")
[IMPLICIT] = RETIRED.values()
VIEWS, REDISTRIBUTION, OPS, MOVEMENT, NETWORK = (setting.flag for setting in TABLE.values())


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, None),
        ({EVERYTHING: "0"}, None),
        ({EVERYTHING: "on"}, {"redistribution": True, "movement": True}),
        ({EVERYTHING: "1", OPS: "off"}, {"redistribution": True, "ops": False}),
        ({EVERYTHING: "1", VIEWS: "0"}, {"views": False, "redistribution": True}),
        ({EVERYTHING: "1", REDISTRIBUTION: "no"}, {"movement": True}),
        ({EVERYTHING: "1", MOVEMENT: "0"}, {"redistribution": True}),
        ({EVERYTHING: "1", MOVEMENT: "1"}, {"redistribution": True, "movement": True}),
        ({MOVEMENT: "1"}, {"movement": True}),
        ({EVERYTHING: "0", VIEWS: "1"}, {}),
        ({EVERYTHING: "1", VIEWS: "0", REDISTRIBUTION: "0"}, None),
        ({EVERYTHING: "1", VIEWS: "0", MOVEMENT: "0"}, {"views": False, "redistribution": True}),
        *(({VIEWS: "1", IMPLICIT: value}, {}) for value in ("0", "1", "error", "nearest")),
        ({IMPLICIT: "cheapest"}, None),
        ({REDISTRIBUTION: "1", OPS: "1"}, {"views": False, "redistribution": True}),
        ({OPS: "1"}, None),
        ({VIEWS: "1", NETWORK: " flat:1e-6, 3.2E-10"}, {"network": "flat:1e-6,3.2e-10"}),
        ({VIEWS: "1", NETWORK: "off"}, {}),
        ({NETWORK: "nvlink"}, None),
    ],
    ids=str,
)
def test_what_the_flags_ask_for(flags, wanted):
    """``wanted``: what differs from `enable()`."""
    asked = from_environment({**NOTHING, **flags})
    if wanted is None:
        assert asked is None
        return
    assert asked == {**asdict(Settings()), **wanted}
    with cute_sharding.enabled(**asked):
        assert asdict(cute_sharding.settings()) == asked


def test_a_flag_that_nobody_knows_is_shown(monkeypatch):
    monkeypatch.setenv("USE_CUTE_MOVES", "1")
    monkeypatch.setenv(IMPLICIT, "error")
    found = status.status()
    assert found["unknown_flags"] == {"USE_CUTE_MOVES": MOVEMENT, IMPLICIT: None}
    shown = status.show({**found, "checks": []})
    assert f"no such flag: did you mean {MOVEMENT}?" in shown
    assert re.search(rf"{IMPLICIT} +has no effect", shown)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({EVERYTHING: "2"}, "USE_CUTE_SHARDING='2' is neither on nor off"),
        (
            {VIEWS: "1", NETWORK: "ethernet,nvlink"},
            "USE_CUTE_NETWORK='ethernet,nvlink' is not understood: write flat:ALPHA,BETA",
        ),
        ({NETWORK: "flat:-1,1"}, "USE_CUTE_NETWORK='flat:-1,1' is not understood"),
        (
            {MOVEMENT: "1", VIEWS: "0"},
            "USE_CUTE_MOVEMENT='1' does not work with USE_CUTE_VIEW_PROPAGATION='0': unset ",
        ),
    ],
)
def test_flags_that_make_no_sense_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        from_environment({**os.environ, **NOTHING, **flags})
    assert not status.is_well({"flags": flags, "on": None, "checks": []})


@pytest.mark.parametrize("flag", FLAGS)
def test_only_flags_that_switch_something_on_ask_for_it(flag):
    """That alone, and as by default, is well of a flag that says how others act; one that is
    set to nonsense asks for something, whatever it is.
    """
    found = {"flags": {flag: "1"}, "on": None, "checks": []}
    assert status.is_well({**found, "flags": {flag: "nvlink" if flag == NETWORK else "1"}}) == (
        flag in (OPS, NETWORK)
    )
    assert status.is_well({**found, "flags": {flag: "0"}})
    assert not status.is_well({**found, "flags": {flag: "nonsense"}})


@pytest.mark.parametrize("switch", [cute_sharding.enable, cute_sharding.enabled])
def test_arguments_are_the_settings(switch):
    arguments = inspect.signature(switch).parameters.values()
    defaults = {argument.name: argument.default for argument in arguments}
    assert defaults == asdict(Settings()) | dict.fromkeys(RETIRED)
    described = inspect.getdoc(cute_sharding.enable)
    assert all(re.search(rf"^ +{name}: ", described, re.M) for name in TABLE)


def test_settings_that_differ_have_keys_that_differ():
    """Of compiled graphs on disk: all combinations there are."""
    values = [setting.values for setting in TABLE.values()]
    found = [Settings(*combination) for combination in itertools.product(*values)]
    assert len(found) >= 16 and len({each.key for each in found}) == len(found)
