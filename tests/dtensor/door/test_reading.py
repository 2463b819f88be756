"""Specs of _StridedShard placements that torch's redistribution takes for a shard order, where
sizes do not divide: tensors of both kinds exist.
"""

from contextlib import nullcontext

import pytest
import torch
from readings import MESH, PLACEMENTS, laid
from simulation import distribute, locals_of, mesh_of, plain, ranks_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced import tensor_specs
from cute_sharding.dtensor.run import reading
from cute_sharding.sharding.meeting import count_rows, rows_held


def everywhere(tensor):
    local = tensor._local_tensor
    return list(local._local_tensors.values()) if isinstance(local, LocalTensor) else [local]


@pytest.mark.parametrize("by_order", [True, False])
@pytest.mark.parametrize("n", [8, 9, 11, 16, 17])
def test_the_local_shapes_tell(n, by_order):
    full = torch.arange(3.0 * n).reshape(n, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        tensor = laid(full, by_order).requires_grad_()
        whole = tensor.redistribute(placements=[Replicate(), Replicate()])
        assert all(torch.equal(local, full) for local in everywhere(whole))
        # And back, as autograd does: the gradient lies as the tensor does.
        (gradient,) = torch.autograd.grad((whole * 2).sum(), tensor)
        shapes = [local.shape for local in everywhere(tensor)]
        assert [local.shape for local in everywhere(gradient)] == shapes
        assert all(torch.equal(local, torch.full_like(local, 2)) for local in everywhere(gradient))


@pytest.mark.parametrize("seen_before", [None, True, False])
def test_a_result_is_laid_out_in_the_order(seen_before):
    """As torch's own redistribution lays it out and fully_shard has it, whatever tensors came by
    before.
    """
    full = torch.arange(27.0).reshape(9, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        if seen_before is not None:
            laid(full, seen_before).full_tensor()
        result = distribute(full, MESH, [Replicate(), Replicate()]).redistribute(
            placements=PLACEMENTS
        )
        for got, wanted in zip(everywhere(result), everywhere(laid(full, by_order=True))):
            assert torch.equal(got, wanted)


def test_there_are_two_readings():
    with ranks_of(MESH):
        uneven, even = (laid(torch.zeros(n, 3), by_order=False)._spec for n in (9, 16))
        assert uneven.use_strided_shard_as_shard_order and tensor_specs.shard_order(uneven) == (
            (0, (1, 0)),
        )
        assert reading.readings(uneven)[1] is not None and reading.readings(even)[1] is None


def test_sizes_that_neither_gives_are_refused_on_every_rank():
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        parts = LocalTensor({rank: torch.zeros(5, 3) for rank in range(8)})
        tensor = DTensor.from_local(
            parts,
            mesh_of(MESH),
            PLACEMENTS,
            run_check=False,
            shape=torch.Size((9, 3)),
            stride=(3, 1),
        )
        with pytest.raises(RuntimeError, match="neither reading"):
            tensor.full_tensor()


@pytest.mark.parametrize("by_order", [True, False])
def test_views_hold_in_both_readings(by_order):
    full = torch.arange(27.0).reshape(9, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        # Whole dims keep their cuts, whatever these mean.
        turned = laid(full, by_order).t()
        assert tuple(turned.placements) == (_StridedShard(1, split_factor=2), Shard(1))
        assert all(
            torch.equal(local, full.t())
            for local in everywhere(turned.redistribute(placements=[Replicate(), Replicate()]))
        )
        # A view is given local sizes, and these are one reading's. Torch runs it all the same,
        # rightly where it happens to be that one: so it is not refused, and of a replica it is
        # right in both.
        viewed = laid(full, by_order).view(9, 3, 1)
        assert tuple(viewed.placements) == (Replicate(), Replicate())
        assert all(torch.equal(local, full.view(9, 3, 1)) for local in everywhere(viewed))
    refusing = cute_sharding.enabled(implicit_redistribution="error")
    with (
        ranks_of(MESH),
        refusing,
        pytest.raises(RuntimeError, match=r"cannot be done without|left to"),
    ):
        laid(full, by_order).view(27)  # rows that are flattened would not be free in any
    with ranks_of(MESH), cute_sharding.enabled(implicit_redistribution="cheapest"):
        assert all(
            torch.equal(local, full.view(9, 3, 1))
            for local in everywhere(laid(full, by_order).view(9, 3, 1))
        )
        flat = laid(full, by_order).view(27)
        assert tuple(flat.placements) == (Replicate(), Replicate())
        assert all(torch.equal(local, full.view(27)) for local in everywhere(flat))


def test_what_divides_is_not_asked_about():
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


def test_where_sizes_cannot_tell_nothing_is_guessed():
    mesh, placements = (2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]
    shape, plain, ordered = (9,), (((0, 6), (1, 2), (2, 1)),), (((2, 1), (1, 1), (0, 1)),)
    assert not reading._shapes_tell(shape, (2, 3, 2), plain, ordered)
    with (
        ranks_of(mesh),
        cute_sharding.enabled(redistribution=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(reading, "_shapes_tell", lambda *_: False)
        with pytest.raises(RuntimeError, match="nothing tells which"):
            distribute(torch.arange(5.0), mesh, placements).full_tensor()


def test_ranks_ask_one_another_once(monkeypatch):
    """Of a tensor that is gathered in every step, the first time; of what redistribution made,
    never.
    """
    asked = []
    fits = reading._fits
    monkeypatch.setattr(
        reading, "_fits", lambda spec, *args: (asked.append(spec), fits(spec, *args))[1]
    )
    full = torch.arange(27.0).reshape(9, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True):
        tensor = laid(full, by_order=True)
        for _ in range(3):
            assert all(
                torch.equal(local, full)
                for local in everywhere(tensor.redistribute(placements=[Replicate(), Replicate()]))
            )
        assert len(asked) == 1
        made = distribute(full, MESH, [Replicate(), Replicate()]).redistribute(
            placements=PLACEMENTS
        )
        made.full_tensor()
        assert len(asked) == 1


@pytest.mark.parametrize("imagined", ["meta", "fake"])
def test_where_there_is_no_data_nobody_is_asked(imagined, monkeypatch):
    """A module on meta, or a dry run: as torch reads it, in the order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(reading, "_fits", None)
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
        assert reading.readings(tensor._spec)[1] is not None
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
def test_what_movements_give_is_read_in_one_way(name, program, redistribution):
    """16 rows are the same in both readings, 9 and 17 are not, and torch reads them as an order."""
    full = torch.arange(48.0).reshape(16, 3)
    with plain():
        leaf = full.clone().requires_grad_()
        wanted = program(leaf)
        (wanted_gradient,) = torch.autograd.grad((wanted * wanted).sum(), leaf)
    with ranks_of(MESH), cute_sharding.enabled(movement=True, redistribution=redistribution):
        x = laid(full, by_order=False).requires_grad_()
        result = program(x)
        assert reading.readings(result._spec)[1] is None
        (gradient,) = torch.autograd.grad((result * result).sum(), x)
        for found, whole in ((result, wanted.detach()), (gradient, wanted_gradient)):
            replica = found.redistribute(placements=[Replicate(), Replicate()])
            assert all(torch.equal(local, whole) for local in everywhere(replica)), name


@pytest.mark.parametrize("movement", [False, True])
@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("stack", lambda x, y: torch.stack([x, y])),
        ("cat", lambda x, y: torch.cat([x, y])),
        ("slice", lambda x, y: torch.cat([x[1:], y[:3]])),
        ("flip", lambda x, y: torch.stack([x.flip(0), y], 1)),
    ],
)
def test_tensors_of_both_readings_meet(name, program, movement):
    """The spec is one, and so no rule that reads specs alone may keep such cuts beside one another:
    torch keeps them, and then raises, or has the rows of one beside others of the other.
    """
    one, other = torch.arange(27.0).reshape(9, 3), 100 + torch.arange(27.0).reshape(9, 3)
    with ranks_of(MESH), cute_sharding.enabled(redistribution=True, movement=movement):
        x, y = laid(one, by_order=True), laid(other, by_order=False)
        assert tuple(x.placements) == tuple(y.placements)
        result = program(x, y).redistribute(placements=[Replicate(), Replicate()])
        assert all(torch.equal(local, program(one, other)) for local in everywhere(result)), name
