"""Ops that are no views: torch's own strategies, asked in a shorter way where weighing every
placement takes long; and slices of whole dims.
"""

import sys

import pytest
import torch
from simulation import mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops import single_dim_strategy, utils
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas

aten = torch.ops.aten


def strided(mesh, placements, shape, target):
    """What a view makes: _StridedShard placements that apply left to right."""
    with cute_sharding.enabled():
        viewed = distribute_tensor(
            torch.zeros(shape), mesh_of(mesh), placements, src_data_rank=None
        ).view(target)
    assert any(isinstance(p, _StridedShard) for p in viewed.placements)
    return viewed


def declared(mesh, placements, shape):
    """What a user makes: _StridedShard placements that say a shard order."""
    return distribute_tensor(torch.zeros(shape), mesh_of(mesh), placements, src_data_rank=None)


TENSORS = {
    "8": lambda: strided((8,), [Shard(1)], (2, 16, 3), (32, 3)),
    "2x2": lambda: strided((2, 2), [Shard(0), Shard(1)], (4, 6, 3), (24, 3)),
    "2x2 beside a shard": lambda: strided((2, 2), [Shard(1), Shard(2)], (4, 6, 8), (24, 8)),
    "2x2 beside a replica": lambda: strided((2, 2), [Replicate(), Shard(1)], (4, 6, 3), (24, 3)),
    "2x2 in a shard order": lambda: declared(
        (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (8, 3)
    ),
}
OPS = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "mul": lambda x: x * 2,
    "add": lambda x: x + x,
    "add of a replica": lambda x: (
        x + declared(x.device_mesh.shape, [Replicate()] * x.device_mesh.ndim, x.shape)
    ),
    "add of a shard": lambda x: (
        x
        + declared(
            x.device_mesh.shape, [Replicate()] * (x.device_mesh.ndim - 1) + [Shard(0)], x.shape
        )
    ),
    "add in place": lambda x: x.clone().add_(1),
    "sum of rows": lambda x: x.sum(0),
    "sum of columns": lambda x: x.sum(1),
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: x.mean(1),
    "maximum": lambda x: x.max(),
    "softmax": lambda x: x.softmax(1),
    "slice": lambda x: x[1:],
    "slice of columns": lambda x: x[:, :1],
    "product": lambda x: (
        x @ declared(x.device_mesh.shape, [Replicate()] * x.device_mesh.ndim, (x.shape[1], 2))
    ),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tensor", TENSORS)
def test_ops_choose_the_placements_that_torch_chooses(tensor, op):
    x = TENSORS[tensor]()
    op_schemas.clear_propagation_caches()

    def outcome():
        try:
            result = OPS[op](x)
        except (RuntimeError, NotImplementedError) as error:
            return type(error), str(error)
        return (
            result.placements,
            result._spec.use_strided_shard_as_shard_order,
            result._spec.shard_order,
        )

    expected = outcome()
    with cute_sharding.enabled(views=False, redistribution=True):
        assert outcome() == expected


@pytest.mark.parametrize("op", ["detach", "mul", "add", "clone"])
def test_an_op_on_what_a_view_made_is_not_weighed_against_every_other_placement(op, monkeypatch):
    """That is a search for each of a thousand, and takes up to half a minute."""
    x = strided((2, 2, 2), [Shard(0), Shard(1), Shard(2)], (4, 16, 8), (512,))

    def weigh(*args, **options):
        raise AssertionError("every combination of placements is weighed")

    monkeypatch.setattr(utils, "expand_to_full_mesh_op_strategy", weigh)
    with cute_sharding.enabled():
        assert OPS[op](x).placements == x.placements


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("rows", [7, 8])
def test_a_compiled_mean_of_uneven_rows_is_not_a_mean_of_means(rows, dynamic):
    with cute_sharding.enabled():
        x = distribute_tensor(torch.ones(rows, 3), mesh_of((4,)), [Shard(0)], src_data_rank=None)
        expected = x.mean(0).placements
        torch._dynamo.reset()
        assert (
            torch.compile(
                lambda x: x.mean(0), backend="aot_eager", fullgraph=True, dynamic=dynamic
            )(x).placements
            == expected
        )
        torch._dynamo.reset()
    if rows == 7:
        assert expected != (Partial("avg"),)


# -- slices ----------------------------------------------------------------------------------------


def part(placements, shape, mesh=(4,)):
    return distribute_tensor(
        torch.arange(float(torch.Size(shape).numel())).reshape(shape),
        mesh_of(mesh),
        placements,
        src_data_rank=None,
    )


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0)],
        [Shard(1)],
        [Replicate()],
        [Partial()],
        [Partial("max")],
        [_StridedShard(0, split_factor=2)],
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(8, 6), (7, 6)])
def test_slices_of_whole_dims_leave_placements_alone(shape, placements):
    x = part([Replicate() if isinstance(p, Partial) else p for p in placements], shape)
    x = DTensor.from_local(
        x.to_local(), x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    with cute_sharding.enabled():
        for call in (
            lambda: aten.slice.Tensor(x, 0),
            lambda: aten.slice.Tensor(x, 0, 0, sys.maxsize),
            lambda: aten.slice.Tensor(x, 0, None, None),
            lambda: aten.slice_backward.default(x, list(shape), 0, 0, sys.maxsize, 1),
        ):
            found = call()
            assert found.placements == x.placements and found.shape == x.shape
            assert torch.equal(found.to_local(), x.to_local())


def test_other_slices_are_torchs():
    """Of a dim that is cut less is received for results that are cut along the other."""
    calls = [
        (lambda x, d: aten.slice.Tensor(x, d, 1, 4), (8, 6)),
        (lambda x, d: aten.slice.Tensor(x, d, 0, sys.maxsize, 2), (8, 6)),
        (
            lambda x, d: aten.slice_backward.default(
                x, [8 if d == 0 else 4, 8 if d else 4], d, 0, 4, 1
            ),
            (4, 4),
        ),
    ]
    for call, shape in calls:
        for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
            for d in (0, 1):
                expected = call(part(placements, shape), d)
                with cute_sharding.enabled():
                    found = call(part(placements, shape), d)
                assert found.shape == expected.shape
                if placements == [Shard(d)] and expected.placements == (Replicate(),):
                    assert found.placements in (expected.placements, (Shard(1 - d),))
                    continue
                assert found.placements == expected.placements
                assert found.to_local().shape == expected.to_local().shape


def test_torch_has_what_is_weighed():
    """The tests above watch a function by name."""
    assert callable(utils.expand_to_full_mesh_op_strategy) and callable(
        single_dim_strategy._expand_single_dim_strategy_to_mesh
    )
