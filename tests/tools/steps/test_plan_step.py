"""``plan_step`` and the command: plans from a process of their own."""

import json
import shlex
from pathlib import Path

import pytest

from cute_sharding import StepPlan, plan_step
from cute_sharding.exchange import MemoryLimitError
from cute_sharding.tools.cli import main

FILE = Path(__file__).parent / "planned_steps.py"
STEP = f"{FILE}:few_rows"


def test_the_command_places_weights_and_weighs_seconds(capsys, tmp_path):
    saved = tmp_path / "plan.json"
    command = f"plan-step {STEP} --mesh 4 --device cpu --free parameters --network nvlink"
    assert main(shlex.split(f"{command} --save {saved} --json")) == 0
    printed, plan = json.loads(capsys.readouterr().out), StepPlan.load(saved)
    assert StepPlan.of_json(json.dumps(printed)) == plan
    assert plan.placements == {"up": "[S(0)]", "down": "[S(1)]"}
    assert [*plan.totals] == ["PyTorch", "op by op", "as written", "planned", "bound"]
    seconds = {name: total.seconds for name, total in plan.totals.items()}
    assert seconds["bound"] == pytest.approx(seconds["planned"])
    assert seconds["planned"] < seconds["as written"] < seconds["PyTorch"]
    assert "up    (64, 16)  [R] -> [S(0)]" in str(plan)


def test_errors_come_back_from_the_process():
    with pytest.raises(MemoryLimitError) as raised:
        plan_step(STEP, (4,), device="cpu", memory_limit=1000, beside_pytorch=False)
    assert raised.value.limit == 1000 < raised.value.least
    with pytest.raises(ValueError, match="no op of the step is on that line"):
        plan_step(STEP, (4,), device="cpu", fixed="model.py:1", beside_pytorch=False)


def test_only_parameters_are_free():
    with pytest.raises(ValueError, match='write free="parameters"'):
        plan_step(STEP, (4,), free="inputs")
