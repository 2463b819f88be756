"""``plan_step`` and the command: plans from a process of their own."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cute_sharding import StepPlan, estimate, plan_step
from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs.plan import PlannedWeight, Totals
from cute_sharding.tools.cli import main

FILE = Path(__file__).parent / "planned_steps.py"
STEP = f"{FILE}:few_rows"


def test_the_command_places_weights_and_weighs_seconds(capsys, tmp_path):
    saved = tmp_path / "plan.json"
    command = f"plan-step {STEP} --mesh 4 --device cpu --free parameters --network nvlink"
    assert main(shlex.split(f"{command} --each-line --save {saved} --json")) == 0
    printed, plan = json.loads(capsys.readouterr().out), StepPlan.load(saved)
    assert StepPlan.of_json(json.dumps(printed)) == plan
    assert plan.placements == {"up": "[S(0)]", "down": "[S(1)]"}
    assert [*plan.totals] == ["PyTorch", "op by op", "as written", "planned", "bound"]
    seconds = {name: total.seconds for name, total in plan.totals.items()}
    assert seconds["bound"] == pytest.approx(seconds["planned"])
    assert seconds["planned"] < seconds["as written"] < seconds["PyTorch"]
    assert "up    (64, 16)  [R] -> [S(0)]" in str(plan)
    assert [*plan.alone] == [*plan.changed()] and ", alone " in str(plan)


@pytest.mark.parametrize("network", [None, "nvlink"], ids=str)
def test_gradients_that_a_list_reads_are_reduced_together(network):
    plan = plan_step(f"{FILE}:many_weights", (4,), network=network, beside_pytorch=False)
    by_op, planned = plan.totals["op by op"], plan.totals["planned"]
    assert planned.collectives == 2  # one of them of the loss
    assert planned.received < by_op.received
    assert network is None or plan.totals["bound"].seconds <= planned.seconds < by_op.seconds


def test_errors_come_back_from_the_process():
    with pytest.raises(MemoryLimitError) as raised:
        plan_step(STEP, (4,), device="cpu", memory_limit=1000, beside_pytorch=False)
    assert raised.value.limit == 1000 < raised.value.least
    with pytest.raises(ValueError, match="no op of the step is on that line"):
        plan_step(STEP, (4,), device="cpu", fixed="model.py:1", beside_pytorch=False)


def test_an_estimate_shows_what_is_planned(capsys, tmp_path):
    """Also where a plan places weights, which the program itself does not."""
    placed = plan_step(STEP, (4,), device="cpu", free="parameters", beside_pytorch=False)
    found = estimate(STEP, (4,), device="cpu", settings=["PyTorch"], plan=placed)
    stock, run = found.runs
    total, (hold, held) = placed.totals["planned"], (stock.memory, run.memory)
    assert (run.setting, run.failure) == ("planned", None)
    assert (run.step.busiest_bytes, run.step.collectives) == (total.received, total.collectives)
    assert 4 * held.by_kind()["parameters"] == hold.by_kind()["parameters"]
    assert found.seconds(run) < found.seconds(stock) and found.best is run
    saved = tmp_path / "plan.json"
    replace(placed, weights=()).save(saved)
    command = f"estimate {STEP} --mesh 4 --device cpu --settings all --plan {saved} --json"
    assert main(shlex.split(command)) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    figures = [settings[name]["busiest_bytes"] for name in ("all", "planned")]
    assert [*settings] == ["all", "planned"]
    assert figures[0] == figures[1] == placed.totals["op by op"].received  # no weight is known


def test_a_plan_of_other_weights_or_without_a_step_is_told():
    weight = PlannedWeight("up", (3, 3), "[R]", "[S(0)]")
    totals = {"planned": Totals(0, 0)}
    plan = StepPlan("steps.py:step", (4,), None, (), (), (), totals, weights=(weight,))
    (run,) = estimate(STEP, (4,), device="cpu", settings=["all"], plan=plan).runs[1:]
    assert "the plan places 1 weight, and the step makes 2, or other shapes" in run.failure
    (run,) = estimate(f"{FILE}:no_step", (4,), device="cpu", settings=["all"], plan=plan).runs[1:]
    assert "it returns nothing: return the step as a function" in run.failure


@pytest.mark.parametrize("mesh", [(2, 2), {"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_a_plan_of_another_mesh_is_refused(mesh, tmp_path, capsys):
    plan = StepPlan("steps.py:step", (4,), None, (), (), (), {"planned": Totals(0, 0)})
    with pytest.raises(
        ValueError, match=r"plan is of a step on mesh \(4\), and the estimate is on"
    ):
        estimate(STEP, mesh, device="cpu", plan=plan)
    assert main(shlex.split(f"estimate {STEP} --mesh 4 --plan {tmp_path}/none.json")) == 2
    assert "none.json: [Errno 2]" in capsys.readouterr().err


def test_only_parameters_are_free():
    with pytest.raises(ValueError, match='write free="parameters"'):
        plan_step(STEP, (4,), free="inputs")
