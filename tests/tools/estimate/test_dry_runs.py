"""Dry runs beside real ones: the same collectives and bytes of each line as over gloo, the same
memory as torch's own tracker counts, and what is said of programs that need values.
"""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import estimate_worker
import gloo
import pytest
from processes import REPOSITORY, search_path

import cute_sharding
from cute_sharding.tools.estimate.layers import DEPTHS, memory_of, traffic_of
from cute_sharding.tools.estimate.memory import Memory
from cute_sharding.tools.estimate.traffic import Traffic

TESTS = REPOSITORY / "tests"
HERE = Path(__file__).parent
PROGRAMS = HERE / "estimated_programs.py"


def dry(what, folder):
    """What the worker finds, in a process of its own."""
    result = folder / f"{what}.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "estimate_worker.py"), what, str(result)],
        env={**os.environ, "PYTHONPATH": search_path(REPOSITORY, TESTS, TESTS / "dtensor")},
        capture_output=True,
        text=True,
        timeout=gloo.SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.parametrize("sizes", estimate_worker.MESHES, ids=str)
def test_the_same_as_over_gloo(sizes, tmp_path):
    """Each line's collectives, and the bytes of this rank and of the busiest one."""
    world = prod(sizes)
    gloo.spawn(
        estimate_worker.measure, world, world, str(tmp_path / "meeting"), str(tmp_path), sizes
    )
    for at, (mesh, rank) in enumerate(estimate_worker.RANKS):
        if mesh != sizes:
            continue
        measured = json.loads((tmp_path / f"measured-{rank}.json").read_text())
        compared = received = 0
        for name, found in dry(str(at), tmp_path).items():
            for part, ours, theirs in zip(("setup", "step"), found, measured[name]):
                assert Traffic.from_data(ours) == Traffic.from_data(theirs), (name, rank, part)
                compared += 1
            received += Traffic.from_data(found[1]).received_bytes
        # Over one device of (4, 1) a model that is parallel over tensors alone sends nothing.
        assert compared == 2 * 3 * 5 and received > 0


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return dry("checks", tmp_path_factory.mktemp("checks"))


@pytest.mark.costly
def test_the_memory_is_what_torchs_tracker_counts(checks):
    assert len(checks["peaks"]) == 2
    for ours, torchs in checks["peaks"]:
        assert ours == torchs > 0


@pytest.mark.costly
def test_counted_layers_are_as_layers_that_are_run(checks):
    """Of FSDP and tensor parallelism with an optimizer, all but the last digit of nothing."""
    found = {int(n): one for n, one in checks["layers"].items()}
    for part in ("setup", "step"):
        some = {n: Traffic.from_data(found[n][part]) for n in DEPTHS}
        assert traffic_of(7, some) == Traffic.from_data(found[7][part])
    held = {n: Memory.of(one["memory"]) for n, one in found.items()}
    grown = memory_of(7, {n: held[n] for n in DEPTHS})
    assert grown.to_dict() == held[7].to_dict()
    assert grown.by_kind()["optimizer"] > grown.by_kind()["parameters"] > 0


@pytest.mark.costly
def test_what_needs_values_is_told_where(checks):
    error = checks["reads_a_value"]["error"]
    assert "leave out of the step what reads a value" in error["text"]
    file, line, _ = error["place"]
    assert Path(file) == PROGRAMS and ".item()" in PROGRAMS.read_text().splitlines()[line - 1]
    error = checks["raises"]["error"]
    assert error["text"] == "ValueError: there is no such model" and error["place"][2] == "raises"


@pytest.mark.costly
def test_a_function_may_be_the_step_and_make_meshes(checks):
    alone, meshes = checks["runs_by_itself"], checks["makes_a_mesh"]
    assert alone["error"] is meshes["error"] is None
    assert alone["setup"] == meshes["setup"] == []
    assert [Traffic.from_data(each["step"]).collectives for each in (alone, meshes)] == [1, 1]


@pytest.mark.costly
def test_an_op_that_torch_takes_apart_for_its_rule_runs(checks):
    found = checks["takes_an_op_apart"]
    assert found["error"] is None and Traffic.from_data(found["step"]).collectives == 1


@pytest.mark.costly
def test_a_parameter_may_be_frozen(checks):
    found = checks["has_a_frozen_parameter"]
    assert found["error"] is None and Traffic.from_data(found["step"]).collectives > 0
    assert Memory.of(found["memory"]).by_kind()["parameters"] > 0


@pytest.mark.costly
def test_a_process_for_each_setting():
    """Layers that each send more are all run; and the rest of the way from a function to text."""
    found = cute_sharding.estimate(
        f"{PROGRAMS}:grows_unevenly", (4,), layers=5, settings=("PyTorch", "all"), device="cpu"
    )
    stock, ours = found.runs
    assert stock.step.collectives == ours.step.collectives == 25 and not stock.counted
    assert "5 layers, all of which were run" in str(found)
    assert stock.causes == ours.causes
    with pytest.raises(ImportError, match="has no function 'nothing'"):
        cute_sharding.estimate(f"{PROGRAMS}:nothing", (4,), settings=("PyTorch",))
