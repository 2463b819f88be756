"""Writes by mask, and ops that go through elements in their order: as on one device, forward and
backward. Ops whose results have no shape that is known say what to do.
"""

import pytest
import torch
from op_programs import S, assert_close, compare, index, values
from simulation import distribute, mesh_of, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

R = Replicate()
LAID = [
    ((2,), [R]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((3,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [S(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [S(1), R]),
]
FLAGS = [{}, {"movement": True, "redistribution": True}]


def put(x, mask, value):
    x = x * 1
    x[mask] = value
    return x


WRITES = {
    "a number": lambda x: put(x, x > 0, 0),
    "a tensor without dims": lambda x: put(x, x > 0, torch.tensor(5.0)),
    "a mask of rows": lambda x: put(x, x[:, 0] > 0, 3),
    "a mask of columns": lambda x: put(x, (slice(None), x[0] > 0), 3),
    "a row for each": lambda x: put(x, x[:, 0] > 0, x.detach()[0]),
    "of three dims": lambda x: put(x.view(7, 2, 3), x.view(7, 2, 3)[..., 0] > 0, 2),
    "one more dim": lambda x: put(x, x > 0, x.detach().sum().view(1)),
    "index_put": lambda x: x.index_put((x > 0,), x.detach().sum()),
    "accumulated": lambda x: x.index_put((x > 0,), x.detach().sum(), accumulate=True),
    "an index that is no mask": lambda x: put(x, x[:, 0].argmax(), 3),
    "a mask that is replicated": lambda x: put(x, replicated(x > 0), 0),
    "none": lambda x: put(x, x > 100, 0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.flip(0) * 2),
    "masked_scatter by rows": lambda x: x.masked_scatter(x[:, :1] > 0, x * 2),
    "masked_scatter_": lambda x: (x * 1).masked_scatter_(x > 0, x * 2),
    "nonzero_static": lambda x: torch.nonzero_static(x > 0, size=5),
    "searchsorted": lambda x: torch.searchsorted(x.detach().sort(1).values, x.detach()),
    "searchsorted, one row": lambda x: torch.searchsorted(x.detach()[0].sort().values, x.detach()),
    "searchsorted, a number": lambda x: torch.searchsorted(x.detach()[0].sort().values, 0.25),
    "searchsorted, not sorted": lambda x: torch.searchsorted(
        x.detach(), x.detach(), sorter=x.detach().argsort(1)
    ),
}


def replicated(x):
    return x.redistribute(placements=[R] * x.device_mesh.ndim) if isinstance(x, DTensor) else x


@pytest.mark.one_in(60)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(("mesh", "placements"), LAID, ids=str)
@pytest.mark.parametrize("program", WRITES)
def test_programs(program, mesh, placements, flags):
    with ranks_of(mesh):
        compare(WRITES[program], [values(7, 6)], mesh, [placements], program, **flags)


FULL = values(7, 6)
COUNTS = [int((part > 0).sum()) for part in (FULL, FULL[:, 0], FULL[0])]
GIVEN = {
    "a number": (lambda x, v: put(x, x > 0, v), ()),
    "one element": (lambda x, v: put(x, x > 0, v), (1,)),
    "one for each element": (lambda x, v: put(x, x > 0, v), (COUNTS[0],)),
    "a row": (lambda x, v: put(x, x[:, 0] > 0, v), (6,)),
    "a row of rows": (lambda x, v: put(x, x[:, 0] > 0, v), (1, 6)),
    "one for each row": (lambda x, v: put(x, x[:, 0] > 0, v), (COUNTS[1], 1)),
    "a row for each": (lambda x, v: put(x, x[:, 0] > 0, v), (COUNTS[1], 6)),
    "a column": (lambda x, v: put(x, (slice(None), x[0] > 0), v), (7, 1)),
    "a column for each": (lambda x, v: put(x, (slice(None), x[0] > 0), v), (7, COUNTS[2])),
    "bytes": (lambda x, v: put(x, (x > 0).byte(), v), (COUNTS[0],)),
    "index_put": (lambda x, v: x.index_put((x > 0,), v), ()),
    "accumulated": (lambda x, v: x.index_put((x > 0,), v, accumulate=True), (1,)),
    "accumulated for each": (lambda x, v: x.index_put((x > 0,), v, accumulate=True), (COUNTS[0],)),
    "nothing": (lambda x, v: put(x, x > 100, v), ()),
    "an index that is no mask": (lambda x, v: put(x, x[:, 0].argmax(), v), (6,)),
    "of the tensor itself": (lambda x, v: put(x, x > 0, x.mean() * v), ()),
    "the gradient of a gradient": (
        lambda x, v: torch.autograd.grad(
            (put(x, x[:, 0] > 0, v**3) * x.detach()).sum(), v, create_graph=True
        )[0],
        (6,),
    ),
}


@pytest.mark.one_in(60)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("of", [R, Shard(0)], ids=str)
@pytest.mark.parametrize(("mesh", "placements"), LAID, ids=str)
@pytest.mark.parametrize("program", GIVEN)
def test_values_have_gradients(program, mesh, placements, of, flags):
    function, shape = GIVEN[program]
    laid = [placements, [of if shape else R] * len(mesh)]
    with ranks_of(mesh):
        compare(function, [FULL, values(*shape)], mesh, laid, program, **flags)


SCATTERED = {
    **{
        f"{reduce}{'' if include else ' without self'}": (
            lambda x, i, reduce=reduce, include=include: x.scatter_reduce(
                0, i, x[:5, :4] * 2, reduce, include_self=include
            )
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    },
    "of columns": lambda x, i: x.scatter_reduce(1, i, x[:5, :4] * 2, "amax"),
    "a longer source": lambda x, i: x.scatter_reduce(0, i, x.detach(), "sum"),
    "in place": lambda x, i: (x * 1).scatter_reduce_(0, i, x[:5, :4] * 2, "amax"),
    "scatter": lambda x, i: x.scatter(0, i % 1 + torch.zeros_like(i), x[:5, :4]),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x.detach()),
    "multiplied": lambda x, i: x.detach().scatter(0, i, x[:5, :4].detach(), reduce="multiply"),
    "a number added": lambda x, i: (x.detach() * 1).scatter_(0, i, 2.0, reduce="add"),
    "gather of fewer columns": lambda x, i: x.gather(0, i),
    "gather of one row": lambda x, i: x.gather(0, i[:1]),
    "put": lambda x, i: x.put(i[0], x[0, :4]),
    "put_": lambda x, i: (x * 1).put_(i[0], x[0, :4]),
}


@pytest.mark.one_in(60)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(("mesh", "placements"), LAID, ids=str)
@pytest.mark.parametrize("program", SCATTERED)
def test_scattered(program, mesh, placements, flags):
    with ranks_of(mesh):
        compare(
            SCATTERED[program],
            [values(7, 6), index(5, 4, below=5)],
            mesh,
            [placements, [R] * len(mesh)],
            program,
            **flags,
        )


@pytest.mark.parametrize(("mesh", "placements"), LAID, ids=str)
def test_a_value_for_each(mesh, placements):
    """The third of them may be any device's."""
    full = values(7, 6)
    count = int((full > 0).sum())
    with ranks_of(mesh):
        compare(
            lambda x, v: put(x, x > 0, v.detach()),
            [full, values(count)],
            mesh,
            [placements, [Shard(0)] * len(mesh)],
            "a value for each",
        )


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("mesh", "placements"), LAID, ids=str)
def test_what_lies_alike_is_written_where_it_is(mesh, placements):
    with ranks_of(mesh), cute_sharding.enabled():
        x = distribute(values(7, 6), mesh, placements)
        mask = x > 0
        with CommDebugMode() as said:
            x[mask] = 0
            x[mask] = torch.tensor(2.0)
        assert said.get_total_counts() == 0
        assert tuple(x.placements) == tuple(placements)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("of", [R, Shard(0), Shard(1), S(0)], ids=str)
@pytest.mark.parametrize("given", [R, Shard(0), Shard(1), Partial()], ids=str)
def test_rows_by_number(of, given):
    rows, row = torch.tensor([0, 2]), values(2, 6)
    wanted = FULL.clone()
    wanted[rows] = 2 * row if given == Partial() else row
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(FULL.clone(), (2,), [of])
        x[distribute(rows, (2,), [R])] = distribute(row, (2,), [given])
        assert x.placements == (of,)
        assert_close(x, wanted, f"{of} {given}")


def test_what_is_pending_is_finished_first():
    mesh = (2,)
    with ranks_of(mesh):
        compare(WRITES["a number"], [values(7, 6) / 2], mesh, [[R]], "pending")
        with cute_sharding.enabled():
            x = distribute(values(7, 6) / 2, mesh, [Partial()])
            x[x > 0] = 5
            found = x.full_tensor().reconcile()
            wanted = values(7, 6)
            wanted[wanted > 0] = 5
            assert torch.allclose(found, wanted)


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("op", "kind", "words"),
    [
        (lambda x: torch.nonzero(x, out=x.long()), RuntimeError, r"writes to a tensor.*returns"),
        (lambda x: torch.histogram(x, 5), NotImplementedError, r"\[S\(0\)\].*full_tensor"),
    ],
)
def test_what_has_no_rule_says_what_to_do(op, kind, words):
    with cute_sharding.enabled():
        x = DTensor.from_local(values(3, 4), mesh_of((2,)), [Shard(0)], run_check=False)
        with pytest.raises(kind, match=words):
            op(x)


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "program", [lambda x, _: WRITES["a number"](x), GIVEN["a row"][0]], ids=["a number", "a row"]
)
def test_compiled(program):
    """As rank 0 of two."""
    with cute_sharding.enabled(movement=True):
        found = []
        for run in (program, torch.compile(program, backend="aot_eager")):
            x = DTensor.from_local(values(4, 3), mesh_of((2,)), [Shard(1)], run_check=False)
            v = DTensor.from_local(values(3), mesh_of((2,)), [Shard(0)], run_check=False)
            x.requires_grad_()
            y = run(x, v.requires_grad_())
            (y * y + v).sum().backward()
            found.append((y.to_local(), x.grad.to_local(), v.grad.to_local()))
    assert all(map(torch.equal, *found))
