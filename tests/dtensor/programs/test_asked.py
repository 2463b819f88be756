"""What a program asks of DTensors by their placements is part of its plan, forward and backward.
What is received as planned is the bound, and values are those of a run without a plan.
"""

import pytest
import torch
import torch.nn.functional as F
from simulation import distribute, mesh_of, number, ranks_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import cute_sharding
from cute_sharding import StepPlan, planned
from cute_sharding.dtensor.programs.ways import standard
from cute_sharding.dtensor.replaced.local_tensors import parts_of
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, TensorMeta
from cute_sharding.tools.steps.__main__ import planned_step

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture(autouse=True)
def everything():
    with cute_sharding.enabled(redistribution=True, movement=True):
        yield


def on_last(mesh, placement):
    """Replicas, but for the last mesh dim."""
    return [R] * (mesh.ndim - 1) + [placement]


# -- programs: a loss of an input and two weights --------------------------------------------------


def to_local_and_back(x, a, b, mesh):
    h = (x @ a).redistribute(placements=on_last(mesh, S0)).to_local().sin()
    return (DTensor.from_local(h, mesh, on_last(mesh, S0)) @ b).square().mean()


def gradients_by_hand(x, a, b, mesh):
    """The program says how the gradients of its local tensors lie."""
    rows, of_rows = x.redistribute(placements=on_last(mesh, S0)).to_local(), on_last(mesh, S0)
    whole = a.redistribute(placements=on_last(mesh, R))
    h = rows @ whole.to_local(grad_placements=on_last(mesh, P))
    h = DTensor.from_local(h, mesh, of_rows, grad_placements=of_rows)
    return (h @ b).square().mean()


def summands_by_hand(x, a, b, mesh):
    h = (x @ a).redistribute(placements=on_last(mesh, S1)).to_local()
    y = DTensor.from_local(h @ b.to_local(), mesh, on_last(mesh, P))
    return y.relu().square().mean()


def twice(x, a, b, mesh):
    h = x @ a
    one, two = (h.redistribute(placements=on_last(mesh, R)) for _ in range(2))
    return (one.sin() @ b + two.cos() @ b).square().mean()


def where_it_is(x, a, b, mesh):
    h = (x @ a).redistribute(placements=on_last(mesh, S1))
    h = h.redistribute(placements=on_last(mesh, S1)).relu()
    return (h @ b).redistribute(placements=on_last(mesh, R)).square().mean()


def full_tensors(x, a, b, mesh):
    y = (x @ a).relu() @ b
    return y.full_tensor().square().mean() + y.square().mean().full_tensor()


def in_half_precision(x, a, b, mesh):
    half = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.bfloat16}
    h = (x @ a).redistribute(placements=on_last(mesh, S0), **half)
    return (h.float().sin() @ b).square().mean()


def checkpointed(x, a, b, mesh):
    def block(x, a, b):
        h = (x @ a).redistribute(placements=on_last(mesh, S0)).relu()
        return (h @ b).redistribute(placements=on_last(mesh, R))

    return checkpoint(block, x, a, b, use_reentrant=False).square().mean()


def gradient_of_a_gradient(x, a, b, mesh):
    h = (x @ a).redistribute(placements=on_last(mesh, S0)).sin()
    loss = (h @ b).square().mean()
    (gradient,) = torch.autograd.grad(loss, [a], create_graph=True)
    return loss + gradient.square().sum()


def by_own_function(x, a, b, mesh):
    h = cute_sharding.redistribute(x @ a, mesh, on_last(mesh, S0)).sin()
    return (h @ b).square().mean()


def handed_out(x, a, b, mesh):
    """No copy is kept of what a rank may write to alone."""
    h = x @ a
    h.detach().to_local().amax()
    return (h.softmax(1) @ b).square().mean() + (h * h.amax(1, keepdim=True)).mean()


PROGRAMS = [
    to_local_and_back,
    gradients_by_hand,
    summands_by_hand,
    twice,
    where_it_is,
    full_tensors,
    in_half_precision,
    checkpointed,
    gradient_of_a_gradient,
    by_own_function,
    handed_out,
]


# -- programs: modules with the styles of tensor parallelism ---------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


# How the input lies, and the styles of a block's modules.
STYLES = {
    "columns and rows": (R, {"up": ColwiseParallel(), "down": RowwiseParallel()}),
    "sequence": (
        S1,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=S1),
            "down": RowwiseParallel(output_layouts=S1, use_local_output=False),
        },
    ),
    "prepared": (
        S0,
        {
            "norm": PrepareModuleInputOutput(
                input_layouts=S0,
                desired_input_layouts=R,
                use_local_input=True,
                output_layouts=R,
                desired_output_layouts=S0,
                use_local_output=False,
            ),
            "up": ColwiseParallel(input_layouts=S0),
            "down": RowwiseParallel(output_layouts=S0, use_local_output=False),
        },
    ),
}


def block(mesh, styles):
    found = Block()
    for weight in found.parameters():
        weight.data.copy_(number(weight.shape) / weight.numel() / 8)
    return parallelize_module(found, mesh, styles)


# -- what is received, and values ------------------------------------------------------------------


def step_of(loss, mesh, placed):
    """A step that returns the loss and its gradients."""
    shapes = {"x": (8, 8), "a": (8, 8), "b": (8, 8)}
    cuts = {"x": R, "a": S1, "b": S0}
    given = {
        name: placed(number(shape) / 50 - 0.5, on_last(mesh, cuts[name]))
        for name, shape in shapes.items()
    }

    def run():
        for x in given.values():
            x.grad = None
            x.requires_grad_()
        found = loss(*given.values(), mesh)
        found.backward()
        return [found, *[x.grad for x in given.values()]]

    return run


def module_step(cut, styles, mesh, placed):
    module, x = block(mesh, styles), placed(number((4, 8, 8)) / 50 - 0.5, [cut])

    def run():
        module.zero_grad()
        found = module(x.to_local() if cut == R else x).square().mean()
        found.backward()
        return [found, *[weight.grad for weight in module.parameters()]]

    return run


def dry(step):
    """As ``plan_step`` takes it."""
    return lambda mesh: step(mesh, lambda x, cut: distribute_tensor(x, mesh, cut))


def check(step, sizes):
    plan = planned_step(dry(step), mesh_of(sizes), device="cpu")
    by_op, as_planned, bound = (plan.totals[k] for k in ("op by op", "planned", "bound"))
    assert as_planned == bound
    assert as_planned.received <= by_op.received
    with ranks_of(sizes):
        mesh = mesh_of(sizes)

        def placed(x, cut):
            return distribute(x, sizes, cut)

        wanted = step(mesh, placed)()
        run = step(mesh, placed)
        with planned(plan):
            run()
            found = run()
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(on_each_rank(x), on_each_rank(y))
    return plan


def on_each_rank(x):
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return {rank: part.detach() for rank, part in parts_of(x).items()}


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda loss: loss.__name__)
def test_programs(loss, sizes):
    check(lambda mesh, placed: step_of(loss, mesh, placed), sizes)


@pytest.mark.parametrize("cut, styles", STYLES.values(), ids=STYLES)
def test_modules(cut, styles):
    check(lambda mesh, placed: module_step(cut, styles, mesh, placed), (4,))


@pytest.mark.parametrize(
    "view",
    [lambda h, mesh: h.t(), lambda h, mesh: h.redistribute(placements=h.placements)],
    ids=["view", "redistributed"],
)
def test_no_copy_is_kept_of_memory_that_is_handed_out(view):
    """Nor counted on."""

    def step(mesh, placed):
        x, a, b = (placed(number((8, 8)) / 50, [cut]) for cut in (R, S1, R))

        @torch.no_grad()
        def run():
            h = x @ a
            view(h, mesh).to_local().amax()
            return [h.softmax(1) @ b, h * h.amax(1, keepdim=True), h.cumsum(1)]

        return run

    plan = check(step, (4,))
    assert not any(any(op.keeps) for op in plan.ops)


def test_a_mesh_dim_of_one_device_is_no_choice():
    """Nothing is asked twice for it, or received on it, though weights are cut by it."""

    def step(mesh, placed):
        def cut(x, placements):
            return placed(x, [placements[0], *[S0] * (mesh.ndim - 2), placements[-1]])

        return step_of(twice, mesh, cut)

    meshes = [mesh_of(sizes) for sizes in [(2, 2), (2, 1, 2)]]
    of_two, of_three = (planned_step(dry(step), mesh, device="cpu") for mesh in meshes)
    assert of_three.totals == of_two.totals
    assert of_two.totals["planned"].received
    shape = TensorMeta(torch.Size((8, 8)), (8, 1), torch.float32)
    both = [DTensorSpec(mesh, (R,) * mesh.ndim, shape) for mesh in meshes]
    assert [len(standard(spec)) for spec in both] == [9, 9]


def test_evaluation():
    """Without gradients, what a redistribution is asked of may lie elsewhere."""

    def step(mesh, placed):
        x, a, b = (placed(number((8, 8)) / 50, on_last(mesh, cut)) for cut in (R, S1, S0))

        @torch.no_grad()
        def run():
            y = (x @ a).relu() @ b
            other = y.softmax(-1).redistribute(placements=on_last(mesh, S0))
            return y.full_tensor().argmax(-1), other.to_local()

        return run

    plan = check(step, (4,))
    assert plan.totals["planned"].received < plan.totals["op by op"].received


def test_a_program_that_looks_at_placements():
    """It goes on as without a plan, as RowwiseParallel does."""

    def step(mesh, placed):
        x, a, b = (placed(number((8, 8)) / 50, [cut]) for cut in (R, S1, S0))
        looked = []

        @torch.no_grad()
        def run():
            y = (x @ a).relu() @ b
            looked.append(y.placements)
            if y.placements != (S0,):
                y = y.redistribute(placements=[S0])
            assert looked[0] == (P,)
            return [y.softmax(-1) @ a]

        return run

    check(step, (4,))


def test_what_a_program_sends_by_itself_is_part_of_the_bound():
    """FSDP gathers weights and reduces gradients, without ops on DTensors."""

    def step(mesh):
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def run():
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    totals = planned_step(step, mesh_of((4,)), device="cpu").totals
    assert 0 < totals["planned"].received == totals["bound"].received


@pytest.mark.parametrize("before, after", [("[R]", "[S(0)]"), ("null", '"[S(0)]"')])
def test_local_tensors_lie_as_placements_say_whatever_a_plan_says(before, after):
    """Also of a plan that a person has changed, or of a program that did not ask for them."""

    def step(mesh, placed, local=False):
        x, a, b = (placed(number((8, 8)) / 50, [cut]) for cut in (R, S1, S0))

        def run():
            y = (x @ a).relu() @ b
            if local:
                y = DTensor.from_local(y.to_local(), mesh, y.placements)
            return [(y.softmax(1) @ a).full_tensor()]

        return run

    plan = planned_step(dry(step), mesh_of((4,)), device="cpu")
    ops = plan.to_json().partition('"ops"')
    with ranks_of((4,)):

        def placed(x, cut):
            return distribute(x, (4,), cut)

        mesh = mesh_of((4,))
        (wanted,) = step(mesh, placed)()
        for changed in (plan, StepPlan.of_json(ops[0] + ops[1] + ops[2].replace(before, after))):
            with planned(changed):
                (found,) = step(mesh, placed, local=True)()
            torch.testing.assert_close(on_each_rank(found), on_each_rank(wanted))
