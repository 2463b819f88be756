"""Which elements a rank holds, as boxes: against local tensors that the reference has cut, against
torch's own offsets, and of specs that encode an order of mesh dims.
"""

import random
from itertools import count
from math import prod

import numpy as np
import pytest
import torch
from readings import MESH, laid
from simulation import distribute, mesh_of, of_wrong_shape, placement_of, plain, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cute_sharding import Box, intersection, local_boxes
from cute_sharding.dtensor.replaced.tensor_specs import unbound_spec

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (1, 3), (2, 2, 2), (1, 2, 3)]
SHAPES = [(), (0,), (1,), (7,), (12,), (31,), (4, 6), (5, 1), (13, 9), (8, 0), (3, 4, 5), (24, 10)]


def drawn(seed):
    rng = random.Random(seed)
    shape, mesh = rng.choice(SHAPES), rng.choice(MESHES)
    cuts = [
        (rng.randrange(len(shape)), rng.choice([1, 1, 2, 3, rng.randint(1, 9)]))
        if shape and rng.random() < 0.8
        else None
        for _ in mesh
    ]
    placements = [
        Partial() if cut is None and rng.random() < 0.3 else placement_of(cut) for cut in cuts
    ]
    return shape, mesh, placements


def filled(boxes, full, shape):
    """A local tensor of ``shape`` with what the boxes say of ``full``, each by one copy."""
    local = torch.full(shape, -1.0)
    for box in boxes:
        view, theirs = (
            tensor.as_strided(*of(tensor.stride()))
            for tensor, of in ((local, box.local_view), (full, box.global_view))
        )
        assert (view == -1).all(), "an element is in two boxes"
        view.copy_(theirs)
    return local


def assert_boxes_are_right(tensor, full):
    for rank, local in tensor._local_tensor._local_tensors.items():
        found = local_boxes(tensor, rank)
        with plain():
            assert sum(box.elements for box in found) == local.numel()
            assert torch.equal(filled(found, full, local.shape), local), (rank, tensor._spec)


def numbered(shape):
    return torch.arange(float(prod(shape))).reshape(shape)


@pytest.mark.parametrize("seed", range(150))
def test_boxes_of_local_tensors(seed):
    shape, mesh, placements = drawn(seed)
    with ranks_of(mesh):
        tensor = distribute(numbered(shape), mesh, placements)
        assert_boxes_are_right(tensor, numbered(shape))
        pending = tuple("sum" for p, n in zip(placements, mesh) if p == Partial() and n > 1)
        for rank in range(prod(mesh)):
            found = local_boxes(tensor, rank)
            assert all(box.pending == pending for box in found)
            assert found == local_boxes(tensor._spec, rank)


def read_left_to_right(shape, mesh, placements):
    """Torch takes strided shards that a program made for an order."""
    spec = unbound_spec(shape, mesh, placements)
    return DTensorSpec(
        spec.mesh, spec.placements, spec.tensor_meta, use_strided_shard_as_shard_order=False
    )


@pytest.mark.parametrize("seed", range(60))
def test_copies_by_intersection(seed):
    """From the local tensors of one sharding to those of another, on another mesh."""
    shape, mesh, placements = drawn(seed)
    others = (drawn(1000 * i + seed) for i in count(1))
    _, onto, wanted = next(other for other in others if other[0] == shape)
    full = numbered(shape)
    one, other = (
        read_left_to_right(shape, mesh, placements),
        read_left_to_right(shape, onto, wanted),
    )
    for rank in range(prod(onto)):
        needed = local_boxes(other, rank)
        copied = torch.zeros(shape)
        for peer in range(prod(mesh)):
            for mine, its in intersection(local_boxes(one, peer), needed):
                a, b = (copied.as_strided(*box.global_view(copied.stride())) for box in (mine, its))
                assert torch.equal(a, b) and a.shape == b.shape
                a.copy_(full.as_strided(*its.global_view(full.stride())))
        expected = torch.zeros(shape)
        for box in needed:
            for part in box.contiguous():
                expected[part.global_slices] = full[part.global_slices]
        assert torch.equal(copied, expected), (one, other, rank)


@pytest.mark.parametrize("seed", range(40))
def test_plain_shards_are_where_torch_has_them(seed):
    rng = random.Random(seed)
    shape, mesh = rng.choice(SHAPES[2:]), rng.choice(MESHES)
    placements = [
        Shard(rng.randrange(len(shape))) if rng.random() < 0.7 else Replicate() for _ in mesh
    ]
    spec = unbound_spec(shape, mesh, placements)
    for rank, device in enumerate(np.ndindex(mesh)):
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, device, placements)
        expected = (Box(offset, size, (0,) * len(shape)),) if prod(size) else ()
        assert local_boxes(spec, rank) == expected


# -- orders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 9, 11, 16, 17])
def test_split_factors_that_encode_an_order(n):
    full = numbered((n, 3))
    with ranks_of(MESH):
        assert_boxes_are_right(laid(full), full)
        assert local_boxes(laid(full)._spec, 0) == local_boxes(laid(full), 0)


# -- meshes ----------------------------------------------------------------------------------------


def spec_on(mesh, shape, placements):
    meta = TensorMeta(torch.Size(shape), numbered(shape).stride(), torch.float32)
    return DTensorSpec(mesh, tuple(placements), meta)


def mesh_without_groups(ranks, rank):
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=rank)


def rows_of(boxes):
    return [(box.global_offset[0], box.size[0]) for box in boxes]


def test_ranks_lie_as_the_mesh_says():
    spec = spec_on(mesh_without_groups([[5, 2], [7, 0]], 7), (8,), [Shard(0), Shard(0)])
    found = {rank: rows_of(local_boxes(spec, rank)) for rank in range(8)}
    assert found == {rank: [] for rank in (1, 3, 4, 6)} | {
        5: [(0, 2)],
        2: [(2, 2)],
        7: [(4, 2)],
        0: [(6, 2)],
    }
    assert rows_of(local_boxes(spec)) == [(4, 2)]


def test_ranks_outside_hold_nothing():
    spec = spec_on(mesh_without_groups([2, 1], 4), (8,), [Shard(0)])
    assert local_boxes(spec) == () == local_boxes(spec, 4)
    assert rows_of(local_boxes(spec, 1)) == [(4, 4)]


def test_a_sub_mesh_is_its_slice():
    """Ranks of other slices have tensors of their own."""
    mesh = mesh_of((2, 3), ("dp", "tp"))
    spec = spec_on(mesh["tp"], (6,), [Shard(0)])
    assert [rows_of(local_boxes(spec, rank)) for rank in range(6)] == [
        [(0, 2)],
        [(2, 2)],
        [(4, 2)],
        [],
        [],
        [],
    ]
    assert rows_of(local_boxes(spec)) == [(0, 2)]


def test_this_rank_by_default():
    x = DTensor.from_local(torch.ones(4, 3), mesh_of((4,)), [Shard(1)])
    assert local_boxes(x) == (Box((0, 0), (4, 3), (0, 0)),)


# -- what is no answer -----------------------------------------------------------------------------


class Ragged(Placement):
    pass


class Shifted(Shard):
    pass


@pytest.mark.parametrize("kind", [Ragged(), Shifted(0)])
def test_placements_that_are_not_known(kind):
    spec = spec_on(mesh_without_groups([0, 1], 0), (8,), [kind])
    with pytest.raises(
        ValueError, match=f"does not know which rows .* of class {type(kind).__name__}"
    ):
        local_boxes(spec)


def test_local_tensors_of_other_sizes():
    """As those that a program shares out 70 to 30."""
    with ranks_of((2,)):
        tensor = of_wrong_shape((2,), torch.ones(7), torch.ones(10), [Shard(0)])
        with pytest.raises(ValueError, match=r"\(7,\), .* \(5,\). The DTensor has shape \(10,\)"):
            local_boxes(tensor, 0)


def test_symbols():
    n = ShapeEnv().create_unbacked_symint()
    meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
    spec = DTensorSpec(mesh_without_groups([0, 1], 0), (Shard(0),), meta)
    spec.tensor_meta = meta._replace(shape=(n,))
    with pytest.raises(ValueError, match="symbols while a program is compiled"):
        local_boxes(spec)


def test_neither_tensor_nor_spec():
    with pytest.raises(TypeError, match="takes a DTensor or a DTensorSpec, not a Tensor"):
        local_boxes(torch.ones(3))


def test_all_ranks_in_one_process():
    with ranks_of((2,)):
        tensor = distribute(numbered((4,)), (2,), [_StridedShard(0, split_factor=2)])
        with pytest.raises(ValueError, match="give a rank, such as rank=0"):
            local_boxes(tensor)


def test_many_devices():
    """A rank is found without going through the mesh again, and its rows in few steps."""
    spec = unbound_spec((2**40, 4), (512, 256), [_StridedShard(0, split_factor=2**20), Shard(0)])
    for rank in (0, 77_777, 131_071):
        (box,) = local_boxes(spec, rank)
        assert box.elements == 2**42 // 131_072 and box.count == 2**12
