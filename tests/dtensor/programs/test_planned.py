"""Steps that run as planned compute what one device does, and receive what the plan says."""

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import residual_programs
import torch
import torch.nn.functional as F
from op_programs import assert_close
from processes import environment, search_path
from simulation import distribute, mesh_of, number, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from cute_sharding import StepPlan, planned
from cute_sharding.dtensor.replaced.op_schemas import clear_propagation_caches
from cute_sharding.tools.estimate import stand_ins
from cute_sharding.tools.profile.recorder import Recorder
from cute_sharding.tools.steps.__main__ import planned_step
from cute_sharding.tools.steps.planning import Planning

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(autouse=True)
def everything():
    with cute_sharding.enabled(redistribution=True, movement=True):
        yield


def plan_of(step, sizes):
    """Read back from its text, as from a file."""
    found = planned_step(step, mesh_of(sizes), device="cpu")
    clear_propagation_caches()  # where torch keeps sizes of one rank's local tensors
    assert StepPlan.of_json(found.to_json()) == found
    return found


def of_network(network):
    """A step of a drawn network, as ``plan_step`` takes it."""

    def step(mesh):
        given = residual_programs.distributed(network, mesh)

        def run():
            for x in given.values():
                x.grad = None
            network.step(given)

        return run

    return step


def received(run):
    """The bytes that a step receives."""
    with cute_sharding.profile() as sent:
        run()
    return sent.totals()["received_bytes"]


def compare(network, sizes, plan):
    """The network on all ranks, as planned, beside one device."""
    with plain():
        wanted, values = network.step(network.values())[1], network.values()
    with ranks_of(sizes):
        given = {name: distribute(x, sizes, network.placements[name]) for name, x in values.items()}
        with planned(plan):
            found = network.step(given)[1]
        for name, x in found.items():
            if wanted[name] is not None:
                assert_close(x, wanted[name], name)


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_networks_compute_what_one_device_does(seed):
    network = residual_programs.Network(seed, 1, by_width=seed % 2 == 1)
    plan = plan_of(of_network(network), (4,))
    by_op, as_planned, bound = (plan.totals[k] for k in ("op by op", "planned", "bound"))
    assert as_planned.received == bound.received <= by_op.received
    compare(network, (4,), plan)


@pytest.mark.costly
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(8, 20))
def test_drawn_networks_compute_what_one_device_does(seed, sizes):
    network = residual_programs.Network(seed, len(sizes), by_width=seed % 2 == 1)
    plan = plan_of(of_network(network), sizes)
    assert plan.totals["planned"].received <= plan.totals["op by op"].received
    compare(network, sizes, plan)


# -- what no op could choose alone -----------------------------------------------------------------


def norms(x):
    """A pending product that three ops read, each of which would reduce it."""
    h = x["a"] @ x["b"]
    return (h / h.norm(dim=1, keepdim=True)).sum() + h.amax(1).sum() + h.exp().mean()


def modulated(x):
    """A small sharded tensor that makes a large one sharded, which a later op needs whole."""
    scale, shift = (x["a"][:1] @ x["w"]).chunk(2, -1)
    return ((x["x"] * (1 + scale) + shift) @ x["v"]).square().sum()


def step_of(loss, placed):
    """A step that computes a loss and its gradients, and writes to its weights."""

    def step(mesh):
        given = {
            name: distribute_tensor(number(shape) / 50, mesh, list(placements))
            for name, (shape, placements) in placed.items()
        }
        return training(loss, given)

    return step


def training(loss, given):
    for x in given.values():
        x.requires_grad_()

    def run():
        loss(given).backward()
        with torch.no_grad():
            for x in given.values():
                x -= 0.01 * x.grad
                x.grad = None

    return run


PROGRAMS = {
    norms: {"a": ((4, 8), [S1]), "b": ((8, 6), [S0])},
    modulated: {
        "a": ((4, 8), [R]),
        "w": ((8, 16), [S1]),
        "x": ((12, 8), [R]),
        "v": ((8, 8), [R]),
    },
}


@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda loss: loss.__name__)
def test_less_is_received(loss):
    placed = PROGRAMS[loss]
    plan = plan_of(step_of(loss, placed), (4,))
    assert plan.totals["planned"].received < plan.totals["op by op"].received
    with plain():
        single = {name: number(shape) / 50 for name, (shape, _) in placed.items()}
        run = training(loss, single)
        run(), run()
    with ranks_of((4,)):
        given = {
            name: distribute(number(shape) / 50, (4,), placements)
            for name, (shape, placements) in placed.items()
        }
        run = training(loss, given)
        with planned(plan):
            run(), run()  # the second time of other values: no copy of the first is read
        for name, x in given.items():
            assert_close(x.detach(), single[name].detach(), name)


def test_another_batch_is_decided_op_by_op(caplog):
    placed = PROGRAMS[norms]
    plan = plan_of(step_of(norms, placed), (4,))
    with ranks_of((4,)), caplog.at_level(logging.INFO, "cute_sharding"):
        a, b = number((3, 8)) / 50, number((8, 6)) / 50
        given = {"a": distribute(a, (4,), [S1]), "b": distribute(b, (4,), [S0])}
        with planned(plan):
            found = norms(given)
            norms(given)
        assert_close(found, norms({"a": a, "b": b}), "norms")
    said = [record.message for record in caplog.records if "not in the plan" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("names", [("a",), None], ids=str)
def test_a_mesh_without_names_is_that_of_the_plan(names, caplog):
    """Of the plan, or of the program; a mesh with other names is another one."""

    def runs(names_of_plan, names_of_program):
        step = step_of(norms, PROGRAMS[norms])
        plan = planned_step(step, mesh_of((4,), names_of_plan), device="cpu")
        run = step(mesh_of((4,), names_of_program))
        run()
        caplog.clear()
        with caplog.at_level(logging.INFO, "cute_sharding"), planned(plan):
            run()
        return not any("not in the plan" in record.message for record in caplog.records)

    assert runs(names, names) and runs(names, None if names else ("a",))
    assert not runs(("a",), ("b",))


def test_a_value_is_no_number_that_an_op_is_given():
    """Numbers of values are counted from 0: one value is 1, and 1 is added to another."""

    def step(mesh):
        a, b = (distribute_tensor(number(shape), mesh, [S0]) for shape in ((4, 8), (8, 4)))
        return lambda: (a + b.t(), a + 0, a + 1, a + 2, a + a)

    plan = plan_of(step, (4,))
    assert sum(op.op == "aten.add.Tensor" for op in plan.ops) == 5


def test_a_slice_of_all_rows_is_the_tensor(caplog):
    """A graph takes it, as of positions for a sequence, where an eager program may not."""

    def step(mesh, rows=lambda x: x[:8].view(8, 8)):
        a, b = (distribute_tensor(number((8, 8)), mesh, [p]) for p in (S0, R))
        return lambda: (rows(a) @ b).amax(0)

    plan = plan_of(step, (4,))
    assert [op.op for op in plan.ops] == ["aten.mm.default", "aten.amax.default"]
    run = step(mesh_of((4,)), lambda x: x)
    with caplog.at_level(logging.INFO, "cute_sharding"), planned(plan):
        run()
    assert not [record for record in caplog.records if "not in the plan" in record.message]


def test_a_write_is_seen_by_what_reads_a_copy():
    """Also through a view of it, and between two reads of one step."""

    def program(w, x):
        y = x @ w
        z = x @ w.exp()
        with torch.no_grad():
            w[1:3] += 1
        return y + z + x @ w, w

    def step(mesh):
        w, x = (distribute_tensor(number((8, 8)), mesh, [S0]) for _ in "wx")
        return lambda: program(w, x)

    plan = plan_of(step, (4,))
    with plain():
        wanted = program(number((8, 8)), number((8, 8)))
    with ranks_of((4,)):
        w, x = (distribute(number((8, 8)), (4,), [S0]) for _ in "wx")
        with planned(plan):
            found = program(w, x)
        for y, expected in zip(found, wanted):
            assert_close(y, expected, "written")


def written(x):
    """Numbers written to slices, of a sharded dim too."""
    y = x["a"] * 2
    y[0] = 0.5
    y[:, 1] = 3
    y[1:3, ::2] = True
    return (y @ x["b"]).square().sum()


def test_numbers_that_are_written_to_slices_are_planned():
    placed = {"a": ((4, 8), [S0]), "b": ((8, 6), [S0])}
    plan = plan_of(step_of(written, placed), (4,))
    assert plan.totals["planned"] == plan.totals["bound"]
    values = {name: number(shape) / 50 for name, (shape, _) in placed.items()}
    with ranks_of((4,)):
        given = {name: distribute(x, (4,), placed[name][1]) for name, x in values.items()}
        with planned(plan):
            found = written(given)
        assert_close(found, written(values), "written")


def test_results_are_right_whatever_a_plan_says():
    """Of the plan of another program, or one that a person has changed."""
    plan = plan_of(step_of(norms, PROGRAMS[norms]), (4,))
    text = plan.to_json()
    for before, after in (("[R]", "[S(0)]"), ("[S(0)]", "[R]"), ("null", '"[R]"')):
        ops = text.partition('"ops"')
        changed = ops[0] + ops[1] + ops[2].replace(before, after)
        try:
            other = StepPlan.of_json(changed)
        except ValueError:
            continue
        with ranks_of((4,)):
            a, b = number((4, 8)) / 50, number((8, 6)) / 50
            given = {"a": distribute(a, (4,), [S1]), "b": distribute(b, (4,), [S0])}
            with planned(other):
                found = norms(given)
            assert_close(found, norms({"a": a, "b": b}), "norms")


def test_what_a_program_asks_for_keeps_its_placements():
    """Of ``to_local``, ``redistribute`` and ``full_tensor``."""

    def program(a, b):
        h = a @ b
        return h.to_local().shape, (h.relu().redistribute(placements=[S1]) * 2).placements

    def step(mesh):
        a, b = (distribute_tensor(number((8, 8)), mesh, [p]) for p in (S0, R))
        return lambda: program(a, b)

    plan = plan_of(step, (4,))
    with ranks_of((4,)):
        a, b = (distribute(number((8, 8)), (4,), [p]) for p in (S0, R))
        with planned(plan):
            assert program(a, b) == ((2, 8), (S1,))


# -- what travels together -------------------------------------------------------------------------


def averaged(mesh):
    """Gradients that are pending where AdamW reads them, in lists and more than once."""
    weights = [
        torch.nn.Parameter(distribute_tensor(number(shape) / 100, mesh, [R] * mesh.ndim))
        for shape in ((32, 8), (8, 32), (8,), (16, 8))
    ]
    x = distribute_tensor(number((8, 8)) / 100, mesh, [S0] * mesh.ndim)
    optimizer = torch.optim.AdamW(weights, lr=0.1, foreach=True)

    def run():
        up, down, bias, head = weights
        h = x + F.linear(F.gelu(F.linear(x, up)), down, bias)
        F.linear(h, head).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_what_lists_read_travels_together(sizes):
    plan = plan_of(averaged, sizes)
    count = plan.totals["planned"].collectives
    assert plan.totals["planned"] == plan.totals["bound"]
    assert count == 1 or sizes != (4,)
    with ranks_of(sizes):
        run = averaged(mesh_of(sizes))
        with CommDebugMode() as seen, planned(plan):
            run(), run()
        assert seen.get_total_counts() == 2 * count


@pytest.mark.parametrize("network", [None, "nvlink"], ids=str)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_the_price_of_a_solution_is_what_is_counted(sizes, network):
    recorder = Recorder()
    with (
        cute_sharding.enabled(redistribution=True, movement=True, network=network),
        stand_ins.Fakes(),
        recorder,
    ):
        planning = Planning(recorder, mesh_of(sizes), "", network=network)
        run = averaged(planning.mesh)
        run()
        asked = planning.asked(run)
        solved = planning.solved(asked)
        planned = planning.plan(run, asked, solved).totals["planned"]
    price = solved.price
    assert (price.received, price.collectives) == (planned.received, planned.collectives)
    assert network is None or price.seconds == pytest.approx(planned.seconds)


def test_operands_travel_together():
    """Which an op reads in other placements, with a copy that is kept and one that is not."""

    def step(mesh):
        a, b = (distribute_tensor(number(shape), mesh, [S0]) for shape in ((8, 8), (1, 8)))
        return lambda: (a + b) @ a.exp()

    plan = plan_of(step, (4,))
    for keeps, count in (((False, False), 2), ((True, False), 1)):
        ops = [
            replace(op.as_it_lies, reads=("[R]", "[R]"), keeps=keeps)
            if op.op == "aten.add.Tensor"
            else replace(op.as_it_lies, reads=("[R]",) * len(op.reads))
            for op in plan.ops
        ]
        with ranks_of((4,)):
            a, b = (distribute(number(shape), (4,), [S0]) for shape in ((8, 8), (1, 8)))
            with CommDebugMode() as seen, planned(replace(plan, ops=tuple(ops))):
                found = (a + b) @ a.exp()
            assert seen.get_total_counts() == count
            assert_close(found, (number((8, 8)) + number((1, 8))) @ number((8, 8)).exp(), "product")


def test_results_travel_together():
    """Of one op: what a layer norm's gradient makes for a weight and for a bias."""

    def step(mesh):
        x = distribute_tensor(number((8, 8)) / 50, mesh, [S0])
        given = [distribute_tensor(number((8,)) / 50, mesh, [R]).requires_grad_() for _ in "ab"]

        def run():
            gradients = torch.autograd.grad(F.layer_norm(x, (8,), *given).square().sum(), given)
            return [gradient.exp() for gradient in gradients]

        return run

    plan = plan_of(step, (4,))
    (op,) = [op for op in plan.ops if op.op == "aten.native_layer_norm_backward.default"]
    assert sum(map(bool, op.gives)) == 2
    assert plan.totals["planned"] == plan.totals["bound"]
    assert plan.totals["planned"].collectives == 2  # one of them of the loss


# -- values of plans -------------------------------------------------------------------------------


def test_a_plan_is_saved_and_explained(tmp_path):
    plan = plan_of(step_of(norms, PROGRAMS[norms]), (4,))
    path = tmp_path / "step.json"
    plan.save(path)
    assert StepPlan.load(path) == plan
    line = next(op.line for op in plan.ops if op.changes)
    assert line in str(plan) and "gives result 0 as" in plan.explain(line.rpartition("/")[2])
    with pytest.raises(ValueError, match="give a line as print"):
        plan.explain("nowhere.py:1")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "is no plan of a step"),
        ("{", "is no plan of a step"),
        ('{"version": 3, "ops": []}', "is no plan of a step"),
        ('{"version": 2, "alone": {"a.py:1": 8}}', "of version 2, .* plan the step again"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        StepPlan.of_json(text)


def test_a_plan_needs_the_package_on_and_its_ops():
    plan = plan_of(step_of(norms, PROGRAMS[norms]), (4,))
    cute_sharding.disable()
    with pytest.raises(RuntimeError, match="USE_CUTE_SHARDING=1"), planned(plan):
        pass
    cute_sharding.enable()
    text = plan.to_json().replace("aten.mm.default", "aten.no_such.default")
    with pytest.raises(ValueError, match="no_such"), planned(StepPlan.of_json(text)):
        pass


def test_layers_that_are_alike_take_one_way():
    """A program of ten layers has as few kinds of values as two, but for their depth."""

    def step(mesh):
        x = distribute_tensor(number((8, 16)) / 100, mesh, [R])
        ws = [distribute_tensor(number((16, 16)) / 100, mesh, [S0]) for _ in range(3)]

        def run():
            h = x
            for w in ws:
                h = F.relu(h @ w)
            return h

        return run

    plan = plan_of(step, (4,))
    assert sum(op.op == "aten.mm.default" for op in plan.ops) == 3


def linear(x):
    """A bias that is sharded, of a product that is pending."""
    return F.linear(x["a"], x["w"], x["b"]).tanh().square().sum()


def test_a_shard_that_becomes_a_summand_is_planned():
    plan = plan_of(
        step_of(linear, {"a": ((4, 8), [S1]), "w": ((6, 8), [S1]), "b": ((6,), [S0])}), (4,)
    )
    assert plan.totals["planned"].received <= plan.totals["op by op"].received


def test_norms_of_replicas_and_shards_are_planned():
    """As of gradients that are clipped: one norm is pending, and the other whole."""

    def step(mesh):
        whole, cut = (distribute_tensor(number((8, 8)), mesh, [p]) for p in (R, S0))

        def run():
            return torch.stack(torch._foreach_norm([whole, cut]))

        return run

    plan = plan_of(step, (4,))
    with ranks_of((4,)):
        whole, cut = (distribute(number((8, 8)), (4,), [p]) for p in (R, S0))
        with planned(plan):
            found = torch.stack(torch._foreach_norm([whole, cut]))
        assert_close(found, number((8, 8)).norm().expand(2), "norms")


def clipped(mesh, foreach=False):
    """Gradients that an op writes to, and does not return, between two reads of them. AdamW then
    computes floats from the number of the step.
    """
    weights = [
        torch.nn.Parameter(distribute_tensor(number(shape) / 100, mesh, [R] * mesh.ndim))
        for shape in ((32, 8), (8, 32))
    ]
    x = distribute_tensor(number((8, 8)) / 100, mesh, [S0] + [R] * (mesh.ndim - 1))
    optimizer = torch.optim.AdamW(weights, lr=0.1, foreach=foreach)

    def run():
        up, down = weights
        F.linear(F.gelu(F.linear(x, up)), down).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return run


def in_lists(mesh):
    return clipped(mesh, foreach=True)


def normed(mesh):
    """Averages that an op writes to beside its results."""
    x = distribute_tensor(number((8, 6, 4)) / 100, mesh, [S0] + [R] * (mesh.ndim - 1))
    mean, var = (distribute_tensor(torch.ones(6), mesh, [R] * mesh.ndim) for _ in "mv")

    def run():
        y = F.batch_norm(x, mean, var, training=True)
        return (y / (1 + y.norm(dim=1, keepdim=True))).sum() + y.amax(0).sum()

    return run


@pytest.mark.parametrize("step", [clipped, in_lists], ids=lambda step: step.__name__)
def test_no_op_of_later_steps_is_decided_otherwise(step, caplog):
    plan = plan_of(step, (4,))
    run = step(mesh_of((4,)))
    run()
    with caplog.at_level(logging.INFO, "cute_sharding"), planned(plan):
        run(), run(), run()
    assert not [record for record in caplog.records if "not in the plan" in record.message]


@pytest.mark.parametrize("step", [in_lists, clipped, normed], ids=lambda step: step.__name__)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_what_ops_write_beside_their_results_is_known(step, sizes):
    totals = plan_of(step, sizes).totals
    assert totals["planned"].received == totals["bound"].received <= totals["op by op"].received


def with_averages(x):
    """Running averages, to which an op writes although its schema does not say so. The channels
    are sharded, so a part of each would do to compute with.
    """
    y = F.batch_norm(x["x"] @ x["w"], x["mean"], x["var"], training=True)
    return (y / (1 + y.norm(dim=1, keepdim=True))).sum() + y.amax(0).sum()


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_what_an_op_writes_unsaid_reaches_the_program(sizes):
    rest = [R] * (len(sizes) - 1)
    placed = {
        "x": ((8, 8), [*rest, R]),
        "w": ((8, 16), [*rest, S1]),
        "mean": ((16,), [*rest, R]),
        "var": ((16,), [*rest, R]),
    }

    def values():
        return {name: number(shape) / 50 + 1 for name, (shape, _) in placed.items()}

    def step(mesh):
        given = {name: distribute_tensor(x, mesh, placed[name][1]) for name, x in values().items()}
        return lambda: with_averages(given)

    plan = plan_of(step, sizes)
    with plain():
        wanted = values()
        with_averages(wanted), with_averages(wanted)
    with ranks_of(sizes):
        given = {name: distribute(x, sizes, placed[name][1]) for name, x in values().items()}
        with planned(plan):
            with_averages(given), with_averages(given)
        for name in ("mean", "var"):
            assert_close(given[name], wanted[name], name)


def test_modules_are_converted_between_steps(caplog):
    """torch swaps no weights to which there are weak references."""
    mesh = mesh_of((4,))

    def step(mesh):
        model = torch.nn.Linear(8, 8)
        distribute_module(model, mesh)
        x = distribute_tensor(number((4, 8)) / 50, mesh, [S0])

        def run():
            model(x).square().mean().backward()
            with torch.no_grad():
                for w in model.parameters():
                    w.sub_(w.grad)
                    w.grad = None

        run.model = model
        return run

    plan = plan_of(step, (4,))
    run = step(mesh)
    with caplog.at_level(logging.INFO, "cute_sharding"), planned(plan):
        run()
        before = run.model.weight.full_tensor()
        run.model.double(), run.model.float()
        assert run.model.weight.full_tensor().equal(before)
        caplog.clear()
        run()
    assert not [record for record in caplog.records if "not in the plan" in record.message]


def test_data_that_is_set_is_what_the_next_step_reads():
    """New weights, which lie where the update leaves them from the second step on."""

    def run_of(x, up, down):
        for w in (up, down):
            w.requires_grad_()

        def run():
            h = F.linear(F.gelu(F.linear(x, up)), down)
            (h / (1 + h.norm(dim=1, keepdim=True))).square().mean().backward()
            for w in (up, down):
                w.data = w.data - w.grad
                w.grad = None
            return up, down

        return run

    values = [number(shape) / 500 for shape in ((8, 8), (16, 8), (8, 16))]

    def step(mesh):
        return run_of(
            *[distribute_tensor(x, mesh, [p]) for x, p in zip(values, (S0, R, R), strict=True)]
        )

    plan = plan_of(step, (4,))
    assert plan.totals["planned"].received < plan.totals["op by op"].received
    run = step(mesh_of((4,)))
    with planned(plan):
        run()
        assert received(run) == plan.totals["planned"].received
    with plain():
        run = run_of(*[x.clone() for x in values])
        run(), run()
        wanted = run()
    with ranks_of((4,)), planned(plan):
        run = run_of(*[distribute(x, (4,), [p]) for x, p in zip(values, (S0, R, R))])
        run(), run()
        for found, expected in zip(run(), wanted):
            assert_close(found.detach(), expected.detach(), "weights")


@pytest.mark.parametrize("placements", ["[S(7)]", "[S(-9)]", "[R, R]", "[]", "[Q]"])
def test_placements_that_no_tensor_has_are_refused(placements):
    plan = plan_of(step_of(norms, PROGRAMS[norms]), (4,))
    mm = next(op for op in plan.ops if op.op == "aten.mm.default")
    ops = [replace(op, gives=(placements,)) if op is mm else op for op in plan.ops]
    with ranks_of((4,)):
        given = {
            "a": distribute(number((4, 8)), (4,), [S1]),
            "b": distribute(number((8, 6)), (4,), [S0]),
        }
        with pytest.raises(ValueError, match="placement"), planned(replace(plan, ops=tuple(ops))):
            norms(given)


def test_lines_that_are_fixed_do_what_they_do_as_written():
    step = step_of(norms, PROGRAMS[norms])
    plan = plan_of(step, (4,))

    def line_of(op):
        return next(each.line for each in plan.ops if each.op == op)

    def fixed_on(line):
        return planned_step(step, mesh_of((4,)), device="cpu", fixed=[line])

    product, others = line_of("aten.mm.default"), line_of("aten.div.Tensor")
    found = fixed_on(product[-20:])
    assert any(op.line == product and any(op.gives) for op in plan.ops)
    assert not any(op.line == product and any(op.gives) for op in found.ops)
    received = [each.totals["planned"].received for each in (plan, fixed_on(others))]
    assert received[0] < received[1] < plan.totals["op by op"].received
    with pytest.raises(ValueError, match="no op of the step is on that line"):
        fixed_on("nowhere.py:1")


# -- one line alone --------------------------------------------------------------------------------


def alone(loss):
    """The plan of a program, with what each line saves alone."""
    return planned_step(step_of(loss, PROGRAMS[loss]), mesh_of((4,)), device="cpu", each_line=True)


def test_the_only_line_that_changes_saves_all():
    plan = alone(norms)
    (line,), (saved,) = plan.changed(), plan.alone.values()
    assert [*plan.alone] == [line]
    assert saved == plan.totals["op by op"].minus(plan.totals["planned"])
    assert saved.received > 0 and saved.collectives > 0 and plan.saving() == {line: saved}
    text = f"alone saves {saved.received} B and {saved.collectives} collective"
    assert f"{line}  288 B -> 144 B, {text}" in str(plan)
    assert "alone saves" in plan.explain(line)
    assert StepPlan.of_json(plan.to_json()) == plan
    assert "alone" not in replace(plan, alone={}).to_json()


def test_lines_alone_compute_what_one_device_does():
    plan, placed = alone(modulated), PROGRAMS[modulated]
    assert len(plan.alone) == 2 and set(plan.changed()) == set(plan.alone)
    assert all(plan.alone.values())  # also of the line that reads what the other gives
    with plain():
        single = {name: number(shape) / 50 for name, (shape, _) in placed.items()}
        training(modulated, single)()
    for line in plan.alone:
        part = plan.only(line[-20:])
        assert {op.line for op in part.ops if op.changes} == {line}
        assert [op.results for op in part.ops] == [op.results for op in plan.ops]
        assert [*part.alone] == [*part.changed()] == [line] and "planned" not in part.totals
        assert StepPlan.of_json(part.to_json()) == part
        clear_propagation_caches()
        with ranks_of((4,)):
            given = {
                name: distribute(number(shape) / 50, (4,), placements)
                for name, (shape, placements) in placed.items()
            }
            with planned(part):
                training(modulated, given)()
            for name, x in given.items():
                assert_close(x.detach(), single[name].detach(), name)
    assert replace(plan.only(*plan.alone), totals=plan.totals).changed() == plan.changed()
    assert not plan.only().changed()
    with pytest.raises(ValueError, match="no op of the plan is on a line"):
        plan.only(line, "nowhere.py:1")


def test_a_line_that_does_not_run_alone_has_no_figure():
    recorder, strict = Recorder(), []

    def step(mesh):
        a, b = (distribute_tensor(number((8, 8)), mesh, [p]) for p in (S1, S0))

        def run():
            h = a @ b
            if strict and not h._spec.placements[0].is_partial():
                raise ValueError("the program expects a Partial")
            return h.relu().sum() + h.amax(1).sum() + h.exp().mean()

        return run

    plan = planned_step(step, mesh_of((4,)), device="cpu")
    (line,) = plan.changed()
    strict.append(True)
    with stand_ins.Fakes(), recorder:
        planning = Planning(recorder, mesh_of((4,)), "", each_line=True)
        found = planning.each_alone(plan, lambda: step(planning.mesh))
    assert found.alone == {line: None}
    assert ", alone does not run" in str(found)
    assert StepPlan.of_json(found.to_json()) == found


@pytest.mark.parametrize("side", ["reads", "gives"])
def test_what_is_written_or_viewed_stays_as_it_lies(side):
    """Also if a plan says otherwise: what is written is seen by all that share the memory."""

    def program(a):
        a.t().add_(1)
        return a

    def step(mesh):
        a = distribute_tensor(number((4, 8)), mesh, [S0])
        return lambda: program(a)

    plan = plan_of(step, (4,))
    ops = tuple([replace(op, **{side: ("[R]",)}) for op in plan.ops])
    with ranks_of((4,)):
        a = distribute(number((4, 8)), (4,), [S0])
        with planned(replace(plan, ops=ops)):
            program(a)
        assert_close(a, number((4, 8)) + 1, "written")


def test_evaluation_in_inference_mode_is_planned():
    """Ops that torch decomposes arrive whole there, and are then decomposed by DTensor."""

    def step(mesh):
        w, x = (distribute_tensor(number((8, 8)), mesh, [p]) for p in (S0, S0))

        def run():
            with torch.inference_mode():
                return F.softmax(x @ w, 1) * x

        return run

    plan = plan_of(step, (4,))
    assert plan.totals["planned"].received <= plan.totals["op by op"].received


BY_FLAG = """
import gc
from cute_sharding import _autoload
_autoload.autoload()
import torch.distributed.tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
gc.collect()
print(type(_get_current_dispatch_mode()).__name__, _autoload.report)
"""


@pytest.mark.one_in(1)
def test_a_flag_runs_the_program_by_a_plan(tmp_path):
    plan = plan_of(step_of(norms, PROGRAMS[norms]), (4,))
    plan.save(tmp_path / "step.json")
    flags = {"USE_CUTE_PLAN": str(tmp_path / "step.json"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BY_FLAG],
        env=environment(search_path(*filter(None, sys.path)), **flags),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = f"Planned switched on by the environment, and runs by the plan {tmp_path / 'step.json'}"
    assert done.stdout.strip() == said
    assert "ignored" not in done.stderr, done.stderr  # at the end of the process
