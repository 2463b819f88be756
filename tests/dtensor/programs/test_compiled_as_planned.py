"""Compiled graphs run as planned, forward and backward, and compute what an eager program does."""

import compiled_as_planned as programs
import pytest
import torch
from gloo import run
from simulation import mesh_of

import cute_sharding
from cute_sharding import planned
from cute_sharding.dtensor.programs.planned import plan_in_force
from cute_sharding.tools.steps.__main__ import planned_step

SIZES = (2, 2)


@pytest.fixture(autouse=True)
def everything():
    with cute_sharding.enabled(redistribution=True, movement=True):
        yield
    torch._dynamo.reset()


def plan_of(step):
    return planned_step(step, mesh_of(SIZES), device="cpu")


def sent_by(step):
    """The collectives of a second step."""
    step()
    with cute_sharding.profile() as sent:
        step()
    return [one for line in sent.lines for one in line.collectives if one.op != "barrier"]


def received(step):
    """In a second step."""
    return sum(one.most * one.itemsize for one in sent_by(step))


@pytest.mark.parametrize("body", programs.BODIES, ids=lambda body: body.__name__)
def test_graphs_receive_what_the_plan_says(body):
    plan = plan_of(programs.step_of(body))
    by_op, as_planned = plan.totals["op by op"].received, plan.totals["planned"].received
    step = programs.step_of(body, "aot_eager")(mesh_of(SIZES))
    with planned(plan):
        assert received(step) == as_planned < by_op
        assert len(sent_by(step)) == plan.totals["planned"].collectives


def test_a_graph_is_of_one_plan():
    """Outside of the block, and in a block with another plan, programs are compiled anew."""
    body = programs.BODIES[0]
    plan = plan_of(programs.step_of(body))
    nothing = cute_sharding.StepPlan("", SIZES, None, (), (), (), {})
    step = programs.step_of(body, "aot_eager")(mesh_of(SIZES))
    before = received(step)
    with planned(plan):
        as_planned = received(step)
        with planned(nothing):
            assert received(step) == before
        assert received(step) == as_planned
    assert received(step) == before > as_planned
    assert plan_in_force() is None


def test_a_block_with_the_same_plan_compiles_nothing_anew():
    plan = plan_of(programs.step_of(programs.BODIES[0]))
    step = programs.step_of(programs.BODIES[0], "aot_eager")(mesh_of(SIZES))
    with planned(plan):
        step()
        with planned(plan), torch.compiler.set_stance("fail_on_recompile"):
            step()
        with torch.compiler.set_stance("fail_on_recompile"):
            step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", programs.BODIES, ids=lambda body: body.__name__)
def test_a_graph_of_any_batch_size_is_decided_op_by_op(body):
    """A plan is of one batch size."""
    plan = plan_of(programs.step_of(body))
    step = programs.step_of(body, "aot_eager", dynamic=True)(mesh_of(SIZES))
    before = received(step)
    with planned(plan):
        assert received(step) == before


@pytest.mark.processes
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.costly)]
)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", programs.BODIES, ids=lambda body: body.__name__)
def test_compiled_steps_compute_what_one_device_does(body, backend, tmp_path):
    path = tmp_path / "plan.json"
    plan_of(programs.step_of(body)).save(path)
    run(4, tmp_path, (programs.compare, body.__name__, backend, str(path)))
