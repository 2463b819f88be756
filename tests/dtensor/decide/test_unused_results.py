"""Results that nobody uses: autograd fills in plain zeros for their gradients, and its ops on them
and on DTensors run, as on one device.
"""

import pytest
import torch
from op_programs import S, assert_close, compare, values
from simulation import distribute, mesh_of, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_sharding

R = Replicate()
PROGRAMS = {
    "unbind": lambda x: x.unbind()[1] * 2,
    "unbind of the last": lambda x: x.unbind(-1)[0] * 2,
    "unbind, two of them": lambda x: x.unbind()[0] * x.unbind()[3],
    "split": lambda x: x.split(2)[1] * 2,
    "split of columns": lambda x: x.split(3, 1)[0] * 2,
    "split with sizes": lambda x: x.split([1, 4, 2])[1] * 2,
    "chunk": lambda x: x.chunk(3)[2] * 2,
    "tensor_split": lambda x: x.tensor_split(3)[0] * 2,
    "unsafe_split": lambda x: torch.unsafe_split(x, 3)[0] * 2,
    "unbind_copy": lambda x: torch.unbind_copy(x)[2] * 2,
    "of a view": lambda x: x.view(7, 2, 3).unbind(1)[0] * 2,
    "what is pending": lambda x: x.unbind()[1].sum() * x.unbind()[0],
    "cummax": lambda x: x.cummax(0).values * 2,
    "cumprod": lambda x: x.cumprod(1) * 2,
    "trace": lambda x: x.trace() * 2,
}
LAID = [
    ((2,), [R]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((3,), [Shard(0)]),
    ((4,), [Shard(0)]),
    ((4,), [S(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [S(0), Shard(0)]),
    ((2, 2), [R, Shard(0)]),
]


@pytest.mark.one_in(40)
@pytest.mark.parametrize("flags", [{}, {"movement": True, "redistribution": True}], ids=str)
@pytest.mark.parametrize(("mesh", "placements"), LAID, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_one_device(program, mesh, placements, flags):
    with ranks_of(mesh):
        compare(PROGRAMS[program], [values(7, 6)], mesh, [placements], program, **flags)


@pytest.mark.one_in(1)
def test_zeros_are_no_part_of_what_is_pending():
    """Of a gradient that is pending beside one that is not there."""
    mesh = (2,)
    with ranks_of(mesh), cute_sharding.enabled():
        x = distribute(values(4, 6), mesh, [R], requires_grad=True)
        used, *_ = x.unbind()
        gradient = distribute(values(6) / 2, mesh, [Partial()])
        used.backward(gradient)
    with plain():
        wanted = torch.zeros(4, 6)
        wanted[0] = values(6)
    assert_close(x.grad, wanted, "pending")


@pytest.mark.one_in(1)
def test_what_a_program_mixes_is_refused_still():
    """In its own functions too, which autograd runs in nodes of its graph."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return torch.stack([gradient, torch.ones(4, 6)])[0]

    mesh = (2,)
    with ranks_of(mesh), cute_sharding.enabled(movement=True):
        x = distribute(values(4, 6), mesh, [R], requires_grad=True)
        for function in (
            lambda: torch.stack([x, torch.ones(4, 6)]),
            lambda: torch.cat([x, torch.ones(4, 6)]),
            lambda: Mixed.apply(x).sum().backward(),
        ):
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                function()


@pytest.mark.one_in(1)
def test_twice():
    """The gradient of a gradient."""
    mesh = (2,)
    with ranks_of(mesh), cute_sharding.enabled(movement=True):
        x = distribute(values(5, 6), mesh, [Shard(0)], requires_grad=True)
        first, *_ = x.unbind()
        (once,) = torch.autograd.grad((first**3).sum(), x, create_graph=True)
        assert isinstance(once, DTensor)
        (twice,) = torch.autograd.grad(once.sum(), x)
    with plain():
        wanted = torch.zeros(5, 6)
        wanted[0] = 6 * values(5, 6)[0]
    assert_close(twice, wanted, "twice")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("placements", [[R], [Shard(0)], [Shard(1)]], ids=str)
def test_compiled(placements):
    """As rank 0 of two, of which the other is made up: so nothing is compared that is moved."""

    def program(x):
        rows, *_ = x.unbind(1 if placements == [Shard(0)] else 0)
        parts = x.chunk(2, 1 if placements == [Shard(0)] else 0)
        return (rows * rows).sum() + (parts[1] * 3).sum()

    with cute_sharding.enabled(movement=True, redistribution=True):
        found = []
        for run in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
            local = values(4, 6)
            x = DTensor.from_local(local, mesh_of((2,)), placements, run_check=False)
            x.requires_grad_()
            run(x).backward()
            found.append(x.grad.to_local())
    assert torch.equal(*found)
