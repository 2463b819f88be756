"""What an op does is decided by the op, how its operands lie, the settings and the release of
torch: not by what ran before, nor by what a cache holds, nor by what one rank has done alone.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import compiled_strangers
import no_history_worker
import pytest
from gloo import run
from processes import search_path
from simulation import distribute, number, ranks_of
from stranger_programs import Sent
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.bookkeeping import kept
from cute_sharding.dtensor.replaced.local_tensors import parts_of

HERE = Path(__file__).parents[1]
SETTINGS = {
    "views": {},
    "everything": {"redistribution": True, "movement": True},
}
PROGRAMS, COMPILED = 8, 2


def assert_all_do_the_same(worker, *args):
    """What the worker prints of each program, by how it was run."""
    done = subprocess.run(
        [sys.executable, str(HERE / worker), *map(str, args)],
        env={**os.environ, "PYTHONPATH": search_path(HERE.parent, HERE, *filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    fresh = found.pop("fresh")
    assert sum(len(events) for events in fresh.values()) > 2 * len(fresh)
    for how, events in found.items():
        assert {seed: events[seed] for seed in fresh} == fresh, how


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(375)
@pytest.mark.parametrize("first", range(0, 1000, PROGRAMS))
@pytest.mark.parametrize("name", SETTINGS)
def test_programs_do_the_same_whatever_ran_before(name, first):
    """Each in a process of its own; after others, in either order; and with all caches emptied
    between any two ops.
    """
    settings = json.dumps(SETTINGS[name])
    assert_all_do_the_same("no_history_worker.py", settings, first, first + PROGRAMS)


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(150)
@pytest.mark.parametrize("first", range(0, 200, COMPILED))
@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_programs_are_the_same_whatever_ran_before(name, first):
    """Their graphs, as one rank has them: compiled in a process of its own; after others, each of
    these behind an eager program; and with all caches emptied before each decision.
    """
    rank, settings = first // COMPILED % 4, json.dumps(SETTINGS[name])
    last = first + COMPILED
    assert_all_do_the_same("compiled_history_worker.py", rank, settings, first, last)


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.one_in(150)
@pytest.mark.parametrize("first", range(0, 100, COMPILED))
@pytest.mark.parametrize("name", SETTINGS)
def test_compiled_programs_give_the_same_whatever_ran_before(name, first, tmp_path):
    """On gloo: in one order, and in the other."""
    seeds, found = [*range(first, first + COMPILED)], []
    for i, order in enumerate((seeds, seeds[::-1])):
        (folder := tmp_path / str(i)).mkdir()
        job = compiled_strangers.values, order, SETTINGS[name], str(folder / "values")
        run(2, folder, job)
        found.append([json.loads((folder / f"values-{rank}").read_text()) for rank in range(2)])
    assert found[0] == found[1]


@pytest.mark.processes
@pytest.mark.one_in(25)
@pytest.mark.parametrize("first", range(0, 200, 8))
def test_what_one_rank_looks_at_changes_nothing(first, tmp_path):
    run(4, tmp_path, *[(no_history_worker.looked_at, first, first + 8)])


@pytest.mark.costly
@pytest.mark.processes
def test_numbers_are_read_on_one_rank(tmp_path):
    run(4, tmp_path, (no_history_worker.numbers_read_alone,))


def test_steps_that_torch_has_searched_before_change_nothing():
    """torch's search for the steps of strided shards goes by way of states to which other tensors
    of this process were moved, as its own view rules move them.
    """

    def spec_of(x, *placements):  # as of a view
        given = x.device_mesh, placements, x._spec.tensor_meta
        return DTensorSpec(*given, use_strided_shard_as_shard_order=False)

    def moved():
        _redistribute._gen_transform_infos.cache_clear()
        with ranks_of((2, 2)), cute_sharding.enabled(), Sent() as sent:
            x = distribute(number((8, 6)), (2, 2), [Shard(0), _StridedShard(0, split_factor=2)])
            x = DTensor(x._local_tensor, spec_of(x, *x.placements), requires_grad=False)
            whole = x.redistribute(placements=[Replicate(), Replicate()])._local_tensor
            assert all((part == number((8, 6))).all() for part in parts_of(whole).values())
        return sent.events, x

    _redistribute.clear_redistribute_planner_cache()
    before, x = moved()
    to = spec_of(x, Replicate(), _StridedShard(1, split_factor=2))
    _redistribute._gen_transform_infos(spec_of(x, Replicate(), Replicate()), to)
    assert moved()[0] == before


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
