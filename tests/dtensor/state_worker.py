"""What the processes of test_state.py run: tensors of any placements saved and loaded, put into
state dicts and taken out of them.
"""

import copy
import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes_worker import mesh_of_ranks, part_of
from simulation import number
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

MESHES = ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]], [1, 2, 3], [3, 0])


def distribute(full, mesh, placements):
    """As a program would, each rank with its local tensor. (Of a scalar, torch takes the shape from
    the local tensor, also on ranks outside of the mesh.)
    """
    part = part_of(full, mesh, placements)
    return (
        DTensor.from_local(
            full if part is None else part,
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        .detach()
        .requires_grad_()
    )


def drawn_placements(rng, mesh, ndim, *, strided=True):
    def placement():
        if not ndim or rng.random() < 0.2:
            return Replicate()
        d = rng.randrange(ndim)
        return (
            _StridedShard(d, split_factor=rng.choice((2, 3, 5)))
            if strided and rng.random() < 0.7
            else Shard(d)
        )

    return [placement() for _ in range(mesh.ndim)]


def held(tensor, full):
    """Whether this rank's part is right; a rank outside of the mesh has none."""
    wanted = part_of(full, tensor.device_mesh, tensor.placements)
    return wanted is None or torch.equal(tensor.detach().to_local(), wanted)


def everywhere(condition, case):
    """The same on all ranks, lest one that fails leave the others waiting."""
    found = torch.tensor([not condition])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    assert not found.item(), case


def checkpoints(folder, seed, cases):
    """Saved on one mesh and loaded on another, by us and by torch alone, which takes part where
    placements are plain.
    """
    rng = random.Random(seed)
    for case in range(cases):
        shape = tuple(rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 12)) for _ in range(rng.randint(0, 3)))
        for saves, loads in ((True, True), (True, False), (False, True)):
            ours = [cute_sharding.enabled() if on else nullcontext() for on in (saves, loads)]
            meshes = [mesh_of_ranks(rng.choice(MESHES)) for _ in range(2)]
            source, target = (
                drawn_placements(rng, mesh, len(shape), strided=on)
                for mesh, on in zip(meshes, (saves, loads))
            )
            path = f"{folder}/{seed} {case} {saves} {loads}"
            with ours[0]:
                saved = distribute(number(shape) + 1, meshes[0], source).detach()
                dcp.save({"x": saved, "n": case}, checkpoint_id=path)
            with ours[1]:
                loaded = {"x": distribute(number(shape) * 0, meshes[1], target).detach(), "n": -1}
                dcp.load(loaded, checkpoint_id=path)
            everywhere(
                held(loaded["x"], number(shape) + 1),
                f"{shape} {source} on {meshes[0]} -> {target} on {meshes[1]}, saved by "
                f"{'us' if saves else 'torch'}",
            )
            assert loaded["n"] == case


class Model(nn.Module):
    """Weights as views make them: the second is a view of the first's rows, and its dims are
    uneven.
    """

    def __init__(self, mesh, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(6, 4), torch.randn(5, 3), torch.randn(4)]
        kinds = [[Shard(1)], [_StridedShard(0, split_factor=2)], [_StridedShard(0, split_factor=3)]]
        parts = [distribute(x, mesh, kind).detach() for x, kind in zip(whole, kinds)]
        parts[0] = parts[0].view(3, 8)  # a strided shard of dim 1
        self.weights = nn.ParameterList([nn.Parameter(part) for part in parts])
        self.whole = [whole[0].view(3, 8), *whole[1:]]

    def step(self, optimizer):
        sum((weight * weight).sum() for weight in self.weights).full_tensor().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_dicts(folder):
    mesh = mesh_of_ranks([0, 1, 2, 3])
    with cute_sharding.enabled(redistribution=True):
        model = Model(mesh)
        assert any(isinstance(p, _StridedShard) for p in model.weights[0].placements), (
            model.weights[0]
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model.step(optimizer)
        whole = [weight.full_tensor().detach().clone() for weight in model.weights]
        plain, state = get_state_dict(model, optimizer)
        dcp.save({"model": plain, "optimizer": state}, checkpoint_id=f"{folder}/sharded")
        for offload in (False, True):
            full = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            states, moments = get_state_dict(model, optimizer, options=full)
            for n, expected in enumerate(whole):
                found = states.get(f"weights.{n}")
                everywhere(
                    (found is None and offload and dist.get_rank()) or torch.equal(found, expected),
                    f"weight {n}, offload {offload}",
                )
        states, moments = get_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        for options in (
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ):
            other = Model(mesh)
            another = torch.optim.Adam(other.parameters(), lr=0.1)
            mine = not options.broadcast_from_rank0 or dist.get_rank() == 0
            set_model_state_dict(
                other, copy.deepcopy(states) if mine else {}, options=options
            )  # it puts its own into what it is given
            set_optimizer_state_dict(
                other, another, copy.deepcopy(moments) if mine else {}, options=options
            )
            for n, expected in enumerate(whole):
                everywhere(held(other.weights[n], expected), f"weight {n} with {options}")
                moment = another.state[other.weights[n]]["exp_avg"]
                everywhere(
                    held(moment, optimizer.state[model.weights[n]]["exp_avg"].full_tensor()),
                    f"moment {n} with {options}",
                )
            other.step(another)
        other = Model(mesh)
        another = torch.optim.Adam(other.parameters(), lr=0.1)
        other.step(another)
        model_state, optimizer_state = get_state_dict(other, another)
        loaded = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(loaded, checkpoint_id=f"{folder}/sharded")
        for n, expected in enumerate(whole):
            everywhere(held(loaded["model"][f"weights.{n}"], expected), f"weight {n}, loaded")
            everywhere(
                held(
                    loaded["optimizer"]["state"][f"weights.{n}"]["exp_avg"],
                    optimizer.state[model.weights[n]]["exp_avg"].full_tensor(),
                ),
                f"moment {n}, loaded",
            )


def on_meta(folder):
    """A model that is made without memory, and filled from rank 0."""
    mesh = mesh_of_ranks([[0, 1], [2, 3]])
    placements = [_StridedShard(0, split_factor=2), Shard(1)]
    with cute_sharding.enabled():
        x = distribute(number((6, 4)) * 0, mesh, placements).detach()
        module = nn.Linear(4, 6, bias=False)
        module.weight = nn.Parameter(
            DTensor.from_local(
                x.to_local().to("meta"),
                mesh,
                placements,
                run_check=False,
                shape=x.shape,
                stride=x.stride(),
            )
        )
        set_model_state_dict(
            module,
            {"weight": number((6, 4)) + 1} if dist.get_rank() == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        assert not module.weight.is_meta
        everywhere(held(module.weight, number((6, 4)) + 1), "a weight on meta")


def round_trips(folder, seed, cases):
    rng = random.Random(seed)
    with cute_sharding.enabled():
        for _ in range(cases):
            shape = tuple(rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(rng.randint(1, 3)))
            mesh = mesh_of_ranks(rng.choice(MESHES[:3]))
            placements = drawn_placements(rng, mesh, len(shape))
            x = distribute(number(shape), mesh, placements)
            y = DTensor.from_local(
                x.to_local(), mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
            )
            everywhere(held(y, number(shape)), f"{shape} {placements}")
            y.to_local().mul(2.0).sum().backward()
            everywhere(
                torch.equal(x.grad.to_local(), torch.full_like(x.detach().to_local(), 2.0)),
                f"the gradient of {shape} {placements}",
            )
