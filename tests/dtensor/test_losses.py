"""Losses: what a mean is taken of, what a gradient reads, and rows that are ignored."""

import pytest
import torch
import torch.nn.functional as F
from op_programs import S, assert_close, compare, values
from simulation import assert_holds, distribute, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_means_on_even_shards(reduction):
    """torch divides by the elements of a shard."""
    for cut in ([Shard(0)], [Shard(1)]):
        with ranks_of((2,)):
            compare(
                lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
                [values(4, 6), values(4, 6)],
                (2,),
                [[Replicate()], cut],
                f"{cut} {reduction}",
            )


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_gradients_of_mean_losses_on_even_shards(loss):
    for cut in ([Shard(0)], [Shard(1)]):
        with ranks_of((2,)):
            compare(
                loss,
                [values(4, 6), values(6, 4).t() + 1],
                (2,),
                [cut, [Replicate()]],
                f"{loss} {cut}",
            )


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("cut", [Shard(0), S(0)], ids=str)
def test_the_weight_of_all_rows_is_not_finished_for_gradients_that_do_not_read_it(cut, reduction):
    target = torch.tensor([0, 1, 2, -100, 1, 0, 2, 2])
    with plain():
        expected = values(8, 3).requires_grad_()
        F.cross_entropy(expected, target, reduction=reduction).sum().backward()
    with ranks_of((5,)), cute_sharding.enabled(), CommDebugMode() as sent:
        x = distribute(values(8, 3), (5,), [cut], True)
        F.cross_entropy(x, distribute(target, (5,), [cut]), reduction=reduction).sum().backward()
        assert sent.get_total_counts() == 0
    with ranks_of((5,)):
        assert x.grad.placements == x.placements
        assert_holds(x.grad, expected.grad)


def test_ignored_rows_after_a_view_that_is_free_here_alone():
    with plain():
        target = torch.tensor([-100, -100, 1, 2])
        expected = F.cross_entropy(values(6, 4).t(), target)
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(6, 4), (2,), [Shard(1)]).view(2, 12).view(6, 4).t()
        assert_close(
            F.cross_entropy(x, distribute(target, (2,), [Replicate()])), expected, "ignored rows"
        )
