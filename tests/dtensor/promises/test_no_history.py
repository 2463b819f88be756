"""What an op does is decided by the op, how its operands lie, the settings and the release of
torch: not by what ran before, nor by what a cache holds, nor by what one rank has done alone.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import no_history_worker
import pytest
from gloo import run
from processes import search_path

import cute_sharding
from cute_sharding.dtensor.bookkeeping import kept

HERE = Path(__file__).parents[1]
SETTINGS = {
    "views": {},
    "everything": {"redistribution": True, "movement": True},
    "cheapest": {"implicit_redistribution": "cheapest"},
}
PROGRAMS = 8


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(375)
@pytest.mark.parametrize("first", range(0, 1000, PROGRAMS))
@pytest.mark.parametrize("name", SETTINGS)
def test_programs_do_the_same_whatever_ran_before(name, first):
    """Each in a process of its own; after others, in either order; and with all caches emptied
    between any two ops.
    """
    command = [sys.executable, str(HERE / "no_history_worker.py"), json.dumps(SETTINGS[name])]
    done = subprocess.run(
        [*command, str(first), str(first + PROGRAMS)],
        env={**os.environ, "PYTHONPATH": search_path(HERE.parent, HERE, *filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    fresh = found.pop("fresh")
    assert sum(len(events) for events in fresh.values()) > 2 * PROGRAMS
    for how, events in found.items():
        assert {seed: events[seed] for seed in fresh} == fresh, how


@pytest.mark.processes
@pytest.mark.one_in(25)
@pytest.mark.parametrize("first", range(0, 200, 8))
def test_what_one_rank_looks_at_changes_nothing(first, tmp_path):
    run(4, tmp_path, *[(no_history_worker.looked_at, first, first + 8)])


@pytest.mark.costly
@pytest.mark.processes
def test_numbers_are_read_on_one_rank(tmp_path):
    run(4, tmp_path, (no_history_worker.numbers_read_alone,))


def test_everything_that_is_kept_is_in_the_list():
    """No module keeps anything else from one op to the next."""
    package = Path(cute_sharding.__file__).parent / "dtensor"
    found = set()
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found |= {f"{module}.{name}" for name in node.names}
        for node in tree.body:
            value = getattr(node, "value", None)
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not is_filled_later(value):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {f"{module}.{target.id}" for target in targets}
    assert found == {each.where for each in kept.TABLE}


def is_filled_later(value):
    """Whether something that may be changed is made there, and nothing is in it."""
    if isinstance(value, (ast.Dict, ast.List)):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    makers = ("dict", "list", "set", "defaultdict", "Counter", "local")
    if not isinstance(value, ast.Call):
        return False
    name = getattr(value.func, "attr", getattr(value.func, "id", ""))
    return name in makers or name.startswith("Weak")


def test_all_caches_are_found():
    caches = list(kept.caches())
    assert len(caches) > 40
    kept.empty()
    assert not any(cache.cache_info().currsize for cache in caches)
