"""Plans that place weights: steps that run so compute what one device does, and receive what the
plan says.
"""

import pytest
import torch
import torch.nn.functional as F
from op_programs import assert_close
from simulation import distribute, mesh_of, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_sharding
from cute_sharding import StepPlan, planned
from cute_sharding.dtensor.programs.weights import MakingWeights, Weights
from cute_sharding.dtensor.run.placements import checked_placements
from cute_sharding.exchange import MemoryLimitError
from cute_sharding.tools.steps.__main__ import planned_step
from cute_sharding.tools.steps.planning import CannotPlan

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(autouse=True)
def everything():
    with cute_sharding.enabled(redistribution=True, movement=True):
        yield


def plan_of(step, sizes=(4,), **how):
    """Read back from its text, as from a file."""
    found = planned_step(step, mesh_of(sizes), device="cpu", free="parameters", **how)
    assert StepPlan.of_json(found.to_json()) == found
    return found


def training(loss, weights, given, optimizer=None):
    """A step of AdamW."""
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1)

    def run():
        optimizer.zero_grad()
        loss(**weights, **given).backward()
        optimizer.step()

    return run


def step_of(loss, weights, given):
    """A step that makes weights and inputs of these shapes and placements."""

    def step(mesh):
        def made(shape, placements):
            return distribute_tensor(number(shape) / 99, mesh, list(placements))

        return training(
            loss,
            {name: torch.nn.Parameter(made(*of)) for name, of in weights.items()},
            {name: made(*of) for name, of in given.items()},
        )

    return step


def compare(loss, weights, given, plan, sizes=(4,)):
    """Two steps on all ranks, with the weights where the plan wants them, beside one device."""
    with plain():
        alone = {n: torch.nn.Parameter(number(shape) / 99) for n, (shape, _) in weights.items()}
        run = training(loss, alone, {n: number(shape) / 99 for n, (shape, _) in given.items()})
        run(), run()
    with ranks_of(sizes):

        def made(shape, placements):
            return distribute(number(shape) / 99, sizes, placements)

        placed = {}
        for name, (shape, _) in weights.items():
            to = checked_placements(plan.placements[name], shape, sizes, name)
            placed[name] = torch.nn.Parameter(made(shape, to))
        run = training(loss, placed, {n: made(*of) for n, of in given.items()})
        with planned(plan):
            run(), run()
        for name, x in placed.items():
            assert_close(x.detach(), alone[name].detach(), name)


def mlp(up, down, x):
    return (x + F.linear(F.gelu(F.linear(x, up)), down)).square().mean()


UP, DOWN = (32, 8), (8, 32)
REPLICATED = {"up": (UP, [R]), "down": (DOWN, [R])}
MEGATRON = {"up": (UP, [S0]), "down": (DOWN, [S1])}


def test_large_weights_of_few_rows_are_sharded():
    """Of a batch that each device has whole: each then has a part of the weights, and their
    gradients stay where they are.
    """
    given = {"x": ((4, 8), [R])}
    plan = plan_of(step_of(mlp, {"up": (UP, [S1]), "down": (DOWN, [S1])}, given))
    assert plan.placements == {"up": "[S(0)]", "down": "[S(1)]"}
    by_op, written, found, bound = (
        plan.totals[name] for name in ("op by op", "as written", "planned", "bound")
    )
    assert bound == found and found.received < written.received <= by_op.received
    compare(mlp, {"up": (UP, [S1]), "down": (DOWN, [S1])}, given, plan)


def test_small_weights_of_many_rows_are_gathered_or_whole():
    """What is read once forward and once backward would be gathered twice, and its gradient reduced
    to parts; of a whole one the gradient is reduced, which receives less.
    """
    given = {"x": ((512, 8), [S0])}
    plan = plan_of(step_of(mlp, MEGATRON, given))
    assert plan.totals["planned"].received < plan.totals["as written"].received
    assert plan.placements["down"] == "[R]" != plan.placements["up"]
    compare(mlp, MEGATRON, given, plan)


def test_no_device_multiplies_more_than_as_written():
    """A plan with whole weights and whole rows would receive nothing, and compute all everywhere:
    that the weights move does not make it what the program does.
    """
    given = {"x": ((4, 8), [R])}
    assert plan_of(step_of(mlp, MEGATRON, given)).totals["planned"].received > 0
    plan = plan_of(step_of(mlp, REPLICATED, given))
    assert plan.totals["planned"].received == 0  # it computes all everywhere as written


def test_equal_weights_are_told_apart():
    """And the plan then knows them by where they lie."""

    def loss(a, b, x):
        return (F.linear(x @ a, b)).square().sum()

    weights = {"a": ((8, 8), [R]), "b": ((8, 8), [R])}
    given = {"x": ((16, 8), [S1])}
    plan = plan_of(step_of(loss, weights, given))
    assert plan.placements["a"] == "[S(0)]" != plan.placements["b"]
    compare(loss, weights, given, plan)


def test_weights_keep_within_a_limit_of_memory():
    """With what AdamW keeps for them."""
    given = {"x": ((8, 8), [S0])}
    step = step_of(mlp, REPLICATED, given)
    with pytest.raises(MemoryLimitError) as raised:
        planned_step(step, mesh_of((4,)), device="cpu", memory_limit=100)
    limit = raised.value.least - 1
    plan = plan_of(step, memory_limit=limit)
    assert sum(weight.held_after for weight in plan.weights) < limit
    compare(mlp, REPLICATED, given, plan)


@pytest.mark.parametrize("sizes", [(2, 2)])
def test_on_two_mesh_dims(sizes):
    weights = {"up": (UP, [R, S0]), "down": (DOWN, [R, S1])}
    given = {"x": ((8, 8), [S0, R])}
    plan = plan_of(step_of(mlp, weights, given), sizes)
    assert plan.totals["planned"].received <= plan.totals["as written"].received
    assert plan.totals["planned"].received == plan.totals["bound"].received
    compare(mlp, weights, given, plan, sizes)


def test_a_plan_weighs_seconds_by_a_network():
    given = {"x": ((8, 8), [S0, R])}
    weights = {"up": (UP, [R, S0]), "down": (DOWN, [R, S1])}
    step = step_of(mlp, weights, given)
    with cute_sharding.enabled(redistribution=True, movement=True, network="infiniband,nvlink"):
        plan = plan_of(step, (2, 2), network="infiniband,nvlink")
        only = planned_step(step, mesh_of((2, 2)), device="cpu", network="infiniband,nvlink")
    assert plan.totals["planned"].seconds == pytest.approx(plan.totals["bound"].seconds)
    assert plan.totals["planned"].seconds <= plan.totals["as written"].seconds
    assert plan.totals["as written"] == only.totals["planned"]
    assert only.totals["planned"].seconds == pytest.approx(only.totals["bound"].seconds)
    assert " us " in str(only) and "bound" in str(only)
    compare(mlp, weights, given, plan, (2, 2))


# -- which weights ---------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8, bias=False)
        for layer in (self.up, self.down):
            for name, x in [*layer.named_parameters()]:
                layer.register_parameter(
                    name, torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [R]))
                )

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def test_weights_of_a_module_have_its_names():
    def step(mesh):
        model, x = Block(mesh), distribute_tensor(number((8, 8)), mesh, [S0])
        return lambda: model(x).sum().backward()

    plan = plan_of(step)
    assert [*plan.placements] == ["up.weight", "up.bias", "down.weight"]
    assert "up.weight    (32, 8)  [R] -> " in str(plan)


def test_weights_without_names_have_those_of_their_lines():
    class Run:
        def __init__(self, mesh):
            made = [distribute_tensor(number((8, 8)), mesh, [R]) for _ in "ab"]
            self.w = [*map(torch.nn.Parameter, made)]

        def __call__(self):
            (self.w[0] @ self.w[1]).sum().backward()

    names = [*plan_of(Run).placements]
    assert names[1] == f"{names[0]} (2)" and "test_weights.py:" in names[0]


def test_a_step_without_weights_says_so():
    def step(mesh):
        x = distribute_tensor(number((8, 8)), mesh, [S0])
        return lambda: x.sum()

    with pytest.raises(CannotPlan, match="make each weight a torch"):
        plan_of(step)


def test_a_weight_whose_placements_are_read_stays():
    def loss(up, down, x):
        return mlp(up, down, x if up.placements == (S1,) else x.exp())

    weights = {"up": (UP, [S1]), "down": (DOWN, [S1])}
    assert plan_of(step_of(loss, weights, {"x": ((4, 8), [R])})).placements["up"] == "[S(1)]"


def test_a_step_that_depends_on_where_weights_lie_says_so():
    def loss(up, down, x):
        return mlp(up, down, x if up._local_tensor.shape == (UP[0], UP[1] // 4) else x.exp())

    weights = {"up": (UP, [S1]), "down": (DOWN, [S1])}
    with pytest.raises(CannotPlan, match="runs other ops when its weights"):
        plan_of(step_of(loss, weights, {"x": ((4, 8), [R])}))


def test_weights_that_nobody_reads_stay():
    def step(mesh):
        a, b = (torch.nn.Parameter(distribute_tensor(number((8, 8)), mesh, [S0])) for _ in "ab")
        x = distribute_tensor(number((4, 8)), mesh, [R])

        def run():
            return (x @ a).sum(), b.shape

        return run

    assert plan_of(step).placements["b"] == "[S(0)]"


def test_weights_stay_the_same_objects():
    made = MakingWeights(lambda: None)
    mesh = mesh_of((4,))
    with made:
        kept = [torch.nn.Parameter(distribute_tensor(number((8, 8)), mesh, [R])) for _ in "ab"]
        with torch.no_grad():
            kept[0].mul_(2)  # is not made again
        distribute_tensor(number((8, 8)), mesh, [R])
    weights = made.weights()
    assert [*map(id, weights.tensors)] == [*map(id, kept)]
    weights.place([[S0], [S1]])
    assert [x.placements for x in kept] == [(S0,), (S1,)]
    assert isinstance(kept[0], DTensor) and isinstance(kept[0], torch.nn.Parameter)


def test_what_an_optimizer_keeps_is_known_by_its_weight():
    mesh = mesh_of((4,))
    w = torch.nn.Parameter(distribute_tensor(number((8, 8)), mesh, [R]))
    weights = Weights([w], [""])
    optimizer = torch.optim.AdamW([w])
    with weights.optimized():
        (w * w).sum().backward()
        optimizer.step()
    kinds = [key[2] for key in weights.alike()[0]]
    assert kinds == ["weight", "gradient", (0, "exp_avg"), (0, "exp_avg_sq")]
    assert weights.key()(optimizer.state[w]["exp_avg"]) == ("of a weight", 0, (0, "exp_avg"))
