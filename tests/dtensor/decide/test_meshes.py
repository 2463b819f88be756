"""Operands on several meshes: read on one where that is proved, numbers finished where they are,
and torch's error where nothing is proved.
"""

import meshes_worker
import pytest
import torch
import torch.nn.functional as F
from gloo import run
from op_programs import values
from simulation import plain, ranks_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, get_total_norm

import cute_sharding

R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
FLAGS = [{}, {"movement": True, "redistribution": True}]


class Meshes:
    """Of n * m ranks: "grid", of two dims; "rows" and "columns", its slices; "all", it flattened;
    "line", one that was made beside it; "padded", with a dim of one device.
    """

    def __init__(self, sizes):
        ranks = torch.arange(torch.Size(sizes).numel())
        self.grid = DeviceMesh("cpu", ranks.reshape(sizes), mesh_dim_names=("dp", "tp"))
        self.rows, self.columns = self.grid["dp"], self.grid["tp"]
        self.all = self.grid["dp", "tp"]._flatten("all")
        self.line = DeviceMesh("cpu", ranks)
        self.padded = DeviceMesh("cpu", ranks.reshape(-1, 1))

    def distribute(self, full, on, placements):
        mesh = getattr(self, on)
        x = distribute_tensor(full, mesh, placements)
        if isinstance(x._local_tensor, LocalTensor):
            return x
        with plain():  # a replica, of which all ranks would have one memory
            parts = {rank: full.clone() for rank in range(self.line.size())}
        return DTensor.from_local(LocalTensor(parts), mesh, placements, run_check=False)


# what is computed, of tensors (shape, mesh, placements), each on the same devices
OPS = {
    "a product": (
        torch.mul,
        ((12, 6), "all", [ROWS]),
        ((12, 6), "grid", [ROWS, ROWS]),
    ),
    "a product, the other way": (
        torch.mul,
        ((12, 6), "grid", [ROWS, ROWS]),
        ((12, 6), "line", [ROWS]),
    ),
    "a replica": (torch.mul, ((12, 12), "all", [R]), ((12, 12), "grid", [COLUMNS, ROWS])),
    "a mesh dim of one device": (
        torch.mul,
        ((12, 6), "padded", [ROWS, COLUMNS]),
        ((12, 6), "line", [COLUMNS]),
    ),
    "mm": (torch.mm, ((12, 6), "line", [ROWS]), ((6, 12), "grid", [ROWS, COLUMNS])),
    "a layer": (
        F.linear,
        ((12, 6), "grid", [ROWS, R]),
        ((12, 6), "all", [ROWS]),
        ((12,), "all", [ROWS]),
    ),
    "cat": (
        lambda a, b: torch.cat([a, b]),
        ((12, 12), "grid", [ROWS, R]),
        ((12, 12), "all", [ROWS]),
    ),
    "where": (
        lambda a, b: torch.where(a > 0, a, b),
        ((12, 6), "grid", [ROWS, R]),
        ((12, 6), "line", [ROWS]),
    ),
    "a loss": (F.mse_loss, ((12, 6), "grid", [ROWS, ROWS]), ((12, 6), "all", [ROWS])),
    "a number": (
        lambda a, b: a * b.sum(),
        ((12, 6), "rows", [ROWS]),
        ((12, 6), "columns", [ROWS]),
    ),
    "a sum of losses": (
        lambda a, b: a.pow(2).sum() + b.pow(2).sum(),
        ((12, 6), "rows", [ROWS]),
        ((12, 6), "columns", [COLUMNS]),
    ),
    "of a mesh and its slice": (
        lambda a, b: a.pow(2).sum() * b.sin().sum(),
        ((12, 6), "grid", [ROWS, COLUMNS]),
        ((7, 3), "rows", [ROWS]),
    ),
}


def whole(x):
    x = x.full_tensor()
    return x.reconcile() if hasattr(x, "reconcile") else x


@pytest.mark.one_in(12)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("case", OPS)
def test_ops_are_those_of_one_device(case, sizes, flags):
    function, *operands = OPS[case]
    fulls = [values(*shape) for shape, _, _ in operands]
    with plain():
        wanted_of = [full.clone().requires_grad_() for full in fulls]
        wanted = function(*wanted_of)
        wanted.sum().backward()
    with ranks_of(sizes), cute_sharding.enabled(**flags):
        meshes = Meshes(sizes)
        tensors = [
            meshes.distribute(full, *where).requires_grad_()
            for full, (_, *where) in zip(fulls, operands, strict=True)
        ]
        result = function(*tensors)
        torch.testing.assert_close(whole(result.detach()), wanted.detach(), atol=1e-4, rtol=1e-4)
        result.sum().backward()
        for x, of in zip(tensors, wanted_of, strict=True):
            torch.testing.assert_close(whole(x.grad), of.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.one_in(1)
def test_what_is_read_on_another_mesh_is_not_sent():
    with ranks_of((2, 2)), cute_sharding.enabled():
        meshes = Meshes((2, 2))
        a = meshes.distribute(values(8, 4), "all", [ROWS])
        b = meshes.distribute(values(8, 4), "grid", [ROWS, ROWS])
        with CommDebugMode() as sent:
            result = a * b
            a += b
            torch._foreach_mul_([a, b], [b, a])
        assert not sent.get_total_counts()
        assert result.device_mesh == meshes.grid
        assert result.placements == b.placements
        assert a.device_mesh == meshes.all


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "operands",
    [
        [((8, 4), "rows", [ROWS]), ((8, 4), "columns", [ROWS])],
        [((8, 4), "rows", [R]), ((8, 4), "columns", [R])],
        [((8, 4), "rows", [R]), ((8, 4), "grid", [R, R])],
        [((8, 4), "rows", [ROWS]), ((8, 4), "grid", [ROWS, R])],
        [((6, 4), "all", [ROWS]), ((6, 4), "grid", [ROWS, ROWS])],
    ],
    ids=str,
)
def test_what_is_not_proved_is_refused(operands):
    """A tensor on a slice may be another on the next one, and uneven blocks are other rows."""
    with ranks_of((2, 2)), cute_sharding.enabled():
        meshes = Meshes((2, 2))
        a, b = (meshes.distribute(values(*shape), *where) for shape, *where in operands)
        with pytest.raises(RuntimeError, match="mesh"):
            a * b


GRADIENTS = {
    "slices": [((6, 4), "rows", [ROWS]), ((5, 3), "columns", [COLUMNS]), ((7,), "rows", [ROWS])],
    "a mesh and its slice": [((6, 4), "rows", [ROWS]), ((8, 4), "grid", [ROWS, COLUMNS])],
    "a slice first": [((8, 4), "grid", [ROWS, COLUMNS]), ((6, 4), "columns", [R])],
    "flattened": [((8, 4), "all", [ROWS]), ((5, 4), "grid", [ROWS, COLUMNS])],
    "beside it": [((8, 4), "line", [ROWS]), ((5, 4), "rows", [ROWS]), ((5, 4), "columns", [R])],
}


def parameters(meshes, of):
    """(of one device, the same as DTensors), with gradients."""
    full, sharded = [], []
    for shape, *where in GRADIENTS[of]:
        with plain():
            one = torch.nn.Parameter(values(*shape))
            one.grad = values(*shape) * 3
        many = torch.nn.Parameter(meshes.distribute(one.detach(), *where))
        many.grad = meshes.distribute(one.grad, *where)
        full.append(one)
        sharded.append(many)
    return full, sharded


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("foreach", [None, False], ids=["foreach", "one by one"])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("of", GRADIENTS)
def test_gradients_are_clipped_by_the_norm_of_all(of, order, foreach, flags):
    with ranks_of((2, 2)), cute_sharding.enabled(**flags):
        full, sharded = parameters(Meshes((2, 2)), of)
        with plain():
            wanted = clip_grad_norm_(full, 1.5, order, foreach=foreach)
        total = clip_grad_norm_(sharded, 1.5, order, foreach=foreach)
        assert all(p == R for p in total.placements)
        torch.testing.assert_close(whole(total), wanted)
        for p, one in zip(sharded, full, strict=True):
            torch.testing.assert_close(whole(p.grad), one.grad)


@pytest.mark.one_in(1)
def test_norms_of_one_mesh_are_finished_together():
    with ranks_of((2, 2)), cute_sharding.enabled():
        meshes = Meshes((2, 2))
        rows = [meshes.distribute(values(6, 4), "rows", [ROWS]) for _ in range(5)]
        columns = [meshes.distribute(values(6, 4), "columns", [ROWS]) for _ in range(5)]
        with CommDebugMode() as sent:
            get_total_norm([*rows, *columns])
        assert sum(sent.get_comm_counts().values()) == 2


@pytest.mark.one_in(1)
def test_stock_refuses_all_this():
    """Else it may go."""
    with ranks_of((2, 2)):
        _, sharded = parameters(Meshes((2, 2)), "slices")
        with pytest.raises(RuntimeError, match="same mesh"):
            clip_grad_norm_(sharded, 1.5)


@pytest.mark.one_in(1)
def test_what_is_pending_is_pending_on_the_other_mesh():
    with ranks_of((2, 2)), cute_sharding.enabled():
        meshes = Meshes((2, 2))
        full = values(8, 4)
        a = meshes.distribute(full, "all", [COLUMNS]).sum(1)
        b = meshes.distribute(full[:, 0], "grid", [R, R])
        assert a.placements == (Partial(),)
        with plain():
            wanted = full.sum(1) * full[:, 0]
        torch.testing.assert_close(whole(a * b), wanted)


@pytest.mark.costly
@pytest.mark.one_in(1)
def test_processes(tmp_path):
    """Optimizers and the compiler; and meshes of other ranks."""
    run(4, tmp_path, (meshes_worker.train,), (meshes_worker.numbers_of_other_ranks,))
