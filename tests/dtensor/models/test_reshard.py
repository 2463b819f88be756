"""Whole models between meshes: on real processes; and in one, what needs no other."""

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace

import dying_program
import fully_sharded_programs
import pytest
import reshard_programs
import reshard_worker
import torch
import torch.nn.functional as F
from gloo import run, spawn
from simulation import distribute, mesh_of, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_sharding
from cute_sharding import Spec

PROGRAMS = (*reshard_programs.PROGRAMS, *fully_sharded_programs.PROGRAMS)


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "prepared, limited, long",
    [(False, False, 16), (True, False, None), (True, True, 1), (False, True, None)],
)
def test_drawn_models(prepared, limited, long, share, tmp_path):
    """``long``: from so many bytes on a message goes by itself."""
    run(4, tmp_path, (reshard_worker.drawn_models, 0, share(200, 16), prepared, limited, long))


@pytest.mark.costly
@pytest.mark.processes
@pytest.mark.one_in(1)
def test_programs(tmp_path):
    run(4, tmp_path, *[(program,) for program in PROGRAMS])


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_a_process_that_dies_half_way(tmp_path):
    spawn(dying_program.one_dies_half_way, 3, 3, str(tmp_path / "met"), str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["ReshardError True True"] * 2


@pytest.fixture
def alone():
    """A mesh of this rank alone."""
    return DeviceMesh("cpu", [0])


def test_plans_of_this_process_stay_in_it():
    """A pickled mesh has the rank of the process that it comes from, and equals this one's."""
    square = mesh_of((2, 4))
    state = {"w": distribute_tensor(torch.ones(8, 8), square, [Shard(0), Replicate()])}
    turned = lambda w: {"w": w["w"].mT}  # noqa: E731
    for plan in (
        cute_sharding.plan_reshard(state, "R, S(1)"),
        cute_sharding.plan_refit(turned, state, {"w": (square, "R, S(1)")}),
    ):
        with pytest.raises(TypeError, match="Make the plan on each rank, which needs no"):
            pickle.dumps(plan)
        assert copy.copy(plan) is copy.deepcopy([plan])[0] is plan


def local_on(mesh, placements, local):
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=(8, 8), stride=(8, 1))


def test_what_is_written_is_apart_from_what_is_read():
    line, square = mesh_of((8,)), mesh_of((2, 4))
    memory = torch.zeros(2, 8)
    state = {
        name: local_on(line, [Shard(0)], memory[i : i + 1]) for i, name in enumerate(("x", "y"))
    }
    crossed = {
        name: local_on(line, [Shard(1)], memory[1 - i].view(8, 1))
        for i, name in enumerate(("x", "y"))
    }
    plan = cute_sharding.plan_reshard(state, "S(1)")
    with pytest.raises(
        ValueError, match="target tensor 'y' shares memory with the source tensor 'x'"
    ):
        plan.run(state, into=crossed)
    refit = cute_sharding.plan_refit(dict, state, {"*": (line, "S(1)")})
    with pytest.raises(ValueError, match="'y' shares memory with the source tensor 'x'"):
        refit.run(state, into=crossed)
    # What a run gives may be in the memory of the source, as a part of it.
    whole = {"x": local_on(square, [Replicate()] * 2, torch.arange(64.0).view(8, 8))}
    for plan in (
        cute_sharding.plan_reshard(whole, "R, S(0)"),
        cute_sharding.plan_refit(dict, whole, {"x": (square, "R, S(0)")}),
    ):
        part = {"x": local_on(square, [Replicate(), Shard(0)], whole["x"].to_local()[:2])}
        plan.run(whole, into=part)
        assert torch.equal(part["x"].to_local(), torch.arange(16.0).view(2, 8))
    padded = cute_sharding.plan_refit(
        lambda w: {"x": F.pad(w["x"], (0, 1))[:, 1:]}, whole, {"x": (square, "R, S(0)")}
    )
    with pytest.raises(ValueError, match="tensors with memory of their own"):
        padded.run(whole, into=part)
    unread = cute_sharding.plan_refit(
        lambda w: {"x": w["x"].new_ones(8, 8)}, whole, {"x": (square, "R, S(0)")}
    )
    unread.run(whole, into=part)
    assert torch.equal(part["x"].to_local(), torch.ones(2, 8))


def test_plans_of_sizes_are_sent():
    spec = {"w": Spec((8, 8), (2, 4), "S(0), R")}
    turned = lambda w: {"w": w["w"].mT}  # noqa: E731
    for plan in (
        cute_sharding.plan_reshard(spec, {"w": Spec((8, 8), (8,), "S(1)")}),
        cute_sharding.plan_refit(turned, spec, {"w": ((8,), "S(1)")}),
    ):
        sent = pickle.loads(pickle.dumps(plan))
        assert str(sent) == str(plan) and sent.parts(3) == plan.parts(3)


def test_plans_of_a_model_on_meta():
    """Nothing is sent, and there is no memory."""
    fsdp, tp = mesh_of((8,)), mesh_of((2, 4))
    with torch.device("meta"):
        state = {
            f"layers.{i}.weight": distribute_tensor(torch.empty(4096, 1024), fsdp, [Shard(0)])
            for i in range(40)
        }
    plan = cute_sharding.plan_reshard(state, "R, S(1)", tp)
    assert plan.collectives == 5 and plan.received_bytes == plan.lower_bound
    assert plan.coverage.is_whole and len(plan.ways) == 1
    specs = {name: Spec((4096, 1024), (8,), "S(0)") for name in state}
    wanted = {name: Spec((4096, 1024), (2, 4), "R, S(1)") for name in state}
    assert cute_sharding.plan_reshard(specs, wanted).to_dict() == plan.to_dict()
    with pytest.raises(ValueError, match="pass one Spec in target for each name in source"):
        cute_sharding.plan_reshard(specs, {})
    with pytest.raises(ValueError, match="pass one Spec in target for each name in source"):
        cute_sharding.plan_reshard(specs, dict.fromkeys(specs, "R"))
    with pytest.raises(TypeError, match="is a Spec, but source is not a dict of Specs"):
        cute_sharding.plan_reshard(state, wanted)


def test_a_graph_that_was_there_before_is_not_gone_through(alone):
    """What was computed of a parameter has no gradient once its memory is another."""
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), alone, [Shard(0)]))
    layer = torch.nn.ParameterDict({"w": weight})
    loss = (weight * weight).sum()
    cute_sharding.reshard(layer, {"w": "S(1)"})
    assert layer["w"] is weight and weight.placements == (Shard(1),)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    assert torch.equal(weight.grad.to_local(), torch.full((4, 4), 2.0))


def test_an_optimizer_by_itself(alone):
    layer = torch.nn.Linear(4, 4)
    for name, x in list(layer.named_parameters()):
        x = torch.nn.Parameter(distribute_tensor(x.detach(), alone, [Shard(0)]))
        layer.register_parameter(name, x)
    for given, names in ((layer.parameters(), "0.{}"), (layer.named_parameters(), "{}")):
        optimizer = torch.optim.Adam(given)
        layer.weight.grad = layer.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        name = names.format("0" if "0" in names else "weight")
        cute_sharding.reshard(optimizer, {name: "S(1)"})
        state = optimizer.state[layer.weight]
        assert layer.weight.placements == state["exp_avg"].placements == (Shard(1),)
        assert layer.bias.placements == (Shard(0),) and not isinstance(state["step"], type(None))
        cute_sharding.reshard(optimizer, {name: "S(0)"})


def test_lists_that_an_optimizer_has_of_a_parameter(alone):
    """As Shampoo and SOAP have their statistics: each goes where the parameter goes if it has its
    shape, and else by its own name; numbers stay.
    """
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), alone, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    averages = weight.detach().clone(), weight.detach() * 2
    left = distribute_tensor(torch.ones(4, 4), alone, [Shard(0)])
    optimizer.state[weight] = {"Q": [left, None, 3], "history": {"last": averages}}
    plan = cute_sharding.plan_reshard(optimizer, {"0.0": "S(1)", "state.0.0.Q.0": "S(1)"})
    assert sum(len(each.names) for each in plan.moving) == 4
    plan.run(optimizer)
    state = optimizer.state[weight]
    assert state["Q"][1:] == [None, 3]
    for x in (weight, state["Q"][0], *state["history"]["last"]):
        assert x.placements == (Shard(1),)
    assert state["history"]["last"][1].full_tensor().tolist() == [[2.0] * 6] * 4


def test_progress(alone, monkeypatch):
    state = [distribute_tensor(torch.ones(4, 4), alone, [Shard(0)]) for _ in range(3)]
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm, or leave out progress=True"):
        cute_sharding.reshard(state, "R", progress=True)
    assert all(x.placements == (Shard(0),) for x in state)
    shown = []

    class Bar(SimpleNamespace):
        def __enter__(self):
            shown.append((self.total, self.unit))
            return self

        def __exit__(self, *_):
            shown.append("closed")

        def update(self):
            shown.append("tensor")

    module = ModuleType("tqdm.auto")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    cute_sharding.reshard(state, "R", progress=True)
    assert shown == [(3, "tensor"), "tensor", "tensor", "tensor", "closed"]
    assert all(x.placements == (Replicate(),) for x in state)


def test_ranks_in_one_process_are_refused():
    with ranks_of((4,)):
        x, y = (distribute(torch.ones(4, 4), (4,), [Shard(d)]) for d in (0, 1))
        plan = cute_sharding.plan_reshard([x], "S(1)")
        for refused in (
            lambda: cute_sharding.reshard([x], "S(1)"),
            lambda: plan.run([x]),
            lambda: plan.run([x], into=[y]),
            lambda: plan.run([x], into=[y], since=[x.clone()]),
            lambda: plan.send([x]),
            lambda: plan.receive(),
            lambda: plan.receive(into=[y]),
        ):
            with pytest.raises(
                NotImplementedError,
                match=r"^reshard cannot run under "
                "LocalTensorMode",
            ):
                refused()
