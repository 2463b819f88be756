"""Programs around reshard and modules under fully_shard, each on four processes."""

import torch
from reshard_programs import Net, raises
from reshard_worker import Sent, mesh_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import cute_sharding


def what_is_under_fully_shard_goes_by_its_state_dict():
    line, tp = mesh_of((4,), range(4)), mesh_of((2, 2), range(4))
    model = fully_shard(Net(), mesh=line)
    optimizer, tokens = torch.optim.Adam(model.parameters()), torch.arange(12).reshape(2, 6)
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model(tokens)  # what its root gathered is still there
    for state in (model, {"of": model}, [model, optimizer], optimizer, model.up):
        with raises(ValueError, r"fully_shard manages .* Pass module.state_dict\(\)"):
            cute_sharding.reshard(state, lambda name, x: "R")
    assert torch.equal(model(tokens), before)
    model(tokens).sum().backward()
    optimizer.step()
    assert not torch.equal(model(tokens), before)
    model = fully_shard(Net(), mesh=line)
    wanted, state = Net().state_dict(), model.state_dict()
    before = {name: getattr(x, "placements", None) for name, x in model.state_dict().items()}
    with Sent() as sent:
        cute_sharding.reshard(state, {"*.weight": "R, S(1)"}, tp)
    assert sum(sent.counts.values()) == 1
    assert state["out.weight"] is state["embed.weight"]
    for name, x in state.items():
        if name.endswith(".weight"):
            assert x.device_mesh == tp and torch.equal(x.full_tensor(), wanted[name]), name
    after = {name: getattr(x, "placements", None) for name, x in model.state_dict().items()}
    assert before == after


def what_is_under_fully_shard_is_read_and_written_to():
    """Over tensor parallelism too, while parameters are gathered or have gradients."""
    line, square = mesh_of((4,), range(4)), init_device_mesh("cpu", (2, 2), mesh_dim_names="ab")
    tp = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    whole, x = layers(), torch.ones(3, 6)
    scaled = {name: w.detach() * 2 for name, w in whole.named_parameters()}
    for kept in (
        fully_shard(layers(), mesh=line),
        fully_shard(parallelize_module(layers(), square["b"], tp), mesh=square["a"]),
    ):
        optimizer = torch.optim.SGD(kept.parameters(), lr=1.0)
        state = {name: distribute_tensor(w, line, [Replicate()]) for name, w in scaled.items()}
        kept(x).sum().backward()
        kept(x)
        assert cute_sharding.plan_reshard(state, kept).run(state, into=kept) is kept
        wanted = torch.func.functional_call(whole, scaled, x)
        assert torch.allclose(kept(x), wanted, atol=1e-4)
        optimizer.step()
        cute_sharding.plan_reshard(kept, state).run(kept, into=state)
        stepped = {name: w.to_local() for name, w in state.items()}
        after = torch.func.functional_call(whole, stepped, x)
        assert torch.allclose(kept(x), after, atol=1e-4)
        assert not torch.allclose(after, wanted, atol=1e-4)


def a_part_of_what_is_under_fully_shard():
    """Is as the whole is, also while its parameters are gathered."""
    line, x = mesh_of((4,), range(4)), torch.ones(3, 6)
    kept = fully_shard(layers(), mesh=line)
    new = {name: torch.full_like(w, 0.5) for name, w in layers()[1].state_dict().items()}
    state = {name: distribute_tensor(w, line, [Replicate()]) for name, w in new.items()}
    for is_gathered in (False, True):
        if is_gathered:
            kept(x)
        with raises(ValueError, r"fully_shard manages .* Pass module.state_dict\(\)"):
            cute_sharding.reshard(kept[1], lambda name, x: "R")
    kept(x)
    cute_sharding.plan_reshard(state, kept[1]).run(state, into=kept[1])
    wanted = torch.func.functional_call(layers(), {f"1.{name}": w for name, w in new.items()}, x)
    assert torch.allclose(kept(x), wanted, atol=1e-4)


def layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))


PROGRAMS = (
    what_is_under_fully_shard_goes_by_its_state_dict,
    what_is_under_fully_shard_is_read_and_written_to,
    a_part_of_what_is_under_fully_shard,
)
