"""Plain tensors that an op makes beside DTensors are replicas; those of the program are refused."""

import random

import numpy as np
import pytest
import torch
from drawing import draw_placements
from simulation import assert_holds, distribute, finished, mesh_of, plain, ranks_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding


def floats(*shape):
    with plain():
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def written(x, index, value):
    y = x * 1
    y[index] = value
    return y


INDICES = {
    "rows": [0, 2],
    "one row": [-1],
    "none": [],
    "columns": (slice(None), [0, 2, 1]),
    "pairs": ([0, 2], [1, 3]),
    "a matrix of rows": ([[0, 2], [1, 3]],),
    "many": [0, 1] * 20,
    "beside a slice": ([0, 2], slice(1, None)),
    "after dots": (..., [1]),
    "an array": np.array([0, 2]),
    "a range": range(2),
    "flags": [True, False, True, True, False, False],
    "a slice in a list": [slice(0, 2), 1],
}


def compare(program, operands, mesh, name):
    """With gradients, on replicas and on three drawn placements."""
    rng = random.Random(f"{name} {mesh}")
    with plain():
        ones = [x.clone().requires_grad_() for x in operands]
        expected = program(*ones)
        (expected * 2).sum().backward()
    with ranks_of(mesh), cute_sharding.enabled():
        for k in range(4):
            given = [
                distribute(
                    x, mesh, draw_placements(rng, mesh, x.shape) if k else [Replicate()] * len(mesh)
                )
                .detach()
                .requires_grad_()
                for x in operands
            ]
            found = program(*given)
            assert isinstance(found, DTensor)
            assert_holds(finished(found), expected.detach())
            (found * 2).sum().backward()
            for one, other in zip(given, ones):
                assert torch.allclose(one.grad.full_tensor().reconcile(), other.grad)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (1,)], ids=str)
@pytest.mark.parametrize("name", INDICES)
def test_lists_in_an_index(name, mesh):
    index = INDICES[name]
    compare(lambda x: x[index], [floats(6, 5)], mesh, name)
    compare(lambda x: written(x, index, 3.0), [floats(6, 5)], mesh, name)


def test_an_index_of_the_program_is_refused():
    with cute_sharding.enabled():
        x = DTensor.from_local(floats(3, 4), mesh_of((2,)), [Shard(0)], run_check=False)
        with pytest.raises(RuntimeError, match=r"mixed .* and DTensor"):
            x[torch.tensor([0, 2])]


MADE = {
    "quantile": lambda x: x.quantile(0.5, 0),
    "quantile of all": lambda x: x.quantile(0.3),
    "nanquantile": lambda x: x.nanquantile(0.25, 1, keepdim=True),
    "vander": lambda x: torch.vander(x[:, 0].detach(), 4) + x[:, :4],
    "linalg.vander": torch.linalg.vander,
    "combinations": lambda x: torch.combinations(x[0]),
}


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (1,)], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_constants_of_an_op_are_replicas(name, mesh):
    compare(MADE[name], [floats(6, 5)], mesh, name)


def test_numbers_beside_a_dtensor_stay_refused_in_such_an_op():
    with cute_sharding.enabled():
        x = DTensor.from_local(floats(3, 4), mesh_of((2,)), [Shard(0)], run_check=False)
        with pytest.raises(RuntimeError, match=r"mixed .* and DTensor"):
            x.quantile(torch.tensor([0.1, 0.9]), 1)


def parameters(mesh):
    """Three, of which the second is plain if there is a mesh."""
    found = []
    for i, shape in enumerate([(4, 3), (5,), (2, 2)]):
        p, g = floats(*shape), floats(*shape, 1).squeeze(-1)
        if mesh is not None:
            p, g = (distribute(x, mesh, [Replicate() if i == 1 else Shard(0)]) for x in (p, g))
        if mesh is not None and i == 1:  # a tensor of its own on each rank
            p, g = p.to_local(), g.to_local()
        found.append(nn.Parameter(p.detach().clone()))
        found[-1].grad = g.clone()
    return found


def stepped(optimizer, **options):
    def run(parameters):
        made = optimizer(parameters, lr=0.1, **options)
        for _ in range(2):
            made.step()

    return run


OVER_PARAMETERS = {
    "clip_grad_norm_": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5),
    "clip_grad_norm_, one by one": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, foreach=False),
    "clip_grad_value_": lambda ps: nn.utils.clip_grad_value_(ps, 0.1),
    "fused AdamW": stepped(torch.optim.AdamW, fused=True),
    "AdamW": stepped(torch.optim.AdamW, foreach=True, amsgrad=True),
    "SGD": stepped(torch.optim.SGD, foreach=True, momentum=0.9),
    "Adafactor": stepped(torch.optim.Adafactor, foreach=True),
}


def whole(x):
    return x.full_tensor().reconcile() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("name", OVER_PARAMETERS)
def test_plain_parameters_beside_dtensors(name):
    run = OVER_PARAMETERS[name]
    with plain():
        alone = parameters(None)
        expected = run(alone)
    with ranks_of((2,)), cute_sharding.enabled():
        beside = parameters((2,))
        found = run(beside)
        assert [isinstance(p, DTensor) for p in beside] == [True, False, True]
        pairs = [(x, y) for p, q in zip(alone, beside) for x, y in ((p, q), (p.grad, q.grad))]
        pairs += [(expected, found)] if expected is not None else []
        for one, other in pairs:
            other = whole(other)
            other = other.reconcile() if hasattr(other, "reconcile") else other
            assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("name", ["rows", "columns", "a matrix of rows"])
def test_lists_are_compiled(name):
    torch._dynamo.reset()
    index = INDICES[name]
    with cute_sharding.enabled():
        x = DTensor.from_local(floats(6, 5), mesh_of((2,)), [Replicate()], run_check=False)
        found = torch.compile(lambda x: x[index] + 1, backend="aot_eager")(x)
        assert torch.equal(found.to_local(), floats(6, 5)[index] + 1)
