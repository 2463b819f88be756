"""Ops without a rule of their own: torch derives one by tracing the op's decomposition on a
stand-in mesh of one device.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from op_programs import assert_close
from simulation import distribute, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

OPS = {
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "group_norm": lambda x: F.group_norm(x, 4),
}


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("name", OPS)
def test_what_is_right_on_one_device_is_not_taken_for_right_on_four(name, dim):
    full = torch.arange(4.0 * 16 * 8 * 8).reshape(
        4, 16, 8, 8
    )  # rows of 2 on each device: torch's own rule needs them whole
    want = OPS[name](full)

    with ranks_of((4,)), cute_sharding.enabled():
        result = OPS[name](distribute(full, (4,), (Shard(dim),)))
        torch.testing.assert_close(result.full_tensor().reconcile(), want)


CUTS = [Replicate(), Shard(0), Shard(2), Shard(3), _StridedShard(0, split_factor=3)]


@pytest.mark.parametrize("movement", [False, True])
@pytest.mark.parametrize("first", CUTS, ids=str)
def test_a_squeezed_copy_loses_dims_of_the_tensor_alone(first, movement):
    """Not those that have one row on some device; and it is in memory of its own."""
    full = torch.arange(25.0).reshape(5, 1, 5, 1)
    squeezes = [
        torch.squeeze_copy,
        lambda x: torch.squeeze_copy(x, 1),
        lambda x: torch.squeeze_copy(x, (1, 3)),
    ]
    for placements in product([first], CUTS[:4]):
        for squeeze in squeezes:
            with ranks_of((2, 2)), cute_sharding.enabled(movement=movement, redistribution=True):
                x = distribute(full, (2, 2), placements).requires_grad_()
                result = squeeze(x)
                (gradient,) = torch.autograd.grad((result * result).sum(), x)
                with torch.no_grad():
                    copied = squeeze(x).mul_(2)
                for found, wanted in (
                    (result, squeeze(full)),
                    (gradient, 2 * full),
                    (copied, 2 * squeeze(full)),
                    (x.detach(), full),
                ):
                    assert_close(found.detach(), wanted, str(placements))


@pytest.mark.parametrize("movement", [False, True])
def test_what_is_made_by_views_alone_is_in_memory_of_its_own(movement):
    """Also where a permutation moves nothing but dims of one row; and it lies row by row."""
    cases = [
        (lambda x: F.pixel_shuffle(x, 1), (2, 2, 2), Shard(0)),
        (lambda x: F.pixel_shuffle(x, 2), (4, 16, 1, 1), Shard(0)),
        (lambda x: F.pixel_unshuffle(x, 2), (4, 3, 2, 2), Shard(0)),
        (lambda x: torch.squeeze_copy(x.transpose(0, 1)), (4, 8), Shard(1)),
        (lambda x: F.channel_shuffle(x, 1), (2, 4, 2), Shard(0)),
        (lambda x: F.channel_shuffle(x, 4), (2, 4, 2, 2), Shard(0)),
    ]
    for op, shape, cut in cases:
        full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        with ranks_of((2,)), cute_sharding.enabled(movement=movement):
            x = distribute(full, (2,), [cut])
            result = op(x)
            locals_ = result._local_tensor._local_tensors.values()
            assert all(local.is_contiguous() for local in locals_)
            result.add_(100)
            assert_close(x, full, str(shape))
            assert_close(result, op(full) + 100, str(shape))


def test_what_is_pending_beside_strided_shards_stays_so():
    """Where the op leaves the cut dims as they are there is nothing to do for it."""
    full = torch.arange(8.0 * 4 * 9).reshape(8, 4, 9)
    with ranks_of((2, 2)), cute_sharding.enabled(movement=True):
        x = distribute(full, (2, 2), [Partial("max"), _StridedShard(1, split_factor=2)])
        for op in (lambda x: x[1:], lambda x: x.flip((0, 2)), lambda x: torch.cat([x, x])):
            with CommDebugMode() as communicated:
                result = op(x)
            assert tuple(result.placements) == tuple(x.placements)
            assert not communicated.get_total_counts()
            assert_close(result, op(full), "pending")


def test_channels_of_groups_that_are_cut_change_places_where_they_are():
    """A view, a permutation and a view: what is cut in groups, or in the channels of each."""
    full = torch.arange(2.0 * 12 * 3).reshape(2, 12, 3)
    for cut in (_StridedShard(1, split_factor=4), Shard(0)):
        with ranks_of((3,)), cute_sharding.enabled():
            x = distribute(full, (3,), [cut])
            with CommDebugMode() as communicated:
                result = F.channel_shuffle(x, 4)
            assert not communicated.get_total_counts()
            assert_close(result, F.channel_shuffle(full, 4), str(cut))
