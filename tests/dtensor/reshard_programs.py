"""Programs around reshard that test_reshard.py runs, each on four processes."""

import re
import time
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from reshard_worker import Sent, as_dtensor, mesh_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sharding
from cute_sharding.dtensor.run import across_meshes
from cute_sharding.dtensor.run.bundles import Shipment
from cute_sharding.exchange import MemoryLimitError


@contextmanager
def raises(kind, said):
    try:
        yield
    except kind as error:
        assert re.search(said, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__} that says {said!r}")


def ids(*sizes, start=0, dtype=torch.float32):
    whole = torch.arange(start, start + torch.Size(sizes).numel())
    return whole.reshape(sizes).to(dtype)


class Net(torch.nn.Module):
    def __init__(self, rows=12, width=8):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(rows, width)
        self.up = torch.nn.Linear(width, 10)
        self.down = torch.nn.Linear(10, width)
        self.out = torch.nn.Linear(width, rows, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("plain", torch.ones(2))

    def forward(self, x):
        return self.out(self.scale * self.down(torch.relu(self.up(self.embed(x)))))


def distributed(model, mesh, placements):
    with torch.no_grad():
        for part in model.modules():
            for name, x in part._parameters.items():
                if x is not None and part is not model.out:
                    part._parameters[name] = torch.nn.Parameter(
                        distribute_tensor(x.detach(), mesh, placements(x))
                    )
        model.out.weight = model.embed.weight
        model.scale = distribute_tensor(model.scale, mesh, placements(model.scale))
    return model


def a_module_and_its_optimizer_go_on():
    """Four steps of Adam, half of them elsewhere, are as on one device."""
    line, square = mesh_of((4,), range(4)), mesh_of((2, 2), range(4))
    alone, tokens = Net(), torch.arange(12).reshape(2, 6) % 12
    here = distributed(Net(), line, lambda x: [Shard(0)])
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (alone, here)]
    parameters, embed = list(here.parameters()), here.embed.weight
    for step in range(4):
        if step == 2:
            optimizers[1].zero_grad()
            state = {"model": here, "optimizer": optimizers[1]}
            two = {"model.*.weight": "S(1), S(0)", "model.scale": [Replicate(), Shard(0)]}
            with Sent() as sent:
                result = cute_sharding.reshard(state, {**two, "model.*": "R, S(0)"}, square)
            assert result is state and sum(sent.counts.values()) == 1
        mesh = line if step < 2 else square
        for model, optimizer in zip((alone, here), optimizers):
            x = tokens
            if model is here:
                x = distribute_tensor(tokens, mesh, [Replicate()] * mesh.ndim)
            optimizer.zero_grad()
            with cute_sharding.enabled():
                model(x).square().mean().backward()
                optimizer.step()
    assert all(one is other for one, other in zip(here.parameters(), parameters))
    assert here.out.weight is here.embed.weight is embed
    assert here.up.weight.placements == (Shard(1), Shard(0)) and here.plain.device.type == "cpu"
    moments = optimizers[1].state[embed]
    assert moments["exp_avg"].placements == (Shard(1), Shard(0))
    assert here.scale.device_mesh == square
    for one, other in zip(alone.parameters(), here.parameters()):
        assert other.device_mesh == square
        assert torch.allclose(other.full_tensor(), one, atol=1e-5)


def weights_are_sent_and_received_as_often_as_is_wanted():
    trainer, generator = mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))
    shapes = {f"layers.{i}": (6 + i, 4) for i in range(5)}
    is_trainer = dist.get_rank() < 2
    for prepared in (False, True):
        if prepared:
            cute_sharding.prepare_groups(trainer, generator)
        source, target = (
            {n: distribute_tensor(torch.empty(x), mesh, [Shard(d)]) for n, x in shapes.items()}
            for mesh, d in ((trainer, 0), (generator, 1))
        )
        plan = cute_sharding.plan_reshard(source, target)
        assert plan.collectives == 1 and plan.coverage.is_whole
        with (
            Sent() as sent,
            patch.object(across_meshes, "plan_exchange", side_effect=AssertionError),
        ):
            for step in range(3):
                wanted = {name: ids(*shape, start=step) for name, shape in shapes.items()}
                if is_trainer:
                    rows = {
                        name: as_dtensor(
                            x.chunk(2)[dist.get_rank()], x.shape, trainer, [Shard(0)], x.dtype
                        )
                        for name, x in wanted.items()
                    }
                    before = {name: x.to_local().clone() for name, x in rows.items()}
                    plan.send(rows)
                    assert all(torch.equal(rows[n].to_local(), x) for n, x in before.items())
                else:
                    received = plan.receive()
                    assert [*received] and received.keys() == shapes.keys()
                    for name, x in received.items():
                        part = wanted[name].chunk(2, 1)[dist.get_rank() - 2]
                        assert x.device_mesh == generator and torch.equal(x.to_local(), part)
        assert sum(sent.counts.values()) == 3  # the two are all ranks
    if is_trainer:
        with raises(ValueError, "receive cannot .* rank . is on a source mesh of the plan"):
            plan.receive()
    else:
        with raises(ValueError, "send cannot .* rank . is on a target mesh of the plan"):
            plan.send(source)


def floating_point_numbers_travel_in_the_smaller_dtype():
    line, square = mesh_of((4,), range(4)), mesh_of((2, 2), range(4))
    full, whole = ids(8, 6).div(7), ids(8, 6, dtype=torch.int64)
    for source, dtype in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float8_e5m2),
    ):
        given = full.to(source)
        state = [distribute_tensor(x, line, [Shard(0)]) for x in (given, whole)]
        plan = cute_sharding.plan_reshard(state, "R, S(1)", square, dtype=dtype)
        narrow = min(source.itemsize, dtype.itemsize)
        assert plan.received_bytes == plan.lower_bound == 3 * 6 * (narrow + 8), plan
        cute_sharding.reshard(state, "R, S(1)", square, dtype=dtype)
        assert state[0].dtype == dtype and state[1].dtype == torch.int64
        mine = square.get_coordinate()[1]
        wanted = [x.chunk(2, 1)[mine] for x in (given.to(dtype), whole)]
        for x, part in zip(state, wanted):
            assert torch.equal(x.to_local().double(), part.double())
            assert x.to_local().dtype == part.dtype
    model = distributed(Net(), line, lambda x: [Shard(0)])
    before = {name: x.full_tensor() for name, x in model.named_parameters()}
    cute_sharding.reshard(model, {"*": "S(0)"}, dtype=torch.bfloat16)
    assert model.out.weight is model.embed.weight
    for name, x in model.named_parameters():
        assert x.dtype == torch.bfloat16 and x.requires_grad and isinstance(x, torch.nn.Parameter)
        assert torch.equal(x.full_tensor(), before[name].bfloat16())


class Alive(TorchDispatchMode):
    """The bytes of storages that were made in the block, and are there at once.

    gloo's threads let go of buffers only some time after their messages were waited for. So where
    there are more than ``most`` bytes, they are given that time.
    """

    def __init__(self, most, seconds=5):
        super().__init__()
        self.most, self.seconds = most, seconds
        self.alive = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if type(x) is torch.Tensor and x.untyped_storage()._cdata not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage._cdata)
                self.alive += storage.nbytes()
                deadline = time.monotonic() + self.seconds
                while self.alive > self.most and time.monotonic() < deadline:
                    time.sleep(0.001)
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return result

    def gone(self, which, size):
        self.known.discard(which)
        self.alive -= size


def no_more_is_held_than_the_plan_says():
    """Whatever goes: the more there is at once, the more is held beside, and never more than that;
    sources are let go as targets arrive.
    """
    line, other = mesh_of((4,), range(4)), mesh_of((4,), range(4))
    full = ids(64, 64)

    def state():
        return {f"w{i}": distribute_tensor(full + i, line, [Shard(0)]) for i in range(12)}

    sizes = state()
    held = sum(x.to_local().nbytes for x in sizes.values())
    largest = cute_sharding.plan_reshard(sizes, "S(1)", other)
    peaks = []
    for limit in (None, largest.peak_bytes, held * 2, held * 3 // 2, held * 5 // 4):
        moving_ = state()
        plan = cute_sharding.plan_reshard(moving_, "S(1)", other, memory_limit=limit)
        assert plan.peak_bytes <= (limit or largest.peak_bytes)
        with Alive(plan.peak_bytes) as alive:
            plan.run(moving_)
            # The sources were there before: what was let go of them is below nothing.
        peaks.append(alive.peak + held)
        assert alive.peak <= plan.peak_bytes, (limit, alive.peak, plan.peak_bytes)
        for i, x in enumerate(moving_.values()):
            mine = dist.get_rank()
            assert torch.equal(x.to_local(), (full + i).chunk(4, 1)[mine])
        if limit == held * 3 // 2:
            assert len(plan.packed) > 3 and any(each.follows_at_once for each in plan.packed)
    with raises(
        MemoryLimitError, r"memory_limit=1 is too small: a device needs at least \d+ bytes"
    ):
        cute_sharding.reshard(sizes, "S(1)", other, memory_limit=1)
    try:
        cute_sharding.reshard(sizes, "S(1)", other, memory_limit=1)
    except MemoryLimitError as error:
        assert error.limit == 1
        cute_sharding.plan_reshard(sizes, "S(1)", other, memory_limit=error.least)
        with raises(MemoryLimitError, "is too small"):
            cute_sharding.plan_reshard(sizes, "S(1)", other, memory_limit=error.least - 1)


def what_fails_leaves_each_tensor_as_it_was_or_moved():
    line = mesh_of((4,), range(4))
    full = ids(8, 4)
    model = torch.nn.ParameterDict(
        {f"w{i}": distribute_tensor(full + i, line, [Shard(0)]) for i in range(5)}
    )
    result, calls = Shipment.result, []

    def failing(*args, **how):
        calls.append(args)
        if len(calls) == 3 and dist.get_rank() == 1:
            raise MemoryError("no more of it")
        return result(*args, **how)

    failed = None
    with patch.object(Shipment, "result", failing):
        try:
            cute_sharding.reshard(model, "S(1)")
        except RuntimeError as error:
            failed = error
    assert (failed is not None) == (dist.get_rank() == 1)
    moved = ("w0", "w1") if failed is not None else tuple(model.keys())
    if failed is not None:
        assert failed.moved == moved and failed.left == ("w2", "w3", "w4")
        said = "Completely moved tensors: 'w0', 'w1'. Unchanged tensors: 'w2'"
        assert f"MemoryError: no more of it. {said}" in str(failed)
    for i, (name, x) in enumerate(model.items()):
        d = 1 if name in moved else 0
        assert x.placements == (Shard(d),)
        assert torch.equal(x.to_local(), (full + i).chunk(4, d)[dist.get_rank()])


def what_is_refused_leaves_all_as_it_was():
    line = mesh_of((4,), range(4))
    x, y = (distribute_tensor(ids(8, 4), line, [Shard(0)]) for _ in range(2))
    state = {"a": x, "b": {"c": y}, "n": 3, "t": torch.ones(2)}
    reshard = cute_sharding.reshard
    with raises(ValueError, "no DTensor of the state has a name that matches 'b.d', 'e\\*': "):
        reshard(state, {"a": "R", "b": {"d": "R"}, "e*": "R"})
    with raises(ValueError, "a and d are the same tensor, but have different target placements"):
        reshard({**state, "d": x}, {"a": "R", "d": "S(1)"})
    with raises(ValueError, r"must not have a Partial"):
        reshard(state, {"a": "P"})
    with raises(ValueError, "placements of 'a'.* is for tensor dim 5"):
        reshard(state, {"a": "S(5)"})
    with raises(TypeError, "which is not a DeviceMesh"):
        reshard(state, "R", (2, 2))
    with raises(TypeError, "give a sequence with one placement for each mesh dim"):
        reshard(state, {"a": Shard(0)})
    with raises(ValueError, "but its target has shape"):
        reshard(state, {"a": distribute_tensor(torch.ones(3), line, [Shard(0)])})
    plan = cute_sharding.plan_reshard(state, "S(1)")
    with raises(ValueError, "Missing names: 'b.c'. Additional names: none"):
        plan.run({"a": x})
    with raises(ValueError, "Additional names: 'z'"):
        plan.run({**state, "z": x})
    plan.run(state)
    assert state["b"]["c"] is not y and state["n"] == 3 and type(state["t"]) is torch.Tensor
    with raises(ValueError, "when the plan was made: make a new plan"):
        plan.run(state)
    leaf = torch.nn.Parameter(x)
    leaf.grad = x.clone()
    with raises(ValueError, "has a gradient or a grad_fn"):
        reshard([leaf], "R")
    with raises(ValueError, "has a gradient or a grad_fn"):
        reshard([torch.nn.Parameter(x) * 2], "R")
    assert torch.equal(x.to_local(), ids(8, 4).chunk(4)[dist.get_rank()])


def nests_of_all_kinds():
    line, other = mesh_of((4,), range(4)), mesh_of((2, 2), range(4))
    x, y, z = (distribute_tensor(ids(8, 4) + i, line, [Shard(0)]) for i in range(3))
    state = {"a": [x, (y, "text")], "tied": x, "other memory": x.detach(), "kept": z}

    def wanted(name, tensor):
        assert tensor.shape == (8, 4)
        return None if name == "kept" else "S(1), R"

    result = cute_sharding.reshard(state, wanted, other)
    assert result is state and state["kept"] is z
    assert state["tied"] is state["a"][0] is state["other memory"] and state["a"][1][1] == "text"
    for i, moved in enumerate((state["a"][0], state["a"][1][0])):
        assert moved.placements == (Shard(1), Replicate())
        assert torch.equal(moved.full_tensor(), ids(8, 4) + i)
    assert torch.equal(cute_sharding.reshard(y, "R").to_local(), ids(8, 4) + 1)
    assert y.placements == (Shard(0),)
    one, two = cute_sharding.reshard((y, z), "S(1)")
    assert one.placements == two.placements == (Shard(1),)


def what_ranks_outside_take_for_something_else():
    one, two = mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))
    inside = dist.get_rank() < 2
    full = ids(4, 4)
    rows = full.chunk(2)[dist.get_rank() % 2]
    for told in (Shard(0), Shard(0) if inside else Shard(1)):
        state = {
            "a": as_dtensor(rows.clone() if inside else None, (4, 4), one, [told], full.dtype),
            "b": as_dtensor(rows.clone() if inside else None, (4, 4), one, [Shard(0)], full.dtype),
        }
        if inside or told == Shard(0):
            cute_sharding.reshard(state, "R", two)
            assert inside or torch.equal(state["a"].to_local(), full)
        else:
            with raises(RuntimeError, "have different plans for .* tensors"):
                cute_sharding.reshard(state, "R", two)
            assert state["a"].device_mesh == one


def slices_of_a_mesh_move_each_its_own():
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = ids(6, 4) + 100 * (dist.get_rank() // 2)
    rows = full.chunk(2)[dist.get_rank() % 2]
    state = [DTensor.from_local(rows + i, whole["tp"], [Shard(0)], run_check=False) for i in (0, 1)]
    cute_sharding.reshard(state, "S(1)")
    for i, x in enumerate(state):
        assert torch.equal(x.to_local(), (full + i).chunk(2, 1)[dist.get_rank() % 2])


def what_is_pending_is_finished_or_stays():
    """Norms are reduced by placements of their own."""
    line, other = mesh_of((4,), range(4)), mesh_of((2,), (1, 2))
    full = ids(8, 4)
    pending, kept = (
        DTensor.from_local(full + dist.get_rank(), line, [Partial()], run_check=False)
        for _ in range(2)
    )
    x = distribute_tensor(full, line, [Shard(0)])
    state = {"moves": pending, "stays": kept, "norm": torch.linalg.vector_norm(x)}
    assert not state["norm"].placements[0].is_replicate()
    cute_sharding.reshard(state, {"moves": "S(1)", "norm": "R"}, other)
    assert state["stays"] is kept and kept.placements == (Partial(),)
    if dist.get_rank() in (1, 2):
        part = (4 * full + 6).chunk(2, 1)[dist.get_rank() - 1]
        assert torch.equal(state["moves"].to_local(), part)
        assert torch.allclose(state["norm"].to_local(), full.norm())


def memory_for_messages_stays_with_a_plan():
    """And no result is in it."""
    line = mesh_of((4,), range(4))
    wholes = [{f"w{i}": ids(8, 12, start=step + i) for i in range(3)} for step in range(3)]

    def state(step):
        return {n: distribute_tensor(x, line, [Shard(0)]) for n, x in wholes[step].items()}

    plan = cute_sharding.plan_reshard(state(0), [Shard(1)])
    memory, results = set(), []
    for step in range(3):
        results.append(plan.run(state(step)))
        memory |= {x.data_ptr() for x in plan._runner._memory}
        if step == 1:
            plan.free()
            assert not plan._runner._memory
            memory.clear()
    (kept,) = plan._runner._memory
    assert memory == {kept.data_ptr()} and kept.nbytes >= 2 * 3 * (2 * 9 * 4)
    for whole, result in zip(wholes, results, strict=True):
        for name, x in result.items():
            assert torch.equal(x.to_local(), whole[name].chunk(4, 1)[dist.get_rank()])
    limited = cute_sharding.plan_reshard(state(0), [Shard(1)], memory_limit=plan.peak_bytes)
    limited.run(state(0))
    assert not limited._runner._memory


def counts_are_of_what_ran():
    line = mesh_of((4,), range(4))
    state = {f"w{i}": distribute_tensor(ids(8, 4), line, [Shard(0)]) for i in range(3)}
    cute_sharding.stats(reset=True)
    cute_sharding.reshard(state, {"w0": "S(1)", "w1": "S(1)"})
    counts = cute_sharding.stats()["redistribute"]
    assert counts["plan"] == 2 and counts["collectives"] == 1
    assert counts["received_elements"] == 12, counts


PROGRAMS = (
    a_module_and_its_optimizer_go_on,
    weights_are_sent_and_received_as_often_as_is_wanted,
    floating_point_numbers_travel_in_the_smaller_dtype,
    no_more_is_held_than_the_plan_says,
    what_fails_leaves_each_tensor_as_it_was_or_moved,
    what_is_refused_leaves_all_as_it_was,
    nests_of_all_kinds,
    what_ranks_outside_take_for_something_else,
    slices_of_a_mesh_move_each_its_own,
    what_is_pending_is_finished_or_stays,
    memory_for_messages_stays_with_a_plan,
    counts_are_of_what_ran,
)
