"""What ops receive: no more than torch's, and nothing where only sizes are read or told."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from op_programs import S, assert_close, values
from simulation import assert_holds, distribute, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from benchmarks.received import Received


@pytest.mark.parametrize(
    ("op", "received"),
    [
        # All columns of a quarter of the rows: in each, half of the columns is missing.
        (F.glu, 8),
        # For which torch receives half of them.
        (lambda x: F.pad(x, (1, 2)), 8),
    ],
    ids=["glu", "pad"],
)
def test_something_else_is_cut_where_torch_would_do_so_for_less(op, received):
    full, placements = values(2, 4, 8), [Shard(2), Replicate()]
    with plain():
        alone = full.clone().requires_grad_()
        op(alone).sum().backward()
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute(full, (2, 2), placements, requires_grad=True)
        with Received() as counted:
            result = op(x)
        assert max(counted.by_rank.values()) == received
        assert isinstance(result.placements[1], Shard), "where there was a replica"
        result.sum().backward()
        assert_holds(result, op(full))
        assert_holds(x.grad, alone.grad)


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda x: F.adaptive_avg_pool2d(x, (5, 3)), (4, 6, 8)),
        (lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), (4, 2, 6, 8)),
        (lambda x: F.max_pool3d(x, 2), (4, 2, 4, 6, 8)),
    ],
    ids=["average pool", "reflection", "max pool"],
)
def test_gradients_that_read_sizes_alone_receive_nothing(op, shape):
    """What was pooled is cut in dims that the gradient needs whole: of their sizes alone."""
    full, placements = values(*shape), [Shard(0), S(len(shape) - 1)]
    with plain():
        alone = full.clone().requires_grad_()
        op(alone).sum().backward()
    with ranks_of((2, 2)), cute_sharding.enabled():
        x = distribute(full, (2, 2), placements, requires_grad=True)
        result = op(x)
        with Received() as counted:
            result.backward(torch.ones_like(result))
        assert not any(counted.by_rank.values())
        assert_holds(x.grad.redistribute(placements=[Replicate()] * 2), alone.grad)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: F.group_norm(x, 2),
        lambda x: F.interpolate(x, (5, 3), mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=2),
    ],
    ids=["group norm", "bilinear", "nearest"],
)
@pytest.mark.parametrize("placement", [Shard(0), S(0, 3)], ids=str)
def test_ops_that_are_told_sizes_are_told_those_of_their_own(op, placement):
    """Batches of seven images, on two devices."""
    full = values(7, 4, 4, 6)
    with plain():
        alone = full.clone().requires_grad_()
        expected = op(alone)
        (expected * expected).sum().backward()
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [placement], requires_grad=True)
        with CommDebugMode() as communicated:
            result = op(x)
            (result * result).backward(torch.ones_like(result))
        assert communicated.get_total_counts() == 0
        assert list(result.placements) == [placement]
        assert_close(result, expected, "result")
        assert_close(x.grad, alone.grad, "gradient")


def test_rows_fewer_than_devices_stay_cut():
    """torch would gather these for each op that brings another operand to the same cut."""
    full, other = values(2, 6), values(6, 2).t().contiguous()
    with ranks_of((4,)):
        x = distribute(full, (4,), [Shard(0)])
        whole = distribute(other, (4,), [Replicate()])
        with CommDebugMode() as as_in_torch:
            (x * 2 + whole).sum(1)
    with ranks_of((4,)), cute_sharding.enabled():
        whole = distribute(other, (4,), [Replicate()])
        y = distribute(values(2, 3, 2), (4,), [Shard(0)]).view(2, 6) * 3
        with CommDebugMode() as communicated:
            result = (y - whole).sum(1)
        assert as_in_torch.get_total_counts() == 1
        assert communicated.get_total_counts() == 0
        assert_close(result, (values(2, 3, 2).view(2, 6) * 3 - other).sum(1), "rows")


def test_where_torch_says_a_shard_in_another_way():
    """As a _StridedShard of factor one, of which its rules cut something else than of ours."""
    full = values(2, 3, 2, 2, 4)
    resized = partial(F.interpolate, size=3, mode="bicubic")

    def received():
        x = distribute(full, (2, 2), [Shard(2), Shard(3)])
        with Received() as counted:
            result = resized(x.view(2, 3, 4, 4))
        return max(counted.by_rank.values()), result

    with plain():
        expected = resized(full.view(2, 3, 4, 4))
    with ranks_of((2, 2)):
        on_stock, _ = received()
        with cute_sharding.enabled():
            here, result = received()
            assert here <= on_stock
            assert_close(result, expected, "resized")


def test_operands_are_brought_by_plan_where_torch_says_a_shard_in_another_way():
    """They are cut in rows and in columns: torch's own way is to gather, and cut again."""
    full, other = values(5, 2, 5, 5), values(5, 10, 5)

    def received():
        x = distribute(full, (2, 3), [Shard(1), Shard(2)])
        y = distribute(other, (2, 3), [Replicate(), Shard(2)])
        with Received() as counted:
            result = x.view(5, 10, 5).clamp(y)
        return max(counted.by_rank.values()), result

    with ranks_of((2, 3)):
        on_stock, _ = received()
        with cute_sharding.enabled():
            here, result = received()
            assert here < on_stock
            assert_close(result, full.view(5, 10, 5).clamp(other), "clamped")


def test_no_rule_receives_at_most_torchs_in_every_program():
    """Unless it gathers at the view. These two are the same up to ``y``: in the first nothing needs
    to be received, and in the second what was not is received of ``x`` and of ``y``.
    """

    def received(goes_on):
        x = distribute(values(6, 4), (2,), [Shard(1)])
        with Received() as counted:
            x = x.view(2, 12)
            y = 2 * x
            if goes_on:
                x.softmax(1), y.softmax(1)
        return max(counted.by_rank.values(), default=0)

    with ranks_of((2,)):
        on_stock = received(False), received(True)
        with cute_sharding.enabled():
            here = received(False), received(True)
    assert on_stock == (12, 12)
    # Each softmax exchanges a maximum and a sum of each of its two rows.
    assert here == (0, 8)


@pytest.mark.parametrize(
    "centred",
    [lambda x: x - x.mean(0), lambda x: x * x.mean(0, keepdim=True), lambda x: x / x.abs().mean()],
    ids=["less the mean", "times the mean", "by the mean"],
)
def test_what_meets_something_pending_stays_cut(centred):
    """The mean is finished, one row; torch gathers all that it meets."""
    full = values(18, 5)
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(full, (4,), [Shard(0)])
        with Received() as counted:
            result = centred(x)
        assert result.placements == (Shard(0),)
        assert max(counted.by_rank.values()) <= 2 * 5
        assert_close(result, centred(full), "centred")


ALONG = {
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "sort": lambda x, d: x.sort(d)[0],
    "argsort": lambda x, d: x.argsort(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "cummax": lambda x, d: x.cummax(d)[0],
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "topk": lambda x, d: x.topk(3, d)[0],
    "kthvalue": lambda x, d: x.kthvalue(3, d)[0],
    "median": lambda x, d: x.median(d)[0],
    "fft": lambda x, d: torch.fft.fft(x, dim=d).real,
    "normalize": lambda x, d: torch.nn.functional.layer_norm(x.mT if d == 0 else x, (16,)),
}


@pytest.mark.parametrize("name", ALONG)
def test_a_shard_of_a_whole_dim_moves_to_a_free_one(name):
    """Each device receives its rows of the other dim, and not the whole tensor."""
    call, full, n = ALONG[name], values(16, 16), 4
    with ranks_of((n,)):
        for d in (0, 1):
            x = distribute(full, (n,), [Shard(d)])
            with cute_sharding.enabled(), Received() as counted:
                found = call(x, d)
            assert_close(found, call(full, d), f"along {d}")
            most = full.numel() * (n - 1) // n**2
            assert max(counted.by_rank.values(), default=0) <= most, (d, counted.by_rank)
