"""Local tensors lie in the order of the strides of the whole, on every rank, after every op,
redistribution and movement: so a view that is legal on one device is legal on each.
"""

import random
from math import prod

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_placements
from movement_programs import listed
from op_programs import assert_close, values
from orders import lies_otherwise
from simulation import distribute, is_partial, mesh_of, plain, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding
from cute_sharding.dtensor.run.packing import memory_order

# What a program does to a tensor before it calls an op: (shape of the tensor, views of it).
LAYOUTS = {
    "rows": ((8, 4, 6), lambda x: x),
    "transposed": ((4, 6, 8), lambda x: x.transpose(0, 2)),
    "last two transposed": ((8, 6, 4), lambda x: x.transpose(1, 2)),
    "turned": ((6, 8, 4), lambda x: x.permute(1, 2, 0)),
    "expanded": ((8, 1, 6), lambda x: x.expand(8, 4, 6)),
    "heads": ((8, 24), lambda x: x.unflatten(-1, (4, 6)).transpose(1, 2).transpose(0, 1)),
    "a matrix": ((12, 8), lambda x: x.t()),
}


def to(*placements):
    def redistributed(x):
        whole = [Replicate()] * x.device_mesh.ndim if isinstance(x, DTensor) else []
        return x.redistribute(placements=[*placements, *whole][: len(whole)]) if whole else x

    return redistributed


OPS = {
    "to replicas": to(Replicate()),
    "to rows": to(Shard(0)),
    "to columns": to(Shard(1)),
    "rot90": torch.rot90,
    "rot90 back": lambda x: x.rot90(1, (1, 0)),
    "flip": lambda x: x.flip(0),
    "flip columns": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 0),
    "select": lambda x: x[0],
    "select column": lambda x: x[:, 0],
    "slice": lambda x: x[1:3],
    "slice columns": lambda x: x[:, 1:3],
    "split": lambda x: x.split(3),
    "chunk": lambda x: x.chunk(2, 1),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(3),
    "diagonal": lambda x: x.diagonal(1),
    "tril": lambda x: x.tril(),
    "pad": lambda x: F.pad(x, (1, 1)),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x], -1),
    "repeat": lambda x: x.repeat(*[2] * x.ndim),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.unflatten(0, (2, -1)),
    "sum": lambda x: x.sum(0),
    "product with itself": lambda x: x * x,
    "product with its rows": lambda x: x * x[:1],
    "sum with another order": lambda x: x + x.contiguous(),
    "product with a scaled copy": lambda x: x * (x.mean() * torch.ones_like(x)),
    "product with its mean": lambda x: x.mean(0).expand_as(x) * x,
    "where": lambda x: torch.where(x > 1.5, x, 0.0),
    "heads": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2) * 2,
    "softmax": lambda x: x.softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]).exp(),
    "cumsum": lambda x: x.cumsum(0),
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: F.linear(x, x.reshape(-1, x.shape[-1])[:2]),
    "kron": lambda x: torch.kron(x, x),
    "gather": lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)),
    "embedding": lambda x: F.embedding((x[0] * 0).long(), x.reshape(-1, x.shape[-1])),
    "zeros_like": torch.zeros_like,
    "rand_like": lambda x: torch.rand_like(x) * 0,
    "another dtype": lambda x: x.detach().view(torch.int32),
}
WORLDS = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)]}


@pytest.mark.one_in(200)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", OPS)
def test_views_that_are_legal_on_one_device_are_legal_on_each(name, world):
    rng = random.Random(f"{name} {world}")
    for layout, (shape, views) in LAYOUTS.items():
        mesh = rng.choice(WORLDS[world])
        placements = draw_placements(rng, mesh, shape, chance=0.1)
        case = f"{name} of {layout} on {mesh}: {placements}"
        with plain():
            whole = values(*shape).requires_grad_()
            wanted = listed(OPS[name](views(whole)))
            wanted.append(_gradient(whole, wanted))
        with ranks_of((world,)), cute_sharding.enabled(redistribution=True, movement=True):
            terms = prod(n for n, p in zip(mesh, placements) if is_partial(p))
            x = distribute(whole.detach() / terms, mesh, placements, requires_grad=True)
            results = listed(OPS[name](views(x)))
            results.append(_gradient(x, results))
            for tensor, want in zip(results, wanted, strict=True):
                if want is not None:
                    assert_lies_as_it_says(tensor, case)
                    assert_close(_in_memory(tensor).detach(), _in_memory(want, tensor), case)


def _gradient(x, results):
    if not results[0].requires_grad:
        return None
    return torch.autograd.grad(sum((each * each).sum() for each in results), x)[0]


def _in_memory(tensor, like=None):
    """The elements in the order of the strides, by a view, where that is legal on one device."""
    like = tensor if like is None else like
    order = memory_order(tuple(like.shape), like.stride())
    gaps = like.numel() != 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride()))
    lies = tensor.detach().permute(order)
    if isinstance(tensor, DTensor):
        return lies if gaps else lies.view(-1)
    with plain():
        return lies if gaps else lies.reshape(-1)


def assert_lies_as_it_says(tensor, case):
    assert lies_otherwise(tensor) is None, (case, lies_otherwise(tensor))


def test_a_compiled_program_for_many_sizes_leaves_what_an_eager_one_does():
    @torch.compile(backend="aot_eager")
    def cut(x):
        return x.redistribute(placements=[Shard(1)])

    with cute_sharding.enabled(redistribution=True):
        for rows in (4, 8, 12):
            x = DTensor.from_local(values(rows, 8), mesh_of((2,)), [Replicate()], run_check=False)
            assert cut(x).to_local().stride() == (4, 1)
            assert (
                cut(x.t()).to_local().stride()
                == x.t().redistribute(placements=[Shard(1)]).to_local().stride()
            )


AS_ASKED = {
    "to": lambda x, **asked: x.to(torch.bfloat16, **asked),
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "full_like": lambda x, **asked: torch.full_like(x, 2.0, **asked),
    "rand_like": torch.rand_like,
}


@pytest.mark.parametrize("name", AS_ASKED)
def test_a_memory_format_is_of_the_call_that_asks_for_it(name):
    op, asked = AS_ASKED[name], {"memory_format": torch.channels_last}
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(4, 3, 2, 5), (2,), [Shard(0)])
        op(x)
        made = op(x, **asked)
        assert made.stride() == (30, 1, 15, 3)
        assert_lies_as_it_says(made, name)
        assert op(x).stride() == (30, 10, 5, 1)


def test_a_dtype_is_of_the_call_that_asks_for_it():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(4, 6), (2,), [Shard(0)])
        for dtype in (torch.float32, torch.float64):
            assert torch.linalg.vector_norm(x, 2, 1, dtype=dtype).dtype == dtype


def test_convolutions_of_one_channel_on_each_device_lie_as_they_say():
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(values(2, 3, 4), (4,), [Shard(2)]).transpose(1, 2)
        result = F.conv1d(x, distribute(values(2, 4, 1), (4,), [Shard(1)]))
        assert_lies_as_it_says(result, "channels")
        assert result.view(4, 3).shape == (4, 3)


@pytest.mark.parametrize("flags", [{}, {"redistribution": True}], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_gradients_of_redistributions_lie_in_the_order_of_what_comes_in(placement, flags):
    with ranks_of((2,)), cute_sharding.enabled(**flags):
        x = distribute(values(6, 4), (2,), [placement], requires_grad=True)
        y = x.t().redistribute(placements=[Shard(0)]).contiguous()
        (gradient,) = torch.autograd.grad(y, x, y.detach())
        assert_lies_as_it_says(gradient, f"{placement}")
