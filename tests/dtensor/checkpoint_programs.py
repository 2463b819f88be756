"""Programs that test_checkpoints.py runs on four processes: models, optimizers, pipeline stages;
and what does not fit, or fails half way. Each gets a folder of its own.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints_worker import Counting, told_by_all
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import cute_sharding
from cute_sharding import load_checkpoint

TP = {"0": ColwiseParallel(), "1": RowwiseParallel()}


def raised(function, kind, *words):
    """The error, which has those words."""
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError(f"no error of {words}")


def on(mesh, whole, placements):
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


# -- models ----------------------------------------------------------------------------------------


def made(dp, tp, seed):
    """A model, whose last sizes are uneven, under both, and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 5), nn.LayerNorm(5))
    if tp is not None:
        parallelize_module(model, tp, TP)
    if dp is not None:
        fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(state):
    """The tensors of a nest, whole, by name."""
    found = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{name}.{key}")
        elif isinstance(value, DTensor):
            found[name] = value.full_tensor()
        elif isinstance(value, torch.Tensor):
            found[name] = value

    walk(state, "")
    return found


def models_and_optimizers(folder):
    """From fully_shard over tensor parallel to either of both, and back."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    model, optimizer = made(square["dp"], square["tp"], 0)
    saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    with cute_sharding.enabled():
        dcp.save(saved, checkpoint_id=folder)
    wanted = whole(saved)
    for dp, tp in ((line, None), (None, line), (square["dp"], square["tp"])):
        other, others = made(dp, tp, 1)
        state = dict(zip(("model", "optim"), get_state_dict(other, others)))
        assert not all(torch.equal(x, wanted[name]) for name, x in whole(state).items())
        done = load_checkpoint({"model": other, "optim": state["optim"]}, folder)
        assert not done.missing_keys and not done.unexpected_keys
        set_state_dict(
            other,
            others,
            model_state_dict=other.state_dict(),
            optim_state_dict=state["optim"],
        )
        state = dict(zip(("model", "optim"), get_state_dict(other, others)))
        found = whole(state)
        assert found.keys() == wanted.keys() and len(found) == 24
        assert all(torch.equal(x, wanted[name]) for name, x in found.items())
        x = torch.ones(3, 6)
        assert torch.allclose(other(x), model(x), atol=1e-6)


class Counter:
    """Has its state elsewhere than in its state dict."""

    def __init__(self, steps):
        self.steps = steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def nests_and_objects(folder):
    """Plain tensors on each rank, lists, numbers, ties, and what has a state dict."""
    mesh = init_device_mesh("cpu", (4,))
    w = on(mesh, torch.arange(12.0).reshape(6, 2), [Shard(0)])
    state = {
        "layers": [{"w": w}, {"tied": w, "lr": 0.5}],
        "count": Counter(7),
        "ids": [1, 2],
        "step": torch.tensor(3.0),
    }
    dcp.save(state, checkpoint_id=folder)
    other = on(mesh, torch.zeros(6, 2), [Shard(1)])
    into = {
        "layers": [{"w": other}, {"tied": other, "lr": 0.1}],
        "count": Counter(0),
        "ids": [],
        "step": torch.tensor(0.0, dtype=torch.float64),
    }
    reader = Counting(folder)
    done = load_checkpoint(into, reader)
    assert torch.equal(other.full_tensor(), w.full_tensor())
    assert into["layers"][0]["w"] is other is into["layers"][1]["tied"]
    assert into["layers"][1]["lr"] == 0.5 and into["ids"] == [1, 2] and into["count"].steps == 7
    assert into["step"] == 3 and into["step"].dtype == torch.float64
    names = {index.fqn for some in told_by_all(reader.chunks) for index in some}
    assert "layers.1.tied" not in names and "layers.0.w" in names, "one tensor is loaded once"
    assert sum(told_by_all(done.read_bytes)) == 48 + 4


# -- states that differ by rank --------------------------------------------------------------------


def stages_and_slices(folder):
    """Pipeline stages have other tensors than one another; copies on slices of a mesh the same."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank, tp = dist.get_rank(), square["tp"]
    values = {
        name: torch.randn(6, 5, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate(("a", "b", "shared"))
    }
    line = init_device_mesh("cpu", (4,))
    dcp.save({n: on(line, x, [Shard(1)]) for n, x in values.items()}, checkpoint_id=folder)
    own = "ab"[rank // 2]
    state = {name: on(tp, torch.zeros(6, 5), [Shard(0)]) for name in (own, "shared")}
    reader = Counting(folder)
    load_checkpoint(state, reader)
    for name, x in state.items():
        assert torch.equal(x.to_local(), values[name].chunk(2)[rank % 2]), name
    every = told_by_all(reader.chunks)
    assert all(n == 1 for some in every for n in some.values())
    assert sum(map(len, every)) == 3 * 3  # of 5 columns on 4 ranks


def on_some_ranks(folder):
    """A group of three of them; and tensors that none of two of these has."""
    line, last = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [3])
    group = dist.new_group([1, 2, 3])
    dcp.save({"w": on(line, torch.arange(8.0), [Shard(0)])}, checkpoint_id=folder)
    state = {"w": on(last, torch.zeros(8), [Replicate()])}
    if dist.get_rank() == 0:
        words = "not in the process group of load_checkpoint, which has the ranks [1, 2, 3]"
        raised(lambda: load_checkpoint(state, folder, group=group), ValueError, words)
        return
    done = load_checkpoint(state, folder, group=group)
    assert done.read_bytes > 0
    if dist.get_rank() == 3:
        assert torch.equal(state["w"].to_local(), torch.arange(8.0))
        assert done.received_bytes + done.read_bytes == 32


# -- what does not fit, and what fails -------------------------------------------------------------


def what_does_not_fit(folder):
    """Is said on all ranks, before anything is read."""
    line = init_device_mesh("cpu", (4,))
    w = on(line, torch.arange(12.0).reshape(6, 2), [Shard(0)])
    dcp.save({"w": w, "v": w, "step": 3}, checkpoint_id=folder)
    zero = lambda *shape: on(line, torch.zeros(shape), [Shard(0)])  # noqa: E731
    full = {"w": zero(6, 2), "v": zero(6, 2), "step": 0}
    fits = "the checkpoint does not fit the state: "
    for state, words in (
        (
            {**full, "u": zero(1), "x": 1},
            f"{fits}the checkpoint lacks 'u', 'x'. No tensor was read",
        ),
        ({"w": zero(6, 2)}, f"{fits}the state lacks 'v', 'step'. "),
        ({**full, "w": zero(2, 6)}, f"{fits}'w' has shape (6, 2), but shape (2, 6) in the state. "),
        (
            {**full, "w": 3},
            f"{fits}'w' is a tensor in the checkpoint, but another object in the state",
        ),
        ({**full, "step": zero(1)}, f"{fits}'step' is a tensor in the state, but another"),
    ):
        reader = Counting(folder)
        raised(lambda s=state, r=reader: load_checkpoint(s, r), ValueError, words)
        assert not reader.chunks
    with torch.device("meta"):
        meta = nn.Linear(2, 6)
    for state, kind, words in (
        (meta, ValueError, "'weight' is on the meta device, and has no memory for values"),
        (3, TypeError, "a state of type int does not name its tensors"),
        (
            {"w": DTensor.from_local(torch.zeros(6, 2), line, [Partial()])},
            ValueError,
            "load_checkpoint cannot load into a Partial",
        ),
    ):
        raised(lambda s=state: load_checkpoint(s, folder), kind, words)
    raised(lambda: load_checkpoint(full, 3), (TypeError, RuntimeError), "checkpoint of type int")
    nothing = str(Path(folder) / "nothing")
    error = raised(lambda: load_checkpoint(full, nothing), (OSError, RuntimeError), "nothing")
    assert dist.get_rank() == 0 or "opening the checkpoint failed on rank 0: FileNotFound" in error
    refits = (
        (lambda w: {"w": w["u"]}, "refit= reads 'u', but the checkpoint has "),
        (lambda w: {"w": w["w"] * 2}, "a refit cannot make result 'w' from its sources"),
        (lambda w: {"w": w["w"].half()}, "refit= casts 'w' to torch.float16, but the state has "),
    )
    for refit, words in refits:
        call = lambda r=refit: load_checkpoint(full, folder, refit=r, strict=False)  # noqa: E731
        raised(call, ValueError, words)
    limit = 1000 + dist.get_rank() // 3
    words = "the refit, strict or memory_limit of load_checkpoint on ranks 3 differs from rank 0"
    raised(lambda: load_checkpoint(full, folder, memory_limit=limit), ValueError, words)
    words = "memory_limit=10 is too small: a chunk of 'w' has 16 bytes, and a rank needs "
    words += "32 bytes to read, send and receive the whole chunk"
    raised(lambda: load_checkpoint(full, folder, memory_limit=10), ValueError, words)
    assert not full["w"].full_tensor().any()
    done = load_checkpoint({"w": full["w"], "u": zero(1)}, folder, strict=False)
    assert done.missing_keys == ("u",) and done.unexpected_keys == ("v", "step")
    assert torch.equal(full["w"].full_tensor(), w.full_tensor())


def what_fails_half_way(folder):
    """On one rank fails on all, and names what is loaded."""
    line = init_device_mesh("cpu", (4,))
    values = {f"w{i}": torch.full((8, 64), float(i)) for i in range(1, 7)}
    dcp.save({n: on(line, x, [Shard(0)]) for n, x in values.items()}, checkpoint_id=folder)

    class Failing(Counting):
        def read_data(self, plan, planner):
            if dist.get_rank() == 2 and any(i.storage_index.fqn == "w4" for i in plan.items):
                raise OSError("the disk is gone")
            return super().read_data(plan, planner)

    state = {name: on(line, torch.zeros(8, 64), [Shard(1)]) for name in values}
    error = raised(
        lambda: load_checkpoint(state, Failing(folder), memory_limit=2100),
        RuntimeError,
        "the disk is gone",
        "Completely loaded tensors: 'w1', 'w2', 'w3'. Unchanged tensors: 'w5', 'w6'. Possibly "
        "changed tensors: 'w4'",
    )
    assert dist.get_rank() == 2 or "reading failed on rank 2: OSError" in error
    for name, x in state.items():
        wanted = values[name] if name in ("w1", "w2", "w3") else torch.zeros(8, 64)
        assert name == "w4" or torch.equal(x.full_tensor(), wanted), name


def what_a_rank_reads_for_itself_is_not_copied(folder):
    """It is read into the tensors themselves, and what others need is sent from there."""
    line, pair = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1])
    values = {f"w{i}": torch.rand(8, 6, generator=torch.Generator().manual_seed(i)) for i in (1, 2)}
    dcp.save({n: on(line, x, [Shard(0)]) for n, x in values.items()}, checkpoint_id=folder)
    places = []

    class Seeing(Counting):
        def read_data(self, plan, planner):
            places.extend(planner.resolve_tensor(item).data_ptr() for item in plan.items)
            return super().read_data(plan, planner)

    alike = {name: on(line, torch.zeros(8, 6), [Shard(0)]) for name in values}
    load_checkpoint(alike, Seeing(folder))
    assert places == [x.to_local().data_ptr() for x in alike.values()]
    places.clear()
    cast = {name: on(line, torch.zeros(8, 6).double(), [Shard(0)]) for name in values}
    load_checkpoint(cast, Seeing(folder))
    assert not {*places} & {x.to_local().data_ptr() for x in cast.values()}
    for mesh, placement in ((line, Replicate()), (pair, Shard(0)), (line, Shard(1))):
        state = {name: on(mesh, torch.zeros(8, 6), [placement]) for name in values}
        twice = lambda w: {**w, "again": torch.cat([w["w1"], w["w1"]])}  # noqa: E731
        state["again"] = on(mesh, torch.zeros(16, 6), [placement])
        load_checkpoint(state, Seeing(folder), refit=twice)
        for name, x in twice(values).items():
            if mesh == line or dist.get_rank() < 2:
                part = on(mesh, x, [placement]).to_local()
                assert torch.equal(state[name].to_local(), part), (name, placement)
    for name, x in values.items():
        assert torch.equal(alike[name].full_tensor(), x)
        assert torch.equal(cast[name].full_tensor(), x.double())


PROGRAMS = [
    models_and_optimizers,
    nests_and_objects,
    stages_and_slices,
    on_some_ranks,
    what_does_not_fit,
    what_fails_half_way,
    what_a_rank_reads_for_itself_is_not_copied,
]
