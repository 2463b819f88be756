"""Specs of _StridedShard placements that encode an order of mesh dims, where sizes do not divide.
torch's redistribution reads them so, and fully_shard lays tensors out so.
"""

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from enumeration import devices, held, held_by_a_dtensor
from readings import MESH, PLACEMENTS, laid
from simulation import cuts_of, distribute, locals_of, mesh_of, plain, ranks_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.run.packing import OtherShape
from cute_sharding.dtensor.run.placements import agree, chains_of_spec, left_to_right
from cute_sharding.propagation.views import carry
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding.rows import count_rows, rows_held

R2 = [Replicate(), Replicate()]


def everywhere(tensor):
    local = tensor._local_tensor
    return list(local._local_tensors.values()) if isinstance(local, LocalTensor) else [local]


def is_left_to_right(tensor):
    spec = tensor._spec
    said = tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements)
    return chains_of_spec(spec) == left_to_right(*said)


@pytest.mark.parametrize("n", [8, 9, 11, 16, 17])
def test_it_is_in_the_order(n):
    """As torch alone has it, also there and back; and a gradient lies as its tensor does."""
    full = torch.arange(3.0 * n).reshape(n, 3)
    for settings in ({"redistribution": True}, {"views": False, "redistribution": True}, None):
        with (
            ranks_of(MESH),
            cute_sharding.enabled(**settings) if settings else nullcontext(),
        ):
            tensor = laid(full).requires_grad_()
            whole = tensor.redistribute(placements=R2)
            assert all(torch.equal(local, full) for local in everywhere(whole))
            (gradient,) = torch.autograd.grad((whole * 2).sum(), tensor)
            shapes = [local.shape for local in everywhere(tensor)]
            assert [local.shape for local in everywhere(gradient)] == shapes
            assert all((local == 2).all() for local in everywhere(gradient))
            back = distribute(full, MESH, R2).redistribute(placements=PLACEMENTS)
            for got, wanted in zip(everywhere(back), everywhere(laid(full))):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("n", [8, 9, 11, 17])
def test_distribute_tensor_lays_it_out_in_the_order(n, source):
    full = torch.arange(3.0 * n).reshape(n, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        tensor = distribute_tensor(full, mesh_of(MESH), PLACEMENTS, src_data_rank=source)
        for got, wanted in zip(everywhere(tensor), everywhere(laid(full))):
            assert torch.equal(got, wanted)
        assert all(torch.equal(x, full) for x in everywhere(tensor.redistribute(placements=R2)))
        view = tensor.view(n, 3, 1).redistribute(placements=R2)
        assert all(torch.equal(x, full.view(n, 3, 1)) for x in everywhere(view))


@pytest.mark.parametrize("n", [9, 11, 17])
@pytest.mark.parametrize("make", ["ones", "full", "new_ones", "new_full", "ones_like"])
def test_what_is_made_has_the_sizes_of_the_order(make, n):
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        if make in ("ones", "full"):
            given = ((n, 3), 1.0) if make == "full" else (n, 3)
            made = getattr(torch.distributed.tensor, make)(
                *given, device_mesh=mesh_of(MESH), placements=PLACEMENTS
            )
        elif make == "ones_like":
            made = torch.ones_like(laid(torch.zeros(n, 3)))
        else:
            given = ((n, 3), 1.0) if make == "new_full" else ((n, 3),)
            made = getattr(laid(torch.zeros(n, 3)), make)(*given)
        if made.placements == tuple(PLACEMENTS):
            wanted = [x.shape for x in everywhere(laid(torch.zeros(n, 3)))]
            assert [x.shape for x in everywhere(made)] == wanted
        whole = made.redistribute(placements=R2)
        assert all(torch.equal(x, torch.ones(n, 3)) for x in everywhere(whole))


def test_which_is_another_where_sizes_do_not_divide():
    with ranks_of(MESH):
        assert [is_left_to_right(laid(torch.zeros(n, 3))) for n in (9, 16)] == [False, True]
        spec = laid(torch.zeros(9, 3))._spec
        assert not agree((9, 3), spec, PLACEMENTS) and agree((16, 3), spec, PLACEMENTS)


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 4), (2, 2, 2)], ids=str)
def test_views_give_what_is_left_to_right(mesh):
    """Counted out: a free view of what is cut left to right has no placements that torch would read
    as an order that is another.
    """
    free = 0

    def is_one(shape, cuts):
        return all(
            np.array_equal(
                held(shape, mesh, cuts, device), held_by_a_dtensor(shape, mesh, cuts, device)
            )
            for device in devices(mesh)
        )

    shapes = [(6,), (2, 3), (3, 2), (9,), (3, 3), (10,), (5, 2), (2, 5), (12,), (3, 4), (4, 3)]
    kinds = [None, (0, 1), (1, 1), (0, 2), (1, 2), (0, 4)][: 6 if len(mesh) == 2 else 4]
    for shape, target in product(shapes, shapes):
        if torch.Size(shape).numel() != torch.Size(target).numel() or shape == target:
            continue
        view = BY_OP["Tensor.view"].view(shape, target)
        for cuts in product(kinds, repeat=len(mesh)):
            if any(cut and cut[0] >= len(shape) for cut in cuts) or not is_one(shape, cuts):
                continue
            found = carry(view, cuts, mesh)
            if found.blocked is None:
                free += 1
                assert is_one(target, found.cuts), (shape, cuts, target, found.cuts)
    assert free > 200


def test_other_sizes_are_refused():
    """Of a local tensor that is laid out left to right: by the rank that has it."""
    full = torch.arange(27.0).reshape(9, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        index = {
            rank: full.reshape(-1)[torch.from_numpy(held((9, 3), MESH, cuts_of(PLACEMENTS), at))]
            for rank, at in enumerate(devices(MESH))
        }
        tensor = DTensor.from_local(
            LocalTensor(index),
            mesh_of(MESH),
            PLACEMENTS,
            run_check=False,
            shape=torch.Size((9, 3)),
            stride=(3, 1),
        )
        with pytest.raises(OtherShape, match=r"has shape \(.*\), but the DTensor's global"):
            tensor.full_tensor()


def test_views_are_in_the_order():
    full = torch.arange(27.0).reshape(9, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        # Whole dims keep their cuts, whatever these mean.
        turned = laid(full).t()
        assert tuple(turned.placements) == (_StridedShard(1, split_factor=2), Shard(1))
        assert all(
            torch.equal(local, full.t()) for local in everywhere(turned.redistribute(placements=R2))
        )
        # A view is given local sizes, and torch counts these left to right.
        viewed = laid(full).view(9, 3, 1)
        assert tuple(viewed.placements) == (Replicate(), Replicate())
        assert all(torch.equal(local, full.view(9, 3, 1)) for local in everywhere(viewed))
    with ranks_of(MESH), cute_sharding.enabled():
        for shape in ((9, 3, 1), (27,)):
            flat = laid(full).view(shape)
            assert tuple(flat.placements) == (Replicate(), Replicate())
            assert all(torch.equal(local, full.view(shape)) for local in everywhere(flat))


def test_views_of_what_says_an_order_of_its_own():
    """Shard placements, and the order beside them."""
    full = torch.arange(30.0).reshape(10, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        order = (ShardOrderEntry(0, (1, 0)),)
        x = laid(full)
        spec = DTensorSpec(mesh_of(MESH), (Shard(0), Shard(0)), x._spec.tensor_meta, order)
        viewed = DTensor(x._local_tensor, spec, requires_grad=False).view(5, 2, 3)
        assert tuple(viewed.placements) == (Replicate(), Replicate())
        assert all(torch.equal(local, full.view(5, 2, 3)) for local in everywhere(viewed))


def test_what_divides_is_left_to_right():
    full = torch.arange(48.0).reshape(16, 3)
    with ranks_of(MESH), cute_sharding.enabled():
        viewed = distribute(full, MESH, PLACEMENTS).view(48)
        assert any(isinstance(p, _StridedShard) for p in viewed.placements)
        expected = locals_of(
            full.view(48), MESH, [(p.dim, getattr(p, "split_factor", 1)) for p in viewed.placements]
        )
        assert all(
            torch.equal(local, expected[rank]) for rank, local in enumerate(everywhere(viewed))
        )


@pytest.mark.parametrize("imagined", ["meta", "fake"])
def test_where_there_is_no_data(imagined):
    """A module on meta, or a dry run: as torch reads it, in the order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows_of_rank_0 = count_rows(rows_held(50001, ((1, 2, 0), (1, 4, 0))))
    with (
        cute_sharding.enabled(redistribution=True),
        FakeTensorMode() if imagined == "fake" else nullcontext(),
    ):
        local = torch.empty(rows_of_rank_0, 8, device="meta" if imagined == "meta" else "cpu")
        tensor = DTensor.from_local(
            local,
            mesh_of(MESH),
            PLACEMENTS,
            run_check=False,
            shape=torch.Size((50001, 8)),
            stride=(8, 1),
        )
        assert not is_left_to_right(tensor)
        assert tuple(tensor.full_tensor().shape) == (50001, 8)


@pytest.mark.parametrize("redistribution", [False, True])
@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("slice", lambda x: x[3:12]),
        ("all but the last", lambda x: x[:9]),
        ("cat", lambda x: torch.cat([x, x[:1]])),
        ("pad", lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))),
        ("windows", lambda x: x.unfold(0, 8, 1)),
        ("pieces", lambda x: torch.cat([part * 2 for part in x.tensor_split([1, 10])])),
        ("quarter turn", lambda x: torch.rot90(x[:9], -1, [0, 1])),
    ],
)
def test_movements_give_what_is_left_to_right(name, program, redistribution):
    """16 rows are the same left to right and in the order, 9 and 17 are not: torch would read them
    as the order.
    """
    full = torch.arange(48.0).reshape(16, 3)
    with plain():
        leaf = full.clone().requires_grad_()
        wanted = program(leaf)
        (wanted_gradient,) = torch.autograd.grad((wanted * wanted).sum(), leaf)
    with ranks_of(MESH), cute_sharding.enabled(movement=True, redistribution=redistribution):
        x = laid(full).requires_grad_()
        result = program(x)
        assert is_left_to_right(result)
        (gradient,) = torch.autograd.grad((result * result).sum(), x)
        for found, whole in ((result, wanted.detach()), (gradient, wanted_gradient)):
            replica = found.redistribute(placements=[Replicate(), Replicate()])
            assert all(torch.equal(local, whole) for local in everywhere(replica)), name
