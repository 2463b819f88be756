"""A step with clipped gradients, on processes: what it receives is what the plan says."""

import clipped_as_planned as programs
import pytest
from gloo import run
from simulation import mesh_of

import cute_sharding
from cute_sharding.tools.steps.__main__ import planned_step


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_what_is_received_is_what_the_plan_says(sizes, tmp_path):
    path = tmp_path / "plan.json"
    with cute_sharding.enabled(redistribution=True, movement=True):
        plan = planned_step(programs.training, mesh_of(sizes), device="cpu")
    assert plan.totals["planned"] == plan.totals["bound"]
    plan.save(path)
    run(4, tmp_path, (programs.compare, sizes, str(path)))
