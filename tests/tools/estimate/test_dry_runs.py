"""Dry runs beside real ones: the same collectives and bytes of each line as over gloo, the same
memory as torch's own tracker counts, and what is said of programs that need values.
"""

import os
import pickle
import subprocess
import sys
from math import prod
from pathlib import Path

import estimate_worker
import gloo
import pytest
from estimated_programs import WIDTH
from processes import REPOSITORY, search_path

import cute_sharding
from cute_sharding.tools.estimate.values import DEPTHS, counted

TESTS = REPOSITORY / "tests"
HERE = Path(__file__).parent
PROGRAMS = HERE / "estimated_programs.py"


def dry(what, folder):
    """What the worker finds, in a process of its own."""
    result = folder / what
    done = subprocess.run(
        [sys.executable, str(HERE / "estimate_worker.py"), what, str(result)],
        env={**os.environ, "PYTHONPATH": search_path(REPOSITORY, TESTS, TESTS / "dtensor")},
        capture_output=True,
        text=True,
        timeout=gloo.SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(result.read_bytes())


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
        measured = pickle.loads((tmp_path / f"measured-{rank}").read_bytes())
        many = received = 0
        for name, found in dry(str(at), tmp_path).items():
            for part, ours, theirs in zip(("setup", "step"), found, measured[name]):
                assert ours == theirs, (name, rank, part)
                many += 1
            received += found[1].received_bytes
        # Over one device of (4, 1) a model that is parallel over tensors alone sends nothing.
        assert many == 2 * 3 * 5 and received > 0


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
    """Of FSDP and tensor parallelism with an optimizer."""
    found, wanted = checks["layers"], checks["layers"][7]
    grown = counted([found[n] for n in DEPTHS], 7)
    assert (grown.step, grown.setup) == (wanted.step, wanted.setup) and grown.counted
    assert grown.memory.by_layer() == wanted.memory.by_layer()
    kinds = grown.memory.by_kind()
    assert kinds == wanted.memory.by_kind() and kinds["optimizer"] > kinds["parameters"] > 0


@pytest.mark.costly
def test_what_needs_values_is_told_where(checks):
    failure = checks["reads_a_value"].failure
    assert "leave out of the step what reads a value" in failure
    line = int(failure.removeprefix(f"{PROGRAMS.name}:").partition(" ")[0])
    assert ".item()" in PROGRAMS.read_text().splitlines()[line - 1]
    assert checks["raises"].failure.endswith(" raises: ValueError: there is no such model")


@pytest.mark.costly
def test_what_runs(checks):
    """The function itself as the step, a mesh of its own, an op that torch takes apart for its
    rule, and a parameter that is frozen.
    """
    alone, meshes, apart, frozen = (
        checks[name]
        for name in (
            *("runs_by_itself", "makes_a_mesh", "takes_an_op_apart", "has_a_frozen_parameter"),
        )
    )
    assert [one.failure for one in (alone, meshes, apart, frozen)] == [None] * 4
    assert [one.step.collectives for one in (alone, meshes, apart)] == [1, 1, 1]
    assert alone.setup.rows == meshes.setup.rows == {}
    assert frozen.step.collectives > 0 and frozen.memory.by_kind()["parameters"] > 0


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


def test_weights_in_no_module_are_parameters():
    """Their bytes, those of their gradients (of which torch keeps one whole), and of AdamW's two
    averages and steps.
    """
    found = cute_sharding.estimate(f"{PROGRAMS}:weights_alone", (4,), settings=["PyTorch"])
    held = found.runs[0].memory.by_kind()
    weights = 4 * (WIDTH + WIDTH * WIDTH // 4)
    assert held["parameters"] == weights
    assert held["gradients"] == 4 * (WIDTH + WIDTH * WIDTH)
    assert held["optimizer"] == 2 * weights + 2 * 4


def test_gpus_norm_by_one_kernel_and_update_all_weights_at_once():
    ops = {}
    for device in ("cpu", "cuda"):
        plan = cute_sharding.plan_step(
            f"{PROGRAMS}:weights_alone", (4,), device=device, beside_pytorch=False
        )
        ops[device] = {op.op for op in plan.ops}
    kernels = {
        "aten._fused_rms_norm.default",
        "aten._fused_rms_norm_backward.default",
        "aten._foreach_addcdiv_.ScalarList",
    }
    assert kernels <= ops["cuda"] and not kernels & ops["cpu"]
